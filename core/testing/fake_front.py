"""A front half without an engine: it answers with scripted text, so that frontends are tested on their own.

Everything a frontend can see behaves as `core.front.front.Front` does: choices, seeds, limits, stop strings, logprobs, usage,
errors before and inside an answer, and `aclose()` at any time. `FakeFront.open` names what is still held.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from core.batch import TokenLogprobs
from core.errors import RequestError
from core.isolation.faults import ComponentName
from core.isolation.front import Guard
from core.isolation.incidents import Incidents
from core.isolation.reasoning import GuardedReasoningParser
from core.isolation.tools import GuardedToolParser
from core.model.spec import ModelFiles, ModelSpec
from core.model.tokenizer import Tokenizer
from core.outputs import (
    CompletionOutput,
    PluginIncident,
    RequestOutput,
    RequestRecord,
    StepStats,
    Timings,
    Usage,
)
from core.request import FinishReason, SamplingParams
from core.stages.frontend import Deltas, GenerateRequest, Health, Load
from core.stages.reasoning_parser import NoReasoning, ReasoningParser, ReasoningParserContext
from core.stages.renderer import ChatPrompt, Prompt, RenderedPrompt, TextPrompt
from core.stages.tool_parser import NoTools, ToolParser, ToolParserContext
from core.testing.tokenizers import byte_level_bpe

WORDS = [
    "the",
    "engine",
    "was",
    "described",
    "as",
    "one",
    "hello",
    "world",
    "alphabet",
    "numbers",
    "user",
    "and",
    "again",
    "goes",
    "ABC",
    "Café",
    "漢字",
    "🔥",
]
TEMPLATE_KWARGS = frozenset({"enable_thinking"})


@dataclass(frozen=True, slots=True)
class Script:
    """How one call goes. `text` None: words drawn from (seed, choice, prompt), as many as `max_tokens` asks for."""

    text: str | None = None
    first_delay: float = 0.0  # seconds before the first delta
    delay: float = 0.0  # seconds before each further delta
    error: Exception | None = None
    error_at: int = 0  # deltas that come before the error
    finish_reason: FinishReason | None = None  # instead of what the limits and stop strings give
    cached_tokens: int = 0


class FakeRenderer:
    """ChatML by hand; the checks that a frontend relies on the renderer for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def render(self, prompt: Prompt) -> RenderedPrompt:
        if isinstance(prompt, ChatPrompt):
            text = chat_text(prompt)
            return RenderedPrompt(self._tokenizer.encode(text, False), text)
        if isinstance(prompt, TextPrompt):
            ids = self._tokenizer.encode(prompt.text, prompt.add_special_tokens)
            if not ids:
                raise RequestError("the prompt is empty", param="prompt")
            return RenderedPrompt(ids, prompt.text)
        self._check_ids(prompt.token_ids, "prompt")
        return RenderedPrompt(list(prompt.token_ids))

    def prepare(self, params: SamplingParams) -> SamplingParams:
        self._check_ids(list(params.logit_bias), "logit_bias")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        return params

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if max(ids, default=0) >= self._vocab_size:
            raise RequestError(f"{param} must be below {self._vocab_size}", param=param)


def chat_text(prompt: ChatPrompt) -> str:
    """Raises RequestError as a chat template with `raise_exception` does."""
    unknown = set(prompt.template_kwargs) - TEMPLATE_KWARGS
    if unknown:
        raise RequestError("unknown template argument", param="chat_template_kwargs")
    if any(message["role"] == "system" for message in prompt.messages[1:]):
        raise RequestError("System message must come first", param="messages", code="template_error")
    turns = [f"<|im_start|>{message['role']}\n{_content(message)}" for message in prompt.messages]
    text = "<|im_end|>\n".join([*(str(tool) for tool in prompt.tools or ()), *turns])
    if prompt.continue_final_message:
        return text
    return text + "<|im_end|>\n" + ("<|im_start|>assistant\n" if prompt.add_generation_prompt else "")


def _content(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if content is None:
        return str(message["tool_calls"])
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@dataclass(slots=True)
class FakeFront:
    """`core.stages.frontend.FrontHalf`. `script` may be one script, or choose one per request."""

    script: Script | Callable[[GenerateRequest], Script] = Script()
    max_model_len: int = 2048
    status: str = "ok"
    observer: Callable[[RequestRecord], None] | None = None
    requests: list[GenerateRequest] = field(default_factory=list)  # all that were admitted
    open: set[str] = field(default_factory=set)  # request ids that hold something
    aborted: list[str] = field(default_factory=list)
    refuse: Exception | None = None  # raised at admission
    prefix_cache_resets: int = 0
    parser: ToolParser | None = None  # instead of `tool_parser: none`
    splitter: ReasoningParser | None = None  # instead of `reasoning_parser: none`
    quarantine_after: int = 3
    block_timeout: float = 5.0
    reported: list[PluginIncident] = field(default_factory=list)  # of other components
    _incidents: Incidents = field(default_factory=Incidents)
    _spec: ModelSpec | None = None
    _renderer: FakeRenderer | None = None

    @property
    def model(self) -> ModelSpec:
        if self._spec is None:
            files = ModelFiles("hf", Path("fake"), "fake")
            vocab_size = self.tokenizer.vocab_size
            self._spec = ModelSpec(
                "fake-model", files, {}, vocab_size, self.max_model_len, self.tokenizer.eos_token_ids
            )
        return self._spec

    @property
    def tokenizer(self) -> Tokenizer:
        return self.renderer.tokenizer

    @property
    def renderer(self) -> FakeRenderer:
        if self._renderer is None:
            tokenizer = byte_level_bpe()
            self._renderer = FakeRenderer(tokenizer, tokenizer.vocab_size)
        return self._renderer

    @property
    def tool_parser(self) -> GuardedToolParser:
        parser = self.parser or NoTools(NoTools.Settings(), ToolParserContext(self.model, ("hermes",)))
        name = ComponentName("tool_parser", "fake", "fake, fake 1.0")
        guard = Guard(name, self._incidents, self.block_timeout, (RequestError,), self.quarantine_after)
        return GuardedToolParser(parser, guard)

    @property
    def reasoning_parser(self) -> GuardedReasoningParser:
        parser = self.splitter or NoReasoning(NoReasoning.Settings(), ReasoningParserContext(self.model))
        name = ComponentName("reasoning_parser", "fake", "fake, fake 1.0")
        guard = Guard(name, self._incidents, self.block_timeout, quarantine_after=self.quarantine_after)
        return GuardedReasoningParser(parser, guard)

    def incidents(self) -> tuple[PluginIncident, ...]:
        return (*self.reported, *self._incidents.latest())

    async def render(self, prompt: Prompt) -> RenderedPrompt:
        return await asyncio.to_thread(self.renderer.render, prompt)

    def generate(self, request: GenerateRequest) -> Deltas:
        return FakeAnswer(self, request)

    async def generate_many(self, requests: list[GenerateRequest]) -> list[Deltas]:
        answers = [FakeAnswer(self, request) for request in requests]
        prepared = [await answer.prepare() for answer in answers]
        for answer, ids in zip(answers, prepared, strict=True):
            answer.enter(ids)
        return list(answers)

    def health(self) -> Health:
        return Health(self.status, 0.01, "detail that stays inside")

    def load(self) -> Load:
        return Load(in_flight=len(self.open), running=len(self.open), kv_blocks_free=60, kv_blocks_total=64)

    def stats(self) -> StepStats:
        # `running` is stale on purpose: a frontend must not show it once nothing is in flight.
        return StepStats(step=1, running=3, waiting=2, kv_blocks_free=60, kv_blocks_total=64, schedule_s=0.001)

    async def reset_prefix_cache(self) -> bool:
        self.prefix_cache_resets += 1
        return not self.open

    async def flush_observers(self) -> None:
        """`observer` is called at once."""


class FakeAnswer:
    """The deltas of one call, one token of one choice at a time, choices in turn."""

    def __init__(self, front: FakeFront, request: GenerateRequest):
        self._front = front
        self._request = request
        self._script = front.script if isinstance(front.script, Script) else front.script(request)
        self._outputs: Iterator[RequestOutput] | None = None
        self._prompt_ids: list[int] = []
        self._num_sent = 0
        self._num_tokens = 0
        self._reasons: dict[int, FinishReason] = {}

    def __aiter__(self) -> FakeAnswer:
        return self

    async def prepare(self) -> list[int]:
        """Prompt ids. Raises what stages 2 and 3 raise."""
        renderer = self._front.renderer
        ids = (await self._front.render(self._request.prompt)).token_ids
        renderer.prepare(self._request.params)
        if self._front.refuse is not None:
            raise self._front.refuse
        limit, wanted = self._front.max_model_len, self._request.max_tokens or 1
        if len(ids) + wanted > limit:
            param = self._request.max_tokens_param if len(ids) < limit else "prompt"
            message = f"{len(ids)} prompt tokens and {param} {wanted} do not fit the context of {limit}"
            raise RequestError(message, param=param, code="context_length_exceeded")
        return ids

    def enter(self, prompt_ids: list[int]) -> None:
        self._prompt_ids = prompt_ids
        self._front.requests.append(self._request)
        self._front.open.add(self._request.request_id)
        self._outputs = self._make_outputs()

    async def __anext__(self) -> RequestOutput:
        try:
            if self._outputs is None:
                self.enter(await self.prepare())
            return await self._next()
        except StopAsyncIteration:
            raise
        except BaseException:
            self._end(FinishReason.ERROR if self._script.error is not None else FinishReason.ABORT)
            raise

    async def aclose(self) -> None:
        self._end(FinishReason.ABORT)

    async def _next(self) -> RequestOutput:
        await asyncio.sleep(self._script.delay if self._num_sent else self._script.first_delay)
        if self._script.error is not None and self._num_sent >= self._script.error_at:
            raise self._script.error
        assert self._outputs is not None
        output = next(self._outputs, None)
        if output is None or self._request.request_id not in self._front.open:
            raise StopAsyncIteration
        self._num_sent += 1
        self._note(output)
        return output

    def _note(self, output: RequestOutput) -> None:
        for part in output.outputs:
            self._num_tokens += len(part.token_ids)
            if part.finish_reason is not None:
                self._reasons[part.index] = part.finish_reason
        if output.finished:
            self._end(FinishReason.STOP)

    def _end(self, reason: FinishReason) -> None:
        request_id = self._request.request_id
        if request_id not in self._front.open:
            return
        self._front.open.discard(request_id)
        n = self._request.params.n
        if len(self._reasons) < n:
            self._front.aborted.append(request_id)
        if self._front.observer is not None:
            reasons = tuple(self._reasons.get(choice, reason) for choice in range(n))
            timings = Timings(queue=0.0, ttft=0.01, tpot=0.01, e2e=0.02)
            self._front.observer(RequestRecord(request_id, self._request.tenant, reasons, self._usage(), timings))

    def _usage(self) -> Usage:
        return Usage(len(self._prompt_ids), self._num_tokens, self._script.cached_tokens)

    def _make_outputs(self) -> Iterator[RequestOutput]:
        choices = [list(self._choice(choice)) for choice in range(self._request.params.n)]
        last = max(len(parts) for parts in choices) - 1
        for step in range(last + 1):
            parts = [choice[step] for choice in choices if step < len(choice)]
            for index, part in enumerate(parts):
                yield self._output(part, finished=step == last and index == len(parts) - 1)

    def _output(self, part: CompletionOutput, finished: bool) -> RequestOutput:
        output = RequestOutput(self._request.request_id, (part,), self._prompt_ids, self._prompt_logprobs(), finished)
        if not finished:
            return output
        total = Usage(len(self._prompt_ids), self._num_tokens + len(part.token_ids), self._script.cached_tokens)
        return replace(output, usage=total)

    def _choice(self, choice: int) -> Iterator[CompletionOutput]:
        params, tokenizer = self._request.params, self._front.tokenizer
        limit = self._request.max_tokens or 32
        text = self._text(choice, limit)
        at, stop = first_stop(text, params.stop)
        ids = tokenizer.encode(text[:at], False)
        reason = FinishReason.LENGTH if len(ids) > limit else FinishReason.STOP
        stop = stop if reason is FinishReason.STOP else None
        ids = ids[:limit] or [next(iter(tokenizer.eos_token_ids))]
        stream = tokenizer.stream(self._prompt_ids, params.skip_special_tokens, params.shown_token_ids)
        for position, token_id in enumerate(ids):
            piece = stream.push(token_id)
            last = position == len(ids) - 1
            piece += stream.flush() if last else ""
            yield CompletionOutput(
                index=choice,
                text=piece,
                token_ids=(token_id,),
                logprobs=() if params.logprobs is None else (self._row(token_id, params.logprobs),),
                finish_reason=(self._script.finish_reason or reason) if last else None,
                stop_reason=stop if last else None,
            )

    def _text(self, choice: int, limit: int) -> str:
        if self._script.text is not None:
            return self._script.text
        params = self._request.params
        seed = params.seed if params.seed is not None else random.getrandbits(32)
        state = 0 if params.greedy else zlib.crc32(f"{seed} {choice}".encode())
        draw = random.Random(f"{state} {self._prompt_ids}")
        return " ".join(draw.choice(WORDS) for _ in range(limit + 4))

    def _row(self, token_id: int, num_top: int) -> TokenLogprobs:
        others = [(token_id + step) % self._front.tokenizer.vocab_size for step in range(num_top)]
        return TokenLogprobs(token_id, -0.5, 1, [(other, -0.5 - rank) for rank, other in enumerate(others)])

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        num_top = self._request.params.prompt_logprobs
        return None if num_top is None else tuple(self._row(token_id, num_top) for token_id in self._prompt_ids[1:])


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str | None]:
    """Where the earliest stop string starts, and which; (len(text), None) without one."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found) if found else (len(text), None)
