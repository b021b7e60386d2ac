"""Stage 1, frontend: wire format, auth, load awareness, disconnects.

A frontend turns a client's words into a `GenerateRequest` and the answer's `RequestOutput`s back into the client's format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from core.outputs import PluginIncident, RequestOutput, StepStats
from core.request import SamplingParams
from core.stages.renderer import Prompt, RenderedPrompt, Renderer
from core.stages.tool_parser import ToolParser, ToolStream

if TYPE_CHECKING:
    from core.metrics import Metrics
    from core.model.spec import ModelSpec
    from core.pipeline import PipelineDescription
    from core.stages.reasoning_parser import ReasoningParser

MAX_TTL_S = 86_400.0
MAX_RETRY_AFTER_S = 60.0  # that a client of an overloaded server is told


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call of a client, before rendering and admission."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    max_tokens: int | None = None  # None: what is left of the context
    max_tokens_param: str = "max_tokens"  # the client's field, for error messages
    grammar_param: str = "structured_outputs"  # likewise, of params.grammar
    grammar_backend_param: str = "structured_outputs.backend"  # and of its backend
    stream: bool = False
    tenant: str = ""  # derived from the API key on the server side, never from the body
    priority: int = 0
    cache_salt: str = ""
    received_time: float | None = None  # monotonic seconds, when the frontend began to read it
    trace_context: str = ""  # W3C traceparent, checked
    ttl: float | None = None  # seconds that it may wait until it is scheduled first; then it ends as overloaded


@dataclass(frozen=True, slots=True)
class Health:
    """`status` is one of starting, ok, frozen, dead, draining; `step_age` is seconds since the engine loop last turned."""

    status: str
    step_age: float
    detail: str = ""


OUTPUT_GUESS = 256.0  # tokens, of a sequence that may have more, before any has ended


@dataclass(frozen=True, slots=True)
class Load:
    """What admission looks at. Counts of sequences (choices), from the front's own table and the engine's last step.

    Queued are those without a token yet: they wait, or their prompt is being computed. The output of a sequence is expected
    to be as long as that of others was lately, or as its `max_tokens` where that is less.
    """

    in_flight: int = 0  # registered at the front and not ended; those that are being rendered, too
    running: int = 0
    waiting: int = 0
    prompt_tokens_in_flight: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    queued_prompt_tokens: int = 0
    queued_tokens: int = 0  # of these sequences' prompts and expected output
    mean_output_tokens: float = 0.0  # of sequences that have ended lately; 0: none has
    tokens_per_s: float = 0.0  # that the engine can do, seen while requests waited; 0: not known
    tenant: str = ""  # the caller's; "": it has none, and the next two are 0
    tenant_in_flight: int = 0
    tenant_tokens_in_flight: int = 0  # prompts and expected output
    num_tenants: int = 0  # with anything in flight; callers without a tenant are one

    @property
    def has_less_than_others(self) -> bool:
        """Whether the caller's tenant has less in flight than tenants have on average."""
        return bool(self.tenant) and self.tenant_in_flight * max(self.num_tenants, 1) < self.in_flight

    @property
    def queueing_s(self) -> float:
        """Seconds that a new sequence will wait before it runs, as far as is known; 0.0 where that is not.

        While requests wait, those ahead must be through with all their work, on average, before a place is free (Little's
        law: the queue's work over what is done per second). While none does, only prompts are before it.
        """
        if not self.tokens_per_s:
            return 0.0
        return (self.queued_tokens if self.waiting else self.queued_prompt_tokens) / self.tokens_per_s

    def expected_output(self, max_tokens: int) -> int:
        return min(max_tokens, max(round(self.mean_output_tokens or OUTPUT_GUESS), 1))

    def plus(self, num_sequences: int, num_prompt: int, max_tokens: int) -> Load:
        """With sequences of this tenant that are about to be registered, each of them with a prompt of so many tokens."""
        prompt, tokens = num_sequences * num_prompt, num_sequences * (num_prompt + self.expected_output(max_tokens))
        of_tenant = bool(self.tenant)
        return replace(
            self,
            in_flight=self.in_flight + num_sequences,
            prompt_tokens_in_flight=self.prompt_tokens_in_flight + prompt,
            queued_prompt_tokens=self.queued_prompt_tokens + prompt,
            queued_tokens=self.queued_tokens + tokens,
            tenant_in_flight=self.tenant_in_flight + of_tenant * num_sequences,
            tenant_tokens_in_flight=self.tenant_tokens_in_flight + of_tenant * tokens,
            num_tenants=max(self.num_tenants + (of_tenant and not self.tenant_in_flight), 1),
        )


class Deltas(Protocol):
    """The answer of one call as an async iterator. `aclose` may come at any time and ends the call."""

    def __aiter__(self) -> Deltas: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None: ...


class FrontToolParser(ToolParser, Protocol):
    """The selected tool parser as a frontend sees it."""

    def streams(self, tools: Sequence[Mapping[str, Any]], num: int) -> Sequence[ToolStream]:
        """One `stream` for each choice of a request, which share one copy of its tools."""
        ...


class FrontHalf(Protocol):
    """The front half of the pipeline (stages 2, 3, 8 and 9's text side) as a frontend sees it: `core.front.front.Front`."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def renderer(self) -> Renderer: ...

    @property
    def tool_parser(self) -> FrontToolParser:
        """Guarded: its streams raise GenerationError, and `stream` RequestError once it is switched off."""
        ...

    @property
    def reasoning_parser(self) -> ReasoningParser:
        """Guarded: its streams raise GenerationError; once it is switched off, all text is content."""
        ...

    async def render(self, prompt: Prompt) -> RenderedPrompt:
        """Render and tokenize in a worker thread. Raises RequestError."""
        ...

    def generate(self, request: GenerateRequest) -> Deltas:
        """Deltas until every choice has ended. Closing the iterator aborts the request and frees all it holds.

        Raises before the first delta: RequestError (4xx), OverloadedError (503); the latter also where a choice was not
        scheduled before its deadline (`ttl`), in place of an end with FinishReason.EXPIRED. At any time: EngineDeadError,
        GenerationError, whose message names the component that failed. After an error nothing more comes and nothing is
        held. A request that is malformed (types, NaN) is the frontend's failure: GenerationError.
        """
        ...

    async def generate_many(self, requests: list[GenerateRequest]) -> list[Deltas]:
        """Admit all or none (a list of prompts is one call): raises what `generate` raises before its first delta."""
        ...

    def health(self) -> Health: ...

    def load(self) -> Load: ...

    def stats(self) -> StepStats:
        """The last step's numbers."""
        ...

    def incidents(self) -> tuple[PluginIncident, ...]:
        """What components did wrong since the start, the latest of each; of the engine's, since it was (re)started."""
        ...

    async def reset_prefix_cache(self) -> bool: ...

    async def flush_observers(self) -> None:
        """Returns when the observers have seen all that has happened so far, or soon where one of them is slow."""
        ...


@dataclass(frozen=True, slots=True)
class FrontendContext:
    front: FrontHalf
    description: PipelineDescription  # the nine stages with plugin, wheel and version
    served_names: tuple[str, ...] = ()  # model names that a client may use; the first is the canonical one
    metrics: Metrics | None = None  # of this front; a frontend adds its own time to them
    drain_timeout: float = 0.0  # seconds that running requests get after SIGTERM
    grammar_parsers: tuple[str, ...] = ()  # installed tool parsers that know grammars, the selected one left out
    grammar_parser: str = ""  # the selected tool parser, where it knows grammars


class Frontend(Protocol):
    """Config group `frontend`. Built once per process, in the front process.

    Example::

        import asyncio
        import sys
        from contextlib import aclosing

        from core.errors import NonetError
        from core.request import SamplingParams
        from core.stages.frontend import FrontendContext, GenerateRequest
        from core.stages.renderer import TextPrompt
        from pydantic import BaseModel, ConfigDict, Field


        class Lines:
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")
                max_tokens: int = Field(default=32, ge=1)

            def __init__(self, settings: Settings, context: FrontendContext):
                self._settings, self._front = settings, context.front

            async def run(self) -> None:
                while line := await asyncio.to_thread(sys.stdin.readline):
                    print(await self.answer(line.strip()), flush=True)

            async def answer(self, prompt: str) -> str:
                params, most = SamplingParams(temperature=0), self._settings.max_tokens
                request, text = GenerateRequest("line", TextPrompt(prompt), params, max_tokens=most), ""
                try:
                    async with aclosing(self._front.generate(request)) as deltas:  # closed, it aborts the request
                        async for output in deltas:
                            text += output.outputs[0].text
                except NonetError as error:
                    return f"error: {error}"
                return text
    """

    async def run(self) -> None:
        """Serve until stopped; return when drained. Signals are the frontend's own business."""
        ...
