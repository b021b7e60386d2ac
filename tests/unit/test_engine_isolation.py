"""32 requests run, a plugin of one stage fails one of them: it ends with an error that names the plugin, the 31 others end
with the tokens of a solo run, and the engine goes on as before.

The model here is the fake one, whose output depends on each block and position that it reads.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from core.batch import SamplerOutput, SchedulerOutput
from core.engine import Engine
from core.isolation.faults import Faults
from core.request import FinishReason, Request
from core.stages.completion import CompletionContext, Standard
from core.stages.decode import DecodeContext, Plain
from core.stages.prefill import Chunked, PrefillContext
from core.testing.engines import MAX_MODEL_LEN, engine_request, fake_spec
from core.testing.harness.engine_isolation import (
    NAMES,
    VICTIM,
    Answers,
    Chaos,
    ChaosPrefill,
    assert_solo,
    assert_whole,
    due,
    engine_of,
    parts_with,
    requests,
    run,
    solo,
)
from plugins.schedulers.fcfs import Fcfs


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
                nan = structs.replace(part, num_tokens=math.nan)
                parts[index] = self.chaos.value(part, structs.replace(part, num_tokens=[1]), nan)
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


def engine_with(stage: str, chaos: Chaos) -> Engine:
    scheduler = {"scheduler": ChaosScheduler, "update": ChaosUpdate, "finish": ChaosFinish}.get(stage)
    return engine_of(
        partial(scheduler, chaos) if scheduler else Fcfs,
        chunk_size=24,
        faults=Faults(NAMES, block_timeout=2.0, clock=chaos.clock),
        **parts_with(stage, chaos),
    )


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
