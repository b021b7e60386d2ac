"""What comes back: the engine's token deltas (wire structs) and the text that a frontend gives to a client."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from core.batch import TokenLogprobs
from core.request import FinishReason


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """New tokens of one sequence, engine -> front. The last three are told with the first tokens and with the last."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []  # for prompt positions 1..; whole list with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # set with finish_reason "error"
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_time: float | None = None  # monotonic seconds, first time in a batch


class StepStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One engine step in numbers. Times in seconds, by stage; gauges are read after the step."""

    step: int = 0
    num_requests: int = 0
    num_scheduled_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0  # prompt tokens of requests that started in this step and looked into the prefix cache
    num_cached_tokens: int = 0  # of these, found there
    running: int = 0
    waiting: int = 0
    swapped: int = 0  # waiting, with KV in host memory
    num_swapped_out_blocks: int = 0  # copied to host memory before this step
    num_swapped_in_blocks: int = 0  # and back
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    swap_blocks_free: int = 0  # of host memory
    swap_blocks_total: int = 0
    between_s: float = 0.0  # since the step before ended, while there was work: messages, hand-over of outputs
    schedule_s: float = 0.0  # stage 4 with the policies of 5 and 6
    build_s: float = 0.0  # ModelBatch
    forward_s: float = 0.0  # the model
    sample_s: float = 0.0  # stage 7
    output_s: float = 0.0  # stage 9 and the update of the scheduler
    detokenize_s: float = 0.0  # stage 8, filled in by the front

    @property
    def total_s(self) -> float:
        """Of the engine's loop: this step, and the time since the one before while there was work."""
        return self.between_s + self.schedule_s + self.build_s + self.forward_s + self.sample_s + self.output_s


class PluginIncident(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A component failed while it ran. `quarantined`: it is switched off until the next start."""

    group: str
    name: str
    plugin: str  # "plugin, wheel version"
    reason: str
    failures: int = 1  # of this component so far
    quarantined: bool = False


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    deltas: list[TokenDelta] = []
    stats: StepStats = msgspec.field(default_factory=StepStats)
    incidents: list[PluginIncident] = []


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Per request, in seconds since arrival. TTFT: first token; TPOT: (last - first) / (tokens - 1)."""

    queue: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """New text of one choice. `text` and `token_ids` are deltas; the concatenation of all deltas is the answer.

    `token_ids` counts every generated token, also those whose text is withheld or cut by a stop string.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    timings: Timings | None = None  # with the last delta of the choice


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What `Front.generate` yields: deltas of one or more choices; `finished` once, with the last one."""

    request_id: str
    outputs: tuple[CompletionOutput, ...]
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finished: bool = False
    usage: Usage | None = None  # with the last output only


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A stage's part of one request. Monotonic seconds of this machine, also of the engine process.

    `busy_s`: seconds in it that the stage worked, for this request or its batch mates; the rest is waiting.
    """

    stage: str
    start: float
    end: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended client request, for observers. `finish_reasons` has one entry per choice.

    `spans`: the stages it reached (all nine, when it got a token), in their order and without a gap: the first starts
    when the frontend began to read the request, the last ends with the last delta, the abort or the error. Stages 6 to 8
    overlap. Requests that are refused before they are admitted have no record.
    """

    request_id: str
    tenant: str
    finish_reasons: tuple[FinishReason, ...]
    usage: Usage
    timings: Timings
    num_preemptions: int = 0
    render_s: float = 0.0  # stage 2
    admit_s: float = 0.0  # stage 3
    error: str | None = None
    operation: str = "text_completion"  # or "chat": the prompt came as messages
    trace_context: str = ""  # the client's W3C traceparent
    spans: tuple[StageSpan, ...] = ()
