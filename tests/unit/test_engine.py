"""Engine.step(): deltas, endings, isolation of failures, and books that balance."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pluggy
import pytest

from core.batch import SchedulerOutput, Verdict
from core.border.step_loop import StepLoop
from core.engine import Engine
from core.outputs import TokenDelta
from core.request import FinishReason, Request
from core.testing.engines import engine_request, make_engine
from core.testing.fakes import expected_ids
from core.testing.harness.fake_executors import FakeExecutor
from core.wire import Add
from plugins.schedulers.fcfs import Fcfs


def engine_of(executor: FakeExecutor, num_blocks: int = 64, **limits: int) -> Engine:
    return make_engine(Fcfs, Fcfs.Settings(**limits), executor, num_blocks=num_blocks)


def run(engine: Engine, *requests, steps: int = 2000) -> dict[str, list[TokenDelta]]:
    engine.add(list(requests))
    deltas: dict[str, list[TokenDelta]] = {}
    for _ in range(steps):
        if not engine.has_work():
            return deltas
        for delta in engine.step().deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    raise AssertionError("the engine did not finish")


def ids_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def solo(request) -> list[int]:
    return expected_ids(Request.from_engine_request(request))


def prompts(n: int) -> list:
    return [engine_request(f"r{i}", list(range(1 + i, 40 + 5 * i)), max_tokens=5 + i % 4) for i in range(n)]


def assert_whole(engine: Engine) -> None:
    engine.step()
    stats = engine.step().stats
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total


def test_a_batch_gives_each_request_its_solo_tokens_and_one_ending():
    engine = engine_of(FakeExecutor())
    requests = prompts(8)
    deltas = run(engine, *requests)
    for request in requests:
        assert ids_of(deltas[request.request_id]) == solo(request)
        reasons = [delta.finish_reason for delta in deltas[request.request_id] if delta.finish_reason]
        assert reasons == [FinishReason.LENGTH]
    assert_whole(engine)


def test_a_pool_for_two_and_a_half_sequences_changes_nothing_but_the_order():
    engine = engine_of(FakeExecutor(), num_blocks=10)
    requests = [engine_request(f"r{i}", list(range(2 + i, 42 + i)), max_tokens=24) for i in range(16)]
    deltas = run(engine, *requests)
    assert sum(delta.num_preemptions for r in requests for delta in deltas[r.request_id][-1:]) > 0
    for request in requests:
        assert ids_of(deltas[request.request_id]) == solo(request)
    assert_whole(engine)


def test_one_request_that_breaks_the_step_fails_alone():
    def fault(batch):
        if "r3" in batch.request_ids:
            raise ValueError("bad row")

    engine = engine_of(FakeExecutor(fault=fault))
    requests = prompts(16)
    deltas = run(engine, *requests)
    assert [d.finish_reason for d in deltas["r3"]] == [FinishReason.ERROR]
    assert "ValueError: bad row" in deltas["r3"][0].error
    for request in requests:
        if request.request_id != "r3":
            assert ids_of(deltas[request.request_id]) == solo(request)
    assert_whole(engine)


def test_a_fault_at_a_later_token_keeps_what_was_delivered():
    seen = {"n": 0}

    def fault(batch):
        if "r1" in batch.request_ids:
            seen["n"] += 1
            if seen["n"] > 3:
                raise RuntimeError("at token 4")

    engine = engine_of(FakeExecutor(fault=fault))
    requests = prompts(8)
    deltas = run(engine, *requests)
    assert ids_of(deltas["r1"]) == solo(requests[1])[:3]
    assert deltas["r1"][-1].finish_reason is FinishReason.ERROR
    assert ids_of(deltas["r2"]) == solo(requests[2])


def test_a_step_that_fails_for_all_fails_each_once_and_the_engine_lives_on():
    broken = {"on": True}

    def fault(batch):
        if broken["on"]:
            raise RuntimeError("no model")

    engine = engine_of(FakeExecutor(fault=fault))
    deltas = run(engine, *prompts(5))
    assert [len(deltas[f"r{i}"]) for i in range(5)] == [1] * 5
    broken["on"] = False
    again = engine_request("again", [1, 2, 3])
    assert ids_of(run(engine, again)["again"]) == solo(again)
    assert_whole(engine)


def test_an_engine_where_nothing_runs_any_more_gives_up_so_that_it_is_restarted():
    def fault(batch):
        raise RuntimeError("the device is lost")

    engine = engine_of(FakeExecutor(fault=fault))
    with pytest.raises(RuntimeError, match="the device is lost"):
        for i in range(5):
            engine.add([engine_request(f"a{i}", [1, 2]), engine_request(f"b{i}", [3, 4])])
            engine.step()
    assert i == 2


def test_ids_that_are_none_of_the_models_fail_the_request_they_were_meant_for():
    executor = FakeExecutor()
    engine = engine_of(executor)
    run_model = executor._model.run

    def strays(batch):
        sampled = run_model(batch)
        for request_id, stray in (("r1", 10**9), ("r2", 1.5), ("r3", -1)):
            if request_id in sampled.token_ids:
                sampled.token_ids[request_id] = (stray,)
        return sampled

    executor._model.run = strays
    requests = prompts(6)
    deltas = run(engine, *requests)
    for i, request in enumerate(requests):
        if i in (1, 2, 3):
            assert "no token ids of the model" in deltas[request.request_id][0].error
        else:
            assert ids_of(deltas[request.request_id]) == solo(request)
    assert_whole(engine)


@dataclass
class Says:
    """A completion that always says the same."""

    verdicts: dict

    def judge(self, output, sampled):
        return self.verdicts


@pytest.mark.parametrize("verdicts", [{}, {"r0": Verdict(()), "r1": Verdict(())}])
def test_what_a_completion_leaves_out_ends_with_an_error(verdicts):
    engine = make_engine(Fcfs, Fcfs.Settings(), FakeExecutor(), completion=Says(verdicts))
    deltas = run(engine, *prompts(2))
    assert [deltas[key][-1].finish_reason for key in ("r0", "r1")] == [FinishReason.ERROR] * 2
    assert all("completion: judge" in deltas[key][-1].error for key in ("r0", "r1"))
    assert_whole(engine)


class PlansNothing(Fcfs):
    def schedule(self):
        return SchedulerOutput(step=1)


def test_an_engine_that_plans_nothing_pauses_ends_its_requests_and_gives_up(monkeypatch):
    monkeypatch.setattr("core.engine.MAX_STALLED_STEPS", 20)
    engine = make_engine(PlansNothing, PlansNothing.Settings(), FakeExecutor())
    deltas = run(engine, *prompts(2), steps=30)
    assert all("leaves the request waiting for ever" in deltas[key][0].error for key in ("r0", "r1"))
    run(engine, *prompts(2), steps=30)
    with pytest.raises(RuntimeError, match="nothing was planned in 20 steps"):
        run(engine, *prompts(2), steps=30)


def test_one_bad_request_after_the_other_does_not_end_the_engine():
    def fault(batch):
        raise RuntimeError("bad")

    engine = engine_of(FakeExecutor(fault=fault))
    for i in range(10):
        assert run(engine, engine_request(f"r{i}", [1, 2]))[f"r{i}"][0].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("after", [0, 1, 3])
def test_abort_at_any_time_frees_everything_and_is_idempotent(after):
    engine = engine_of(FakeExecutor(), max_num_running_reqs=4)
    engine.add(prompts(8))
    for _ in range(after):
        engine.step()
    ids = [f"r{i}" for i in range(8)]
    engine.abort(ids)
    engine.abort([*ids, "nobody"])
    assert not engine.has_work()
    assert_whole(engine)


def test_a_request_that_can_never_fit_is_answered_with_an_error():
    engine = engine_of(FakeExecutor(), num_blocks=4)
    deltas = run(engine, engine_request("big", list(range(200))), engine_request("small", [1, 2, 3]))
    assert deltas["big"][-1].finish_reason is FinishReason.ERROR
    assert "cache.memory" in deltas["big"][-1].error
    assert deltas["small"][-1].finish_reason is FinishReason.LENGTH
    assert_whole(engine)


def test_ended_and_preempted_requests_are_forgotten_by_the_executor():
    executor = FakeExecutor()
    engine = engine_of(executor)
    run(engine, *prompts(3))
    assert {"r0", "r1", "r2"} <= set(executor.forgotten)
    engine.close()
    assert executor.closed


def test_prefix_cache_is_reset_while_requests_run():
    engine = engine_of(FakeExecutor())
    first, second = (engine_request(name, list(range(40)), 6) for name in ("first", "second"))
    engine.add([first])
    engine.step()
    assert engine.reset_prefix_cache()
    answers = run(engine)
    assert ids_of(answers["first"]) == solo(first)[1:]
    answers = run(engine, second)
    assert ids_of(answers["second"]) == solo(second)
    assert answers["second"][0].num_cached_tokens == 0


def test_a_repeated_add_makes_no_second_sequence():
    engine = engine_of(FakeExecutor())
    request = engine_request("twice", [1, 2, 3])
    engine.add([request])
    engine.step()
    assert ids_of(run(engine, request, request)["twice"]) == solo(request)[1:]
    assert ids_of(run(engine, request)["twice"]) == solo(request)  # the id is free again


def test_the_step_loop_reports_gauges_at_the_start_and_once_after_the_work():
    engine = engine_of(FakeExecutor())
    loop = StepLoop(engine)
    (first,) = loop.turn([])
    assert first.stats.kv_blocks_free == first.stats.kv_blocks_total == 64
    assert loop.turn([]) == []
    results = loop.turn([Add(requests=[engine_request("r", [1, 2, 3], max_tokens=3)])])
    while engine.has_work():
        results = loop.turn([])
    assert results[0].stats.running == 0
    (idle,) = loop.turn([])
    assert (idle.deltas, idle.stats.kv_blocks_free) == ([], 64)
    assert loop.turn([]) == []


def test_a_request_that_cannot_be_added_fails_alone():
    class Refuses(Fcfs):
        def add(self, request):
            if request.request_id == "b":
                raise KeyError("no queue for it")
            super().add(request)

    loop = StepLoop(make_engine(Refuses, Refuses.Settings(), FakeExecutor()))
    requests = [engine_request("a", [1]), engine_request("b", [2]), engine_request("c", [3])]
    deltas = loop.turn([Add(requests=requests)])[0].deltas
    assert {delta.request_id: delta.error for delta in deltas} == {
        "a": None,
        "b": "scheduler: KeyError: 'no queue for it'",
        "c": None,
    }


def test_no_hook_is_called_in_twenty_steps(monkeypatch):
    engine = engine_of(FakeExecutor())
    engine.add([engine_request(f"r{i}", list(range(50)), max_tokens=40) for i in range(8)])
    calls = []
    with monkeypatch.context() as patch:  # every hook of every plugin manager in this process, pytest's own included
        patch.setattr(pluggy.HookCaller, "__call__", lambda self, **kwargs: calls.append(self.name))
        steps = [engine.step() for _ in range(20)]
    assert calls == []
    assert all(step.deltas for step in steps)


def test_step_fits_one_screen_and_reads_as_stages_4_to_9():
    source = inspect.getsource(Engine.step)
    assert len(source.splitlines()) <= 40
    words = ["4 scheduler", "5 prefill", "6 decode", "7 sampler", "8 detokenizer", "9 completion"]
    assert all(word in source for word in words)
    order = [source.index(word) for word in words if not word.startswith("8")]
    assert order == sorted(order)
