"""The way in: a frontend's request is checked, rendered (stage 2) and admitted (stage 3)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from core.errors import RequestError
from core.front.calls import Call
from core.front.grammars import Grammars
from core.front.load import LoadMeter
from core.front.render_threads import RenderThreads
from core.front.spans import StageWork
from core.isolation.checks import checked_admit, checked_prepare, checked_render, checked_request, private_prompt
from core.isolation.front import FrontGuards, Guard
from core.isolation.incidents import Incidents
from core.isolation.reasoning import GuardedReasoningParser
from core.pipeline import FrontPipeline
from core.request import GrammarSpec, SamplingParams
from core.stages.frontend import GenerateRequest, Load
from core.stages.reasoning_parser import prompt_end
from core.stages.renderer import ChatPrompt, Prompt, RenderedPrompt

S = TypeVar("S")
T = TypeVar("T")

SMALL_GRAMMAR = 2048  # characters: judged in less time than it takes to ask a thread


@dataclass(frozen=True, slots=True)
class _Rendered:
    token_ids: list[int]
    params: SamplingParams


class Intake:
    """Makes calls that nobody has registered yet. What a component does wrong fails the call in hand."""

    def __init__(
        self,
        pipeline: FrontPipeline,
        guards: FrontGuards,
        incidents: Incidents,
        clock: Callable[[], float],
        num_threads: int,
        meter: LoadMeter,
    ):
        self._pipeline = pipeline
        self._guards = guards
        self._incidents = incidents
        self._clock = clock
        self._threads = RenderThreads(num_threads, pipeline.limits)
        self._serial = itertools.count()
        self._meter = meter
        self.reasoning_parser = GuardedReasoningParser(pipeline.reasoning_parser, guards.reasoning_parser)
        self.grammars = None if pipeline.grammars is None else Grammars(pipeline.grammars, incidents, clock)

    def start(self) -> None:
        if self.grammars is not None:
            self.grammars.start()

    async def close(self) -> None:
        self._threads.close()
        if self.grammars is not None:
            await asyncio.to_thread(self.grammars.close)

    async def render(self, prompt: Prompt) -> RenderedPrompt:
        private = self._guards.frontend.call(private_prompt, prompt)
        return await self._in_thread(partial(self._render, private), self._guards.renderer)

    async def calls(self, requests: Sequence[GenerateRequest], work: StageWork) -> list[Call]:
        """Stages 2 and 3 for calls of one tenant that stand or fall together: raises unless all pass."""
        checked = [self._guards.frontend.call(checked_request, request) for request in requests]
        admission, tenant = self._pipeline.admission, checked[0].tenant if checked else ""
        num_choices = sum(request.params.n for request in checked)
        self._guards.admission.call(admission.check_room, num_choices, self._meter.load(tenant))
        calls = [await self._prepared(request, work) for request in checked]
        load = self._meter.load(tenant)
        for call in calls:
            self._admit(call, load)
            load = _with_call(load, call)
        return calls

    async def _prepared(self, request: GenerateRequest, work: StageWork) -> Call:
        key, arrival = f"{request.request_id}~{next(self._serial)}", self._clock()
        with self._meter.rendering(request.tenant, request.params.n):
            await self._check_fields(request)
            rendered, grammar = await self._rendered_and_compiled(request)
        params = msgspec.structs.replace(rendered.params, grammar=grammar)
        return Call(key, request, rendered.token_ids, params, work, arrival, rendered=self._clock())

    async def _check_fields(self, request: GenerateRequest) -> None:
        """What costs little, before anything is rendered or compiled. Raises RequestError."""
        fields, params = self._pipeline.request_fields, request.params
        fields.check_priority(request.priority)
        fields.check(params)
        fields.check_running(params, self._incidents.latest())
        if params.grammar is not None:
            fields.check_grammar(params.grammar, request.grammar_param, request.grammar_backend_param)
        for name, values in params.extra.items():  # by classes that may be anybody's, each by itself
            guard = self._guards.of_processor(fields.processor(name))
            await self._in_thread(partial(guard.call, fields.check_extra, name, values), guard)

    async def _rendered_and_compiled(self, request: GenerateRequest) -> tuple[_Rendered, GrammarSpec | None]:
        """The request's grammar, where it has one, is compiled while its prompt is rendered."""
        spec = request.params.grammar
        if spec is None:
            return await self._in_thread(partial(self._rendered, request), self._guards.renderer), None
        bounded = await self._bounded(spec, request.grammar_param)
        rendering = self._in_thread(partial(self._rendered, request), self._guards.renderer)
        rendered, grammar = await _both(rendering, self._compiled(bounded, request))
        is_chat = isinstance(request.prompt, ChatPrompt)
        return rendered, self._behind_reasoning(grammar, rendered.token_ids) if is_chat else grammar

    async def _bounded(self, spec: GrammarSpec, param: str) -> GrammarSpec:
        if self.grammars is None:
            raise RequestError(f"{param}: nothing here compiles a grammar", param=param, code="unsupported")
        bound = partial(self.grammars.bounded, spec, param)
        with self.grammars.counting_refusals():
            is_small = len(spec.source) <= SMALL_GRAMMAR
            return bound() if is_small else await self._in_thread(bound, self._guards.renderer)

    async def _compiled(self, bounded: GrammarSpec, request: GenerateRequest) -> GrammarSpec:
        """As it crosses to the engine."""
        assert self.grammars is not None
        with self.grammars.counting_refusals():
            return await self.grammars.compiled(bounded, request.grammar_param, request.tenant)

    def _behind_reasoning(self, spec: GrammarSpec, prompt_token_ids: Sequence[int]) -> GrammarSpec:
        """It holds for the content of an answer, which begins where the reasoning has ended."""
        if spec.after:
            return spec
        span = self.reasoning_parser.span(prompt_end(self._pipeline.renderer.tokenizer, prompt_token_ids))
        return spec if span is None else msgspec.structs.replace(spec, after=span.end, opening=span.begin)

    def _rendered(self, request: GenerateRequest) -> _Rendered:
        token_ids = self._render(request.prompt).token_ids
        params = self._guards.renderer.call(checked_prepare, self._pipeline.renderer, request.params)
        return _Rendered(token_ids, params)

    def _render(self, prompt: Prompt) -> RenderedPrompt:
        return self._guards.renderer.call(
            checked_render, self._pipeline.renderer, prompt, self._pipeline.model.vocab_size
        )

    async def _in_thread(self, work: Callable[[], T], guard: Guard) -> T:
        """`guard`: of the component at work, whose fault it is when this takes long."""
        try:
            return await self._threads.run(work, guard.blocked)
        except TimeoutError:
            raise guard.error(f"no answer within {self._pipeline.limits.render_timeout:g} s") from None

    def _admit(self, call: Call, load: Load) -> None:
        started = self._clock()
        call.sequences = self._guards.admission.call(
            checked_admit,
            self._pipeline.admission,
            replace(call.request, request_id=call.key),
            call.prompt_token_ids,
            call.params,
            load,
            self._pipeline.model.max_model_len,
            started,
        )
        call.admit_s = self._clock() - started


async def _both(first: Coroutine[Any, Any, S], second: Coroutine[Any, Any, T]) -> tuple[S, T]:
    """What both return. Where one raises, the other is cancelled, and has ended when this does."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _with_call(load: Load, call: Call) -> Load:
    for sequence in call.sequences:
        load = load.plus(1, len(call.prompt_token_ids), sequence.params.max_tokens)
    return load
