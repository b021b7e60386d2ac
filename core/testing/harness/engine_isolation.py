"""32 requests around an engine whose model is the fake one, and plugins of it that fail one of them, the victim."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from core.batch import SamplerOutput, SchedulerOutput, Verdict
from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.engine import Engine
from core.isolation.faults import ComponentName, Faults, Names
from core.outputs import PluginIncident, StepOutput, TokenDelta
from core.request import FinishReason, Request, RequestStatus
from core.scheduling.policy import QueueSettings
from core.stages.completion import CompletionContext, Standard
from core.stages.decode import DecodeContext, Plain
from core.stages.prefill import Chunked, PrefillContext
from core.testing.engines import MAX_MODEL_LEN, engine_request, fake_spec, make_engine
from core.testing.fakes import FakeClock, expected_ids
from core.testing.harness.fake_executors import Done, FakeExecutor

NUM_REQUESTS = 32
VICTIM = "r13"
NUM_BLOCKS = 200
GROUPS = ("scheduler", "prefill", "decode", "sampler", "completion", "cache", "executor", "predictor")
NAMES = Names(ComponentName(group, "chaos", "chaos, acme-chaos 1.0", f"acme.{group}:Chaos") for group in GROUPS)
SETTINGS = QueueSettings(max_num_scheduled_tokens=256, max_num_running_reqs=NUM_REQUESTS)


def due(request: Request) -> bool:
    return request.request_id == VICTIM and request.num_output_tokens >= 3


@dataclass
class Chaos:
    """What to do wrong, when it is time."""

    kind: str
    clock: FakeClock = field(default_factory=FakeClock)
    fired: int = 0

    def strike(self, mutate: Any) -> None:
        """Raises, blocks or changes what is not to be changed; for other kinds the plugin makes the value."""
        self.fired += 1
        if self.kind == "raise":
            raise RuntimeError("a fault was injected")
        if self.kind == "exit":
            raise SystemExit(3)
        if self.kind == "mutate":
            mutate()
        if self.kind == "block":
            self.clock.advance(5.0)

    def value(self, right: Any, shape: Any, nan: Any = math.nan) -> Any:
        return {"wrong shape": shape, "NaN": nan}.get(self.kind, right)


class ChaosPrefill(Chunked):
    def __init__(self, chaos: Chaos):
        super().__init__(Chunked.Settings(chunk_size=24), PrefillContext(256))
        self.chaos = chaos

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> Any:
        count = super().num_tokens(request, remaining, token_budget)
        if request.request_id != VICTIM:
            return count
        self.chaos.strike(lambda: setattr(request, "status", RequestStatus.FINISHED_STOPPED))
        return self.chaos.value(count, (count,))


class ChaosDecode(Plain):
    def __init__(self, chaos: Chaos):
        super().__init__(Plain.Settings(), DecodeContext(MAX_MODEL_LEN))
        self.chaos = chaos

    def propose(self, requests: Any) -> Any:
        for request in requests:
            if due(request):
                self.chaos.strike(lambda request=request: setattr(request, "num_computed_tokens", 3))
                return self.chaos.value({}, {VICTIM: "ab"}, {VICTIM: (math.nan,)})
        return {}


class ChaosCompletion(Standard):
    def __init__(self, chaos: Chaos):
        super().__init__(Standard.Settings(), CompletionContext(fake_spec()))
        self.chaos = chaos

    def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Any:
        verdicts = dict(super().judge(output, sampled))
        for part in output.scheduled:
            if due(part.request):
                self.chaos.strike(lambda part=part: setattr(part.request, "num_computed_tokens", 1))
                verdicts[VICTIM] = self.chaos.value(verdicts[VICTIM], "stop", Verdict((math.nan,)))  # type: ignore[arg-type]
        return verdicts


class ChaosCache(PagedCache):
    def __init__(self, chaos: Chaos):
        super().__init__(PagedCache.Settings(), CacheContext(NUM_BLOCKS, MAX_MODEL_LEN))
        self.chaos = chaos

    def allocate(self, request: Request, num_tokens: int) -> Any:
        done = super().allocate(request, num_tokens)
        if not due(request):
            return done
        self.chaos.strike(lambda: request.block_table.__setitem__(0, 0 if request.block_table[0] else 1))
        return self.chaos.value(done, [done])


class ChaosExecutor(FakeExecutor):
    """The fake model draws by itself: ids that are none come from an executor's sampler, as far as one can see."""

    def __init__(self, chaos: Chaos):
        super().__init__()
        self.chaos = chaos

    def submit(self, batch: Any) -> Any:
        done = super().submit(batch)
        rows = [row for row in batch.sampling.rows if row.request_id == VICTIM and row.position >= 3]
        if not rows:
            return done
        self.chaos.strike(lambda: rows[0].output_token_ids.append(1))
        ids = done.sampled.token_ids
        spoilt = Done(SamplerOutput({**ids, VICTIM: (math.nan,)}))  # type: ignore[dict-item]
        return self.chaos.value(done, WrongResult(), spoilt)


class WrongResult:
    def result(self) -> Any:
        return ("no", "step result")


def parts_with(stage: str, chaos: Chaos) -> dict[str, Any]:
    """Of `make_engine`: the component of `stage` that fails as `chaos` says."""
    parts: dict[str, Any] = {
        "prefill": {"prefill": partial(ChaosPrefill, chaos)},
        "decode": {"decode": partial(ChaosDecode, chaos)},
        "completion": {"completion": ChaosCompletion(chaos)},
        "cache": {"cache": partial(ChaosCache, chaos)},
        "executor": {"executor": ChaosExecutor(chaos)},
    }
    return dict(parts.get(stage, {}))


def engine_of(scheduler: Any, **options: Any) -> Engine:
    options.setdefault("faults", Faults(NAMES))
    executor = options.pop("executor", None) or FakeExecutor()
    return make_engine(scheduler, SETTINGS, executor, num_blocks=NUM_BLOCKS, **options)


def requests() -> list[Any]:
    """Prompts of 5 to 67 tokens, half of them with a common head."""
    head = list(range(32))
    return [
        engine_request(f"r{i}", (head if i % 2 else []) + list(range(i, i + 5 + i)), max_tokens=20)
        for i in range(NUM_REQUESTS)
    ]


@dataclass
class Answers:
    deltas: dict[str, list[TokenDelta]] = field(default_factory=dict)
    incidents: list[PluginIncident] = field(default_factory=list)

    def take(self, output: StepOutput) -> None:
        self.incidents += output.incidents
        for delta in output.deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)

    def ids(self, key: str) -> list[int]:
        return [token for delta in self.deltas[key] for token in delta.token_ids]

    def ends(self, key: str) -> list[FinishReason]:
        return [delta.finish_reason for delta in self.deltas[key] if delta.finish_reason]

    def error(self, key: str) -> str:
        return str(self.deltas[key][-1].error)


def run(engine: Engine, sent: list[Any]) -> Answers:
    engine.add(sent)
    answers = Answers()
    for _ in range(3000):
        if not engine.has_work():
            return answers
        answers.take(engine.step())
    raise AssertionError("the engine did not finish")


def solo(request: Any) -> list[int]:
    return expected_ids(Request.from_engine_request(request))


def assert_solo(answers: Answers, sent: list[Any], but: str | None = None) -> None:
    for request in sent:
        if request.request_id != but:
            assert answers.ids(request.request_id) == solo(request), request.request_id
            assert answers.ends(request.request_id) == [FinishReason.LENGTH]


def assert_whole(engine: Engine) -> None:
    engine.step()
    stats = engine.step().stats
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total == NUM_BLOCKS
    engine._pipeline.cache.check()
