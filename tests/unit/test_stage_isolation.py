"""What samplers, verdicts and drafts may not say costs the request that it is said of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.batch import SamplerOutput, SchedulerOutput, TokenLogprobs, Verdict
from core.isolation.faults import Faults
from core.request import FinishReason, Request
from core.stages.completion import CompletionContext, Standard
from core.testing.engines import engine_request, fake_spec, make_engine
from core.testing.fakes import FakeDrafts
from core.testing.harness.engine_isolation import (
    NAMES,
    NUM_BLOCKS,
    SETTINGS,
    VICTIM,
    Chaos,
    assert_solo,
    assert_whole,
    due,
    engine_of,
    requests,
    run,
)
from core.testing.harness.fake_executors import Done, FakeExecutor
from plugins.schedulers.fcfs import Fcfs


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
