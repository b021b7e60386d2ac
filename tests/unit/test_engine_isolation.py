"""32 requests run, a plugin of one stage fails one of them: it ends with an error that names the plugin, the 31 others end
with the tokens of a solo run, and the engine goes on as before.

The model here is the fake one, whose output depends on each block and position that it reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from core.batch import SamplerOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs, Verdict
from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.engine import Engine
from core.isolation.faults import ComponentName, Faults, Names
from core.outputs import PluginIncident, StepOutput, TokenDelta
from core.request import STATUS_OF_REASON, FinishReason, Request, RequestStatus
from core.stages.completion import CompletionContext, Standard
from core.stages.decode import DecodeContext, Plain
from core.stages.prefill import Chunked, PrefillContext
from core.stages.scheduler import Counts
from core.testing.engines import MAX_MODEL_LEN, engine_request, fake_spec, make_engine
from core.testing.executors import Done, FakeExecutor
from core.testing.fakes import FakeClock, FakeDrafts, expected_ids
from plugins.schedulers.fcfs import Fcfs

NUM_REQUESTS = 32
VICTIM = "r13"
NUM_BLOCKS = 200
GROUPS = ("scheduler", "prefill", "decode", "sampler", "completion", "cache", "executor")
NAMES = Names(ComponentName(group, "chaos", "chaos, acme-chaos 1.0", f"acme.{group}:Chaos") for group in GROUPS)
SETTINGS = Fcfs.Settings(max_num_scheduled_tokens=256, max_num_running_reqs=NUM_REQUESTS)


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


class ChaosScheduler(Fcfs):
    """Wrong in `schedule`."""

    def __init__(self, chaos: Chaos, settings: Any, context: Any):
        super().__init__(settings, context)
        self.chaos = chaos

    def schedule(self) -> Any:
        plan = super().schedule()
        parts = list(plan.scheduled)
        for index, part in enumerate(parts):
            if due(part.request):
                self.chaos.strike(lambda part=part: setattr(part.request, "num_computed_tokens", 0))
                nan = replace(part, num_tokens=math.nan)
                parts[index] = self.chaos.value(part, replace(part, num_tokens=[1]), nan)
        return replace(plan, scheduled=tuple(parts))


class ChaosUpdate(ChaosScheduler):
    """Wrong in `update`."""

    def schedule(self) -> Any:
        return Fcfs.schedule(self)

    def update(self, output: SchedulerOutput, verdicts: Any) -> Any:
        hit = [part.request for part in output.scheduled if due(part.request)]
        if hit:
            self.chaos.strike(lambda: hit[0].append_output([1]))
        ended = super().update(output, verdicts)
        return self.chaos.value(ended, None, [math.nan]) if hit else ended


class ChaosFinish(ChaosUpdate):
    """Wrong in `finish`."""

    update = Fcfs.update

    def finish(self, request_ids: Any, reason: FinishReason) -> Any:
        self.chaos.strike(lambda: None)
        return self.chaos.value(super().finish(request_ids, reason), "all of them")


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
                verdicts[VICTIM] = self.chaos.value(verdicts[VICTIM], "stop", Verdict((math.nan,)))
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
        spoilt = Done(SamplerOutput({**ids, VICTIM: (math.nan,)}))  # type: ignore[arg-type]
        return self.chaos.value(done, WrongResult(), spoilt)


class WrongResult:
    def result(self) -> Any:
        return ("no", "step result")


def engine_with(stage: str, chaos: Chaos) -> Engine:
    scheduler = {"scheduler": ChaosScheduler, "update": ChaosUpdate, "finish": ChaosFinish}.get(stage)
    parts: dict[str, Any] = {
        "prefill": {"prefill": partial(ChaosPrefill, chaos)},
        "decode": {"decode": partial(ChaosDecode, chaos)},
        "completion": {"completion": ChaosCompletion(chaos)},
        "cache": {"cache": partial(ChaosCache, chaos)},
    }
    return make_engine(
        partial(scheduler, chaos) if scheduler else Fcfs,
        SETTINGS,
        ChaosExecutor(chaos) if stage == "executor" else FakeExecutor(),
        num_blocks=NUM_BLOCKS,
        chunk_size=24,
        faults=Faults(NAMES, block_timeout=2.0, clock=chaos.clock),
        **parts.get(stage, {}),
    )


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


STAGES = ("scheduler", "update", "prefill", "decode", "completion", "cache", "executor")


@pytest.mark.parametrize("kind", ["raise", "exit", "wrong shape", "NaN", "mutate"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_of_32_fails_and_is_told_by_whom(stage: str, kind: str) -> None:
    chaos = Chaos(kind)
    engine, sent = engine_with(stage, chaos), requests()
    answers = run(engine, sent)
    assert chaos.fired
    assert_solo(answers, sent, but=VICTIM)
    got = answers.ids(VICTIM)
    assert got == solo(sent[13])[: len(got)]
    assert answers.ends(VICTIM) == [FinishReason.ERROR]
    group = "scheduler" if stage == "update" else stage
    assert f"{group}=chaos (plugin chaos, acme-chaos 1.0)" in answers.error(VICTIM)
    assert {incident.group for incident in answers.incidents} <= {group, "sampler"}
    assert_whole(engine)
    chaos.kind = "none"
    again = engine_request("again", list(range(32)) + [7] * 9, max_tokens=12)
    after = run(engine, [again])
    assert_solo(after, [again])
    assert_whole(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_a_call_that_blocks_is_reported_and_fails_nobody(stage: str) -> None:
    chaos = Chaos("block")
    engine, sent = engine_with(stage, chaos), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent)
    group = "scheduler" if stage == "update" else stage
    assert {(i.group, i.reason) for i in answers.incidents} == {
        (group, "blocked 5.0 s in one call (plugins.block_timeout=2)")
    }
    assert answers.incidents[-1].failures == chaos.fired


# --- books that cannot be trusted ---------------------------------------------------------------


@dataclass
class Spoils:
    """Changes a plan, once."""

    change: Any
    done: bool = False

    def __call__(self, plan: SchedulerOutput) -> SchedulerOutput:
        hit = next((part for part in plan.scheduled if due(part.request)), None)
        if hit is None or self.done:
            return plan
        self.done = True
        changed = self.change(hit)
        parts = [changed if part is hit else part for part in plan.scheduled]
        return replace(plan, scheduled=tuple(part for part in parts if part is not None))


def stranger(request: Request) -> Request:
    return Request("nobody", [1, 2, 3], request.params, status=RequestStatus.RUNNING)


FLAWS = {
    "a later start": lambda part: replace(part, start=part.start + 1),
    "an earlier start, in a shared block": lambda part: replace(part, start=0),
    "more tokens than known": lambda part: replace(part, num_tokens=2),
    "drafts that nobody made": lambda part: replace(part, num_drafts=1),
    "samples nothing": lambda part: replace(part, samples=False),
    "true for one": lambda part: replace(part, num_tokens=True),
    "another block table": lambda part: setattr(part.request, "block_table", list(part.request.block_table)) or part,
    "a status of its own": lambda part: setattr(part.request, "status", "running") or part,
    "no output any more": lambda part: setattr(part.request, "output_token_ids", None) or part,
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_plan_that_cannot_be_costs_the_request_that_it_names(flaw: str) -> None:
    spoils = Spoils(FLAWS[flaw])

    class Spoilt(Fcfs):
        def schedule(self) -> SchedulerOutput:
            return spoils(super().schedule())

    engine = make_engine(Spoilt, SETTINGS, FakeExecutor(), num_blocks=NUM_BLOCKS, faults=Faults(NAMES))
    sent = requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.ends(VICTIM) == [FinishReason.ERROR]
    assert answers.error(VICTIM).startswith("scheduler=chaos")
    assert [incident.group for incident in answers.incidents] == ["scheduler"]
    assert_whole(engine)


@pytest.mark.parametrize(
    "plan",
    [
        None,
        7,
        SchedulerOutput(step=1.5),  # type: ignore[arg-type]
        SchedulerOutput(step=1, scheduled=("r1",)),  # type: ignore[arg-type]
        SchedulerOutput(step=1, refused=("r1",)),  # type: ignore[arg-type]
        SchedulerOutput(step=1, preempted=(stranger(Request("r", [1], engine_request("r", [1]).params)),)),
    ],
)
def test_a_plan_that_is_none_fails_nobody_when_it_does_not_come_again(plan: Any) -> None:
    plans = {4: plan}

    class Odd(Fcfs):
        num_plans = 0

        def schedule(self) -> Any:
            Odd.num_plans += 1
            return plans.pop(4) if Odd.num_plans == 4 else super().schedule()

    engine = make_engine(Odd, SETTINGS, FakeExecutor(), num_blocks=NUM_BLOCKS, faults=Faults(NAMES))
    sent = requests()
    answers = run(engine, sent)
    assert not plans
    assert_solo(answers, sent)
    assert [(i.group, i.failures) for i in answers.incidents] == [("scheduler", 1)]
    assert_whole(engine)


class Counting(Fcfs):
    """Calls of all its instances; `fault` may raise."""

    num_calls: dict[str, int]
    fault: Any

    def _call(self, name: str) -> None:
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        type(self).fault(name, self.num_calls[name], self)

    def schedule(self) -> Any:
        self._call("schedule")
        return super().schedule()

    def update(self, output: SchedulerOutput, verdicts: Any) -> Any:
        self._call("update")
        return super().update(output, verdicts)

    def finish(self, request_ids: Any, reason: FinishReason) -> Any:
        self._call("finish")
        return super().finish(request_ids, reason)

    def counts(self) -> Any:
        self._call("counts")
        return super().counts()


def counting(fault: Any) -> Any:
    return type("Counted", (Counting,), {"num_calls": {}, "fault": staticmethod(fault)})


def engine_of(scheduler: Any, **options: Any) -> Engine:
    options.setdefault("faults", Faults(NAMES))
    return make_engine(scheduler, SETTINGS, FakeExecutor(), num_blocks=NUM_BLOCKS, **options)


@pytest.mark.parametrize("where", ["schedule", "update"])
def test_failures_that_come_and_go_cost_nobody(where: str) -> None:
    def fault(name: str, count: int, scheduler: Any) -> None:
        if name == where and count % 70 == 5:
            raise OSError("now and then")

    scheduler = counting(fault)
    engine, sent = engine_of(scheduler), requests()
    assert_solo(run(engine, sent), sent)
    assert scheduler.num_calls[where] > 5
    assert_whole(engine)


def test_counts_that_fail_are_the_engines_own() -> None:
    def fault(name: str, count: int, scheduler: Any) -> None:
        if name == "counts":
            raise OSError("no idea")

    engine, sent = engine_of(counting(fault)), requests()
    engine.add(sent)
    stats = engine.step().stats
    assert (stats.running + stats.waiting) == NUM_REQUESTS
    assert stats.running > 0
    assert_solo(run(engine, []), [])


def test_a_scheduler_that_always_fails_fails_all_and_then_the_engine_ends() -> None:
    def fault(name: str, count: int, scheduler: Any) -> None:
        if name == "schedule":
            raise OSError("for good")

    engine = engine_of(counting(fault))
    for _ in range(2):
        answers = run(engine, requests())
        assert all("OSError: for good" in answers.error(f"r{i}") for i in range(NUM_REQUESTS))
    with pytest.raises(RuntimeError, match="every request failed: scheduler: OSError: for good"):
        run(engine, requests())


def test_requests_that_fail_only_together_are_given_up_newest_first() -> None:
    """Nobody fails alone: r3 and r20 may not be in flight at the same time."""

    def fault(name: str, count: int, scheduler: Any) -> None:
        live = {request.request_id for request in scheduler._queues.running + scheduler._queues.waiting}
        if name == "schedule" and {"r3", "r20"} <= live:
            raise OSError("a clash")

    engine, sent = engine_of(counting(fault)), requests()
    answers = run(engine, sent)
    lost = [request.request_id for request in sent if answers.ends(request.request_id) == [FinishReason.ERROR]]
    assert lost == [f"r{i}" for i in range(16, 32)]
    assert "a clash (4 times in a row)" in answers.error("r20")
    assert_solo(answers, sent[:16])
    assert_whole(engine)


def test_aborts_of_a_scheduler_that_cannot_finish_cost_nobody_else() -> None:
    chaos = Chaos("raise")
    engine, sent = engine_with("finish", chaos), requests()
    engine.add(sent)
    answers = Answers()
    for i in range(0, 32, 2):  # more of them than recoveries without a token are allowed in a row
        engine.abort([f"r{i}"])
        if i % 8 == 0:
            answers.take(engine.step())
    while engine.has_work():
        answers.take(engine.step())
    for request in sent[1::2]:
        assert answers.ids(request.request_id) == solo(request)
    assert chaos.fired == 16
    assert_whole(engine)


@pytest.mark.parametrize("kind", ["raise", "wrong shape"])
def test_a_finish_that_fails_still_ends_the_request_that_a_stage_failed(kind: str) -> None:
    chaos = Chaos(kind)
    engine = engine_with("finish", chaos)
    engine._pipeline.prefill._prefill = ChaosPrefill(Chaos("raise"))
    sent = requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert "prefill=chaos" in answers.error(VICTIM)
    assert_whole(engine)


def test_a_request_that_a_scheduler_loses_is_at_fault_and_the_others_go_on() -> None:
    class Loses(Fcfs):
        def add(self, request: Request) -> None:
            if request.request_id != VICTIM:
                super().add(request)

    engine, sent = engine_of(Loses), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.ends(VICTIM) == [FinishReason.ERROR]
    assert answers.error(VICTIM).startswith("scheduler=chaos")
    assert_whole(engine)


def test_a_prefill_that_starves_a_request_is_named_when_nothing_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.MAX_STALLED_STEPS", 3)

    class Starves(Chunked):
        def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
            return 0 if request.request_id == VICTIM else super().num_tokens(request, remaining, token_budget)

    settings, context = Chunked.Settings(), PrefillContext(256)
    engine, sent = engine_of(Fcfs, prefill=lambda: Starves(settings, context)), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.error(VICTIM).startswith(
        "prefill=chaos (plugin chaos, acme-chaos 1.0): it leaves the request waiting"
    )
    assert_whole(engine)


# --- caches -------------------------------------------------------------------------------------


class OneWriter(PagedCache):
    """Gives the victim a block of another request."""

    def allocate(self, request: Request, num_tokens: int) -> bool:
        done = super().allocate(request, num_tokens)
        others = [h.request for h in self._holdings.values() if h.request is not request and h.request.block_table]
        if due(request) and done and others:
            request.block_table[-1] = others[0].block_table[-1]
        return done


class Leaks(PagedCache):
    def free(self, request: Request, discard: bool = False) -> None:
        if request.request_id == VICTIM:
            request.block_table.clear()
        else:
            super().free(request, discard)


class FindsTooMuch(PagedCache):
    def lookup(self, request: Request) -> int:
        return super().lookup(request) + (16 if request.request_id == VICTIM else 0)


class NoDiscard(PagedCache):
    """Of a time when `free` had one argument."""

    def free(self, request: Request) -> None:  # type: ignore[override]
        super().free(request)


def cache_of(cls: type[PagedCache]) -> Any:
    return lambda: cls(PagedCache.Settings(), CacheContext(NUM_BLOCKS, MAX_MODEL_LEN))


@pytest.mark.parametrize("cls", [OneWriter, FindsTooMuch])
def test_a_cache_that_gives_what_is_not_there_costs_one_request(cls: type[PagedCache]) -> None:
    engine, sent = engine_of(Fcfs, cache=cache_of(cls)), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.error(VICTIM).startswith("cache=chaos (plugin chaos, acme-chaos 1.0): ")
    assert_whole(engine)


def test_a_cache_that_leaks_is_made_anew_when_the_engine_is_idle() -> None:
    engine, sent = engine_of(Fcfs, cache=cache_of(Leaks)), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent)
    answers.take(engine.step())
    assert [incident.group for incident in answers.incidents] == ["cache"]
    assert_whole(engine)


def test_a_cache_that_cannot_discard_is_emptied_when_a_request_fails() -> None:
    engine, sent = engine_of(Fcfs, cache=cache_of(NoDiscard), completion=ChaosCompletion(Chaos("raise"))), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert "completion=chaos" in answers.error(VICTIM)
    assert_whole(engine)


# --- what crosses a seam ------------------------------------------------------------------------


class Reports(FakeExecutor):
    """`change` may alter what the sampler says."""

    change: Any = None

    def submit(self, batch: Any) -> Done:
        return Done(self.change(super().submit(batch).sampled))


def logprobs(sampled: SamplerOutput, **values: Any) -> dict[str, Any]:
    row = TokenLogprobs(**{"token_id": 1, "logprob": -1.0, "rank": 1, **values})
    return {key: (row,) * len(ids) for key, ids in sampled.token_ids.items()}


STRAYS: dict[str, Any] = {
    "nothing": lambda s: replace(s, token_ids={k: v for k, v in s.token_ids.items() if k != VICTIM}),
    "no ids": lambda s: replace(s, token_ids={**s.token_ids, VICTIM: ()}),
    "too many": lambda s: replace(s, token_ids={**s.token_ids, VICTIM: (1, 2)}),
    "a list": lambda s: replace(s, token_ids={**s.token_ids, VICTIM: [1]}),
    "a bool": lambda s: replace(s, token_ids={**s.token_ids, VICTIM: (True,)}),
    "numpy": lambda s: replace(s, token_ids={**s.token_ids, VICTIM: (np.int64(1),)}),
    "an error of its own": lambda s: replace(s, errors={VICTIM: 17}),
    "NaN logprob": lambda s: replace(s, logprobs={VICTIM: logprobs(s, logprob=math.nan)[VICTIM]}),
    "NaN in top": lambda s: replace(s, logprobs={VICTIM: logprobs(s, top=[(1, math.inf)])[VICTIM]}),
    "a text in top": lambda s: replace(s, logprobs={VICTIM: logprobs(s, top=["ab"])[VICTIM]}),
    "no logprobs": lambda s: replace(s, logprobs={VICTIM: ("none",)}),
    "too many logprobs": lambda s: replace(s, logprobs={VICTIM: logprobs(s)[VICTIM] * 2}),
    "endless prompt logprobs": lambda s: replace(s, prompt_logprobs={VICTIM: logprobs(s, logprob=-math.inf)[VICTIM]}),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_what_a_sampler_may_not_say_costs_the_request_it_is_said_of(stray: str) -> None:
    executor = Reports()
    executor.change = lambda sampled: STRAYS[stray](sampled) if VICTIM in sampled.token_ids else sampled
    engine = make_engine(Fcfs, SETTINGS, executor, num_blocks=NUM_BLOCKS, faults=Faults(NAMES))
    sent = requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.error(VICTIM).startswith("sampler=chaos (plugin chaos, acme-chaos 1.0): ")
    assert all(isinstance(row, TokenLogprobs) for delta in answers.deltas["r1"] for row in delta.logprobs)
    assert_whole(engine)


def test_ids_of_requests_that_are_not_in_the_step_are_dropped_and_reported() -> None:
    executor = Reports()
    executor.change = lambda sampled: replace(sampled, token_ids={**sampled.token_ids, "nobody": (1,)})
    engine = make_engine(Fcfs, SETTINGS, executor, num_blocks=NUM_BLOCKS, faults=Faults(NAMES))
    sent = requests()[:3]
    answers = run(engine, sent)
    assert_solo(answers, sent)
    assert "nobody" not in answers.deltas
    assert answers.incidents[0].reason == "it returned ids for ['nobody']"
    assert answers.incidents[-1].failures == len(answers.incidents)


VERDICTS: dict[str, Any] = {
    "left out": lambda verdict: None,
    "more ids": lambda verdict: Verdict((*verdict.token_ids, 1)),
    "other ids": lambda verdict: Verdict(tuple(i + 1 for i in verdict.token_ids)),
    "a list": lambda verdict: Verdict(list(verdict.token_ids)),
    "nothing kept": lambda verdict: Verdict(()),
    "a reason of its own": lambda verdict: Verdict(verdict.token_ids, "enough"),
    "a stop reason of its own": lambda verdict: Verdict(verdict.token_ids, FinishReason.STOP, 1.5),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_that_cannot_be_costs_the_request_it_is_on(name: str) -> None:
    class Judges(Standard):
        def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Any:
            verdicts = dict(super().judge(output, sampled))
            for part in output.scheduled:
                if due(part.request):
                    verdicts[VICTIM] = VERDICTS[name](verdicts[VICTIM])
            return verdicts

    engine = engine_of(Fcfs, completion=Judges(Standard.Settings(), CompletionContext(fake_spec())))
    sent = requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.error(VICTIM).startswith("completion=chaos (plugin chaos, acme-chaos 1.0): judge ")
    assert_whole(engine)


def test_a_true_verdict_is_no_token() -> None:
    """True equals 1; the client gets the id that was sampled."""

    class Bools(Standard):
        def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Any:
            verdicts = super().judge(output, sampled)
            return {
                key: Verdict(tuple(bool(i) if i < 2 else i for i in verdict.token_ids), verdict.finish_reason)
                for key, verdict in verdicts.items()
            }

    engine = engine_of(Fcfs, completion=Bools(Standard.Settings(), CompletionContext(fake_spec())))
    sent = requests()
    answers = run(engine, sent)
    assert_solo(answers, sent)
    assert {type(token) for request in sent for token in answers.ids(request.request_id)} == {int}


@pytest.mark.parametrize("kind", ["raise", "mutate", "NaN"])
def test_drafts_and_a_decode_that_fails_one_request(kind: str) -> None:
    class Drafts(FakeDrafts):
        def propose(self, batch: Any) -> Any:
            drafts = dict(super().propose(batch))
            for request in batch:
                if due(request):
                    chaos.strike(lambda request=request: request.output_token_ids.append(1))
                    drafts[VICTIM] = chaos.value(drafts[VICTIM], (), (1, math.nan))
            return drafts

    chaos = Chaos(kind)
    engine, sent = engine_of(Fcfs, decode=lambda: Drafts(3, 1)), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.error(VICTIM).startswith("decode=chaos (plugin chaos, acme-chaos 1.0): ")
    assert_whole(engine)


def test_several_stages_may_fail_at_once() -> None:
    victims = {"prefill": "r4", "decode": "r9", "completion": "r21"}

    class Prefills(Chunked):
        def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
            if request.request_id == victims["prefill"]:
                raise OSError("prefill")
            return super().num_tokens(request, remaining, token_budget)

    class Decodes(Plain):
        def propose(self, batch: Any) -> Any:
            if any(r.request_id == victims["decode"] and r.num_output_tokens > 1 for r in batch):
                raise OSError("decode")
            return {}

    class Judges(Standard):
        def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Any:
            if any(p.request.request_id == victims["completion"] for p in output.scheduled):
                raise OSError("completion")
            return super().judge(output, sampled)

    engine = engine_of(
        Fcfs,
        prefill=lambda: Prefills(Chunked.Settings(), PrefillContext(256)),
        decode=lambda: Decodes(Plain.Settings(), DecodeContext(MAX_MODEL_LEN)),
        completion=Judges(Standard.Settings(), CompletionContext(fake_spec())),
    )
    sent = requests()
    answers = run(engine, sent)
    for group, key in victims.items():
        assert answers.error(key) == f"{group}=chaos (plugin chaos, acme-chaos 1.0): OSError: {group}"
        assert answers.ends(key) == [FinishReason.ERROR]
    assert_solo(answers, [request for request in sent if request.request_id not in victims.values()])
    assert_whole(engine)


def test_lists_of_a_request_are_read_only_and_not_the_clients() -> None:
    message = engine_request("a", [1, 2, 3])
    request = Request.from_engine_request(message)
    message.prompt_token_ids.append(4)
    assert request.prompt_token_ids == [1, 2, 3]
    for change in (lambda ids: ids.append(1), lambda ids: ids.sort(), lambda ids: ids.__setitem__(0, 1)):
        with pytest.raises(TypeError, match="read only for plugins"):
            change(request.prompt_token_ids)
    request.append_output((5, 6))
    with pytest.raises(TypeError, match="read only"):
        request.output_token_ids += [7]
    assert (request.output_token_ids, request.num_tokens) == ([5, 6], 5)
    copied = [*request.output_token_ids, 7]
    assert copied + request.prompt_token_ids[:1] == [5, 6, 7, 1]


# --- a stranger's scheduler ---------------------------------------------------------------------


class Turns:
    """One request at a time, in turn, and of this project's code it uses nothing but the contract."""

    def __init__(self, settings: Any, context: Any):
        self.context, self.requests, self.step = context, {}, 0

    def add(self, request: Request) -> None:
        self.requests.setdefault(request.request_id, request)

    def schedule(self) -> SchedulerOutput:
        self.step += 1
        for request in list(self.requests.values()):
            count = self._give(request)
            if count:
                self.requests[request.request_id] = self.requests.pop(request.request_id)  # to the end of the row
                start = request.num_computed_tokens
                request.num_computed_tokens += count
                samples = request.num_computed_tokens == request.num_known_tokens
                request.num_pending_tokens += samples
                return SchedulerOutput(self.step, (ScheduledRequest(request, start, count, 0, samples),))
        return SchedulerOutput(self.step)

    def _give(self, request: Request) -> int:
        cache = self.context.cache
        if request.status is not RequestStatus.RUNNING:
            request.num_computed_tokens = cache.lookup(request)
        left = request.num_known_tokens - request.num_computed_tokens
        count = self.context.prefill.num_tokens(request, left, 64) if left > 1 else 1
        self.context.decode.propose([request])
        if not count or not cache.allocate(request, request.num_computed_tokens + count):
            return 0
        request.status = RequestStatus.RUNNING
        return count

    def update(self, output: SchedulerOutput, verdicts: Any) -> list[Request]:
        ended = []
        for part in output.scheduled:
            verdict = verdicts.get(part.request.request_id)
            part.request.num_pending_tokens = 0
            if verdict:
                part.request.append_output(verdict.token_ids)
                if verdict.finish_reason:
                    ended += self.finish([part.request.request_id], verdict.finish_reason)
        return ended

    def finish(self, request_ids: Any, reason: FinishReason) -> list[Request]:
        ended = [self.requests.pop(key) for key in request_ids if key in self.requests]
        for request in ended:
            self.context.cache.free(request, discard=reason is FinishReason.ERROR)
            request.status, request.finish_reason = STATUS_OF_REASON[reason], reason
        return ended

    def counts(self) -> Counts:
        return Counts(running=len(self.requests))


@pytest.mark.parametrize("stage", ["prefill", "decode", "completion", "cache", "executor"])
def test_a_scheduler_that_is_a_class_of_its_own_is_guarded_like_ours(stage: str) -> None:
    chaos = Chaos("raise")
    parts: dict[str, Any] = {
        "prefill": {"prefill": partial(ChaosPrefill, chaos)},
        "decode": {"decode": partial(ChaosDecode, chaos)},
        "completion": {"completion": ChaosCompletion(chaos)},
        "cache": {"cache": partial(ChaosCache, chaos)},
    }
    executor = ChaosExecutor(chaos) if stage == "executor" else FakeExecutor()
    options = {"num_blocks": NUM_BLOCKS, "faults": Faults(NAMES), **parts.get(stage, {})}
    engine, sent = make_engine(Turns, SETTINGS, executor, **options), requests()
    answers = run(engine, sent)
    assert chaos.fired
    assert_solo(answers, sent, but=VICTIM)
    assert answers.error(VICTIM).startswith(f"{stage}=chaos")
    assert_whole(engine)
