"""A front over a real inline client and an engine without a model, for tests of what stands before the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any

from core.cache.kv_cache import KVCache
from core.client import InlineClient
from core.components import GROUPS
from core.engine import Engine
from core.front.front import Front
from core.front.request_fields import RequestFields
from core.grammar.setup import GrammarSetup
from core.isolation.faults import ComponentName, Names
from core.isolation.front import FrontLimits
from core.observers import Named, Observers
from core.outputs import PluginIncident, RequestOutput, RequestRecord, StepStats
from core.pipeline import FrontPipeline
from core.request import GrammarSpec, Request, SamplingParams
from core.stages.admission import AdmissionContext
from core.stages.detokenizer import DetokenizerContext
from core.stages.frontend import GenerateRequest
from core.stages.incremental import Incremental
from core.stages.load_aware import LoadAware
from core.stages.reasoning_parser import NoReasoning, ReasoningParserContext
from core.stages.renderer import RendererContext, TokenPrompt
from core.stages.text_renderer import Text
from core.stages.tool_parser import NoTools, ToolParserContext
from core.testing.engines import fake_spec, make_engine
from core.testing.fakes import VOCAB_SIZE, expected_ids
from core.testing.harness.fake_executors import FakeExecutor, Fault
from core.testing.tokenizers import byte_level_bpe

NAMES = Names(ComponentName(group, "chaos", "chaos, acme 1.0") for group in GROUPS)


class RecordList:
    """An observer that keeps the records of ended requests."""

    def __init__(self, records: list[RequestRecord]):
        self.request_finished = records.append

    def step_finished(self, stats: StepStats) -> None:
        """Steps are not kept."""

    def close(self) -> None:
        """Nothing is held."""


class AnyFields(RequestFields):
    """Of an engine whose sampler takes every request."""

    def __init__(self) -> None:
        pass

    def check(self, params: SamplingParams) -> None:
        pass

    def check_grammar(self, spec: GrammarSpec, param: str, backend_param: str) -> None:
        pass

    def check_priority(self, priority: int) -> None:
        pass

    def processor(self, name: str) -> ComponentName:
        return ComponentName("logits_processors", name, "chaos, acme 1.0")

    def check_extra(self, name: str, values: object) -> None:
        pass

    def check_running(self, params: SamplingParams, incidents: Iterable[PluginIncident]) -> None:
        pass


class FrontHarness:
    """`async with FrontHarness(Fcfs) as h`. `wrap`: config group -> what is put around its component."""

    def __init__(
        self,
        scheduler: Any,
        *,
        fault: Fault | None = None,
        num_blocks: int = 64,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[Any] = (),
        wrap: Mapping[str, Callable[[Any], Any]] | None = None,
        limits: FrontLimits | None = None,
        grammars: GrammarSetup | None = None,
        vocab_size: int = VOCAB_SIZE,
        **admission: Any,
    ):
        self._scheduler = scheduler  # a component class
        self.executor = FakeExecutor(fault=fault)
        self._num_blocks = num_blocks
        self.records: list[RequestRecord] = []
        self.tokenizer = byte_level_bpe()
        self.client = InlineClient(self._make_engine)
        self.spec = fake_spec(vocab_size)
        admission_context = AdmissionContext(self.spec, clock, lambda: num_blocks * 16)
        members = [Named("test", "test", seen) for seen in (RecordList(self.records), *observers)]
        pipeline = FrontPipeline(
            model=self.spec,
            renderer=Text(Text.Settings(), RendererContext(self.spec, self.tokenizer)),
            admission=LoadAware(LoadAware.Settings(**admission), admission_context),
            detokenizer=Incremental(Incremental.Settings(stream_interval=1), DetokenizerContext(self.tokenizer)),
            request_fields=AnyFields(),
            tool_parser=NoTools(NoTools.Settings(), ToolParserContext(self.spec)),
            reasoning_parser=NoReasoning(NoReasoning.Settings(), ReasoningParserContext(self.spec)),
            observers=Observers(members),
            names=NAMES,
            limits=limits or FrontLimits(),
            grammars=grammars,
        )
        wrapped = {group: around(getattr(pipeline, group)) for group, around in (wrap or {}).items()}
        self.front = Front(replace(pipeline, **wrapped), self.client, clock)

    def _make_engine(self) -> Engine:
        settings = self._scheduler.Settings()
        self.engine = make_engine(self._scheduler, settings, self.executor, spec=self.spec, num_blocks=self._num_blocks)
        return self.engine

    @property
    def cache(self) -> KVCache:
        """The engine's, as it is now."""
        return self.engine._pipeline.cache

    async def __aenter__(self) -> FrontHarness:
        await self.front.start(lambda what, done, total: None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.front.close()

    async def answer(self, request: GenerateRequest) -> list[RequestOutput]:
        """Run one call to its end."""
        async with aclosing(self.front.generate(request)) as outputs:
            return [output async for output in outputs]

    async def seen(self) -> list[RequestRecord]:
        """Records of the requests that have ended so far; observers run in threads of their own."""
        await self.front.flush_observers()
        return self.records

    async def assert_whole(self) -> None:
        """All that calls held is back, on both sides."""
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not self.engine.has_work():
                break
        assert self.cache.num_free_blocks == self.cache.num_blocks
        assert self.front.load().in_flight == 0
        tables = (self.front._calls, self.front._choices, self.front._texts._transcripts)
        assert not any(tables), tables
        self.cache.check()


def request(
    key: str = "a", prompt: Sequence[int] = (8, 9, 10), max_tokens: int | None = 8, **params: Any
) -> GenerateRequest:
    """Greedy and through EOS."""
    values: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "seed": 0, **params}
    return GenerateRequest(key, TokenPrompt(list(prompt)), SamplingParams(**values), max_tokens=max_tokens)


def ids_of(outputs: Sequence[RequestOutput], index: int = 0) -> list[int]:
    """One choice's token ids, joined."""
    return [t for output in outputs for part in output.outputs if part.index == index for t in part.token_ids]


def text_of(outputs: Sequence[RequestOutput], index: int = 0) -> str:
    """One choice's text, joined."""
    return "".join(part.text for output in outputs for part in output.outputs if part.index == index)


def oracle(prompt: Sequence[int] = (8, 9, 10), max_tokens: int = 8, choice: int = 0) -> list[int]:
    """What `request` must generate, computed without front and engine."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return expected_ids(Request("x", list(prompt), params, choice=choice))
