"""The request in its three forms: what a client asks for, what crosses to the engine, and what the engine keeps.

`SamplingParams` and `EngineRequest` are immutable `msgspec` structs that cross the process border (R3.1).
`Request` is the engine's own record of one sequence and the only mutable per-sequence state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NoReturn

import msgspec


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End a request whose output repeats itself: a pattern of up to `max_pattern_size` tokens, `min_count` times in a row."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 3


GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag")
"""What a `GrammarSpec` may be. A grammar backend names those that it compiles in `Component.provides`."""
JSON_KINDS = ("json_schema", "json_object", "structural_tag")
"""Those that `GrammarSpec.any_whitespace` is about."""


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A language that the output must be in (`core.stages.grammar`). The front fills `backend` and `artifact` in, and drops
    `source`; where the model reasons, it sets `after` and `opening`, too."""

    kind: str  # one of GRAMMAR_KINDS
    # json_schema, structural_tag: JSON; choice: a JSON list of texts; regex, ebnf: as they are; json_object: ""
    source: str = ""
    any_whitespace: bool = True  # JSON: white space between its tokens, within the backend's bounds
    backend: str = ""  # the option of config group `grammars` that compiles it; "": the first that does
    artifact: bytes = b""  # what the backend made of it, by which it is loaded where the sampler runs
    after: str = ""  # it begins behind the first of these texts, and all before that is free; "": with the output
    opening: str = ""  # with `after`: an output that does not begin with this text is in the language from its start
    may_end: bool = False  # with `after`: the output may end without that text


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one request is sampled and ended. Names are OpenAI's, and vLLM's for the extensions.

    Bounds are checked where a request enters (frontend, renderer, admission); the engine trusts them.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # special tokens that are part of the text all the same: markers that a parser reads
    shown_token_ids: tuple[int, ...] = ()
    stream_interval: int = 0  # tokens per delta; 0: the detokenizer's own setting
    logprobs: int | None = None  # top alternatives per sampled token; 0: the sampled token alone
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # made by the renderer: each form of each bad word
    repetition_detection: RepetitionDetection | None = None
    grammar: GrammarSpec | None = None
    extra: dict[str, dict[str, Any]] = {}  # parameters of logits processors by name, checked at the edge

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One sequence to generate, as it crosses to the engine. A request with n > 1 becomes n of these."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # resolved by admission: the client's seed, or a random one
    choice: int = 0  # index among the n choices; part of the random stream
    priority: int = 0  # lower runs first
    tenant: str = ""
    cache_salt: str = ""
    arrival_time: float = 0.0  # time.monotonic() seconds; one clock for both processes of a machine
    deadline: float | None = None  # likewise: a request that has not been scheduled by then expires


class RequestStatus(IntEnum):
    """Life of a request. Everything after `FINISHED` marks an ended one, so `is_finished` is one comparison."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waits, to be computed again
    SWAPPED = 3  # waits, its KV (or the head of it) in host memory
    FINISHED = 10
    FINISHED_STOPPED = 11
    FINISHED_LENGTH = 12
    FINISHED_ABORTED = 13
    FINISHED_REPETITION = 14
    FINISHED_ERROR = 15
    FINISHED_EXPIRED = 16

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.FINISHED


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REPETITION = "repetition"
    ERROR = "error"
    EXPIRED = "expired"  # not scheduled before its deadline: nothing was computed for it


STATUS_OF_REASON = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.REPETITION: RequestStatus.FINISHED_REPETITION,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
    FinishReason.EXPIRED: RequestStatus.FINISHED_EXPIRED,
}


class ReadOnlyList(list[int]):
    """Ids that are read like any list, and changed by the engine alone. Slices, sums and copies are plain lists."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "prompt_token_ids, output_token_ids and block_table of a request are read only for plugins. A scheduler adds "
            "output with request.append_output(ids) (plugin API 1.1); a cache changes the block table of the request that it "
            "is called with, in that call; all others work on a copy: list(ids)"
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        """A copy is a plain list."""
        return list, (list(self),)


class ReadOnlyDict(dict[Any, Any]):
    """Entries that are read like any dict, and changed by nobody. Unions and copies are plain dicts."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("params of a request are read only for plugins; work on a copy: dict(entries)")

    update = setdefault = pop = popitem = clear = _refuse
    __setitem__ = __delitem__ = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[Any, Any]]]:
        """A copy is a plain dict."""
        return dict, (dict(self),)


NO_ENTRIES = ReadOnlyDict()


def sealed(params: SamplingParams) -> SamplingParams:
    """The same, and its dicts cannot be changed in place either."""
    bias, extra = params.logit_bias, params.extra
    return msgspec.structs.replace(
        params,
        logit_bias=ReadOnlyDict(bias) if bias else NO_ENTRIES,
        extra=ReadOnlyDict({name: ReadOnlyDict(values) for name, values in extra.items()}) if extra else NO_ENTRIES,
    )


class GroupTable(msgspec.Struct, frozen=True):
    """Blocks of a request in one group of layers beside the first: of positions [first * block_size, …), in order.

    What comes before has left the group's window, and its blocks are given back.
    """

    first: int
    blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine. Plugins read it; besides the framework, a scheduler and a cache change what is theirs.

    A scheduler: status, finish_reason, stop_reason, the five counts, first_scheduled_time and draft_token_ids, and output
    ids through `append_output`. A cache: block_table, group_tables and block_hashes.

    Invariant, checked by tests after every step:
    `0 <= num_cached_tokens <= num_computed_tokens <= num_prompt_tokens + num_output_tokens + num_pending_tokens`.

    `num_pending_tokens` counts positions that a step in flight will sample: with overlap the scheduler plans the next
    step before their ids are known. It is 0 between two steps of a synchronous engine.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    choice: int = 0
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    arrival_time: float = 0.0
    deadline: float | None = None  # monotonic seconds
    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)  # proposed by decode, verified by the sampler
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_computed_tokens: int = 0  # positions whose KV is written or scheduled to be
    num_cached_tokens: int = 0  # of those, taken from the prefix cache at first scheduling
    num_pending_tokens: int = 0
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)  # block ids in position order
    group_tables: tuple[GroupTable, ...] = ()  # of the groups of layers after the first, where there are several
    block_hashes: list[bytes] = field(default_factory=list)  # chain hashes of full blocks, filled by the cache
    first_scheduled_time: float | None = None

    def __post_init__(self) -> None:
        """Lists that are handed in stay their owner's."""
        if type(self.prompt_token_ids) is not ReadOnlyList:
            self.prompt_token_ids = ReadOnlyList(self.prompt_token_ids)
        self.output_token_ids = ReadOnlyList(self.output_token_ids)

    @classmethod
    def from_engine_request(cls, message: EngineRequest) -> Request:
        return cls(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            params=sealed(message.params),
            seed=message.seed,
            choice=message.choice,
            priority=message.priority,
            tenant=message.tenant,
            cache_salt=message.cache_salt,
            arrival_time=message.arrival_time,
            deadline=message.deadline,
        )

    def afresh(self, output_token_ids: Iterable[int] = ()) -> Request:
        """The same request as it was when it came, with this output, and nothing computed."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            seed=self.seed,
            choice=self.choice,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            arrival_time=self.arrival_time,
            deadline=self.deadline,
            output_token_ids=list(output_token_ids),
        )

    def append_output(self, token_ids: Iterable[int]) -> None:
        """The only way to add output: ids that a verdict kept, by the scheduler in `update`."""
        list.extend(self.output_token_ids, token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """What the scheduler lets `num_computed_tokens` catch up with: known ids, ids in flight, and drafts."""
        known = len(self.prompt_token_ids) + len(self.output_token_ids)  # asked for several times per chunk of a prompt
        return known + self.num_pending_tokens + len(self.draft_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    def token_ids(self, start: int, end: int) -> list[int]:
        """Ids of positions [start, end); a position whose id is still in flight is -1 (the runner fills it in)."""
        prompt = self.num_prompt_tokens
        ids = self.prompt_token_ids[start:end] if start < prompt else []
        if end <= prompt:
            return ids
        first = max(start - prompt, 0)
        ids = ids + self.output_token_ids[first : end - prompt]
        drafts_at = self.num_tokens + self.num_pending_tokens
        ids += [-1] * (min(end, drafts_at) - max(start, self.num_tokens))
        return ids + self.draft_token_ids[max(start - drafts_at, 0) : max(end - drafts_at, 0)]
