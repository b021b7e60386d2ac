"""Stage spans: contiguous, in order, never negative, whatever the clocks said."""

from __future__ import annotations

import itertools
import random

import pytest

from core.components import STAGES
from core.front.spans import FirstToken, Moments, StageSeconds, StageWork, Work, stage_spans
from core.outputs import StepStats

NOTHING = StageSeconds()
STEP = StepStats(
    num_scheduled_tokens=8, num_prefill_tokens=6, schedule_s=1, build_s=2, forward_s=6, sample_s=3, output_s=5
)  # fmt: skip


def moments(
    received=10.0, arrival=11.0, rendered=13.0, registered=16.0, scheduled=20.0, first=25.0, last=31.0, end=38.0
):
    return Moments(received, arrival, rendered, registered, scheduled, first, last, end)


def covered(spans):
    """Seconds of the union of the spans."""
    total, reached = 0.0, min(span.start for span in spans)
    for start, end in sorted((span.start, span.end) for span in spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def intervals(spans):
    return {span.stage: (span.start, span.end) for span in spans}


WORK = Work(NOTHING, FirstToken(NOTHING, NOTHING, sample_s=2.0), NOTHING, admit_s=0.5)
NO_TOKEN = Work(NOTHING, None, NOTHING, admit_s=0.5)


def test_a_finished_request_has_nine_in_order():
    spans = stage_spans(moments(), WORK, finished=True)
    assert tuple(span.stage for span in spans) == STAGES
    assert intervals(spans) == {
        "frontend": (10, 11),
        "renderer": (11, 13),
        "admission": (13, 16),
        "scheduler": (16, 20),
        "prefill": (20, 25),
        "decode": (25, 31),
        "sampler": (23, 31),  # stage 7 made the first token in the two seconds before it came
        "detokenizer": (25, 38),
        "completion": (31, 38),
    }
    assert covered(spans) == 28


@pytest.mark.parametrize(
    ("ended", "work", "stages"),
    [
        ({"scheduled": None, "first": None, "last": None}, NO_TOKEN, (*STAGES[:4], "completion")),
        ({"first": None, "last": None}, NO_TOKEN, (*STAGES[:5], "completion")),
        ({}, WORK, STAGES),
    ],
    ids=["while it waited", "in its prefill", "while it decoded"],
)
def test_an_aborted_request_ends_in_the_stage_that_it_had_reached(ended, work, stages):
    spans = stage_spans(moments(**ended), work, finished=False)
    assert tuple(span.stage for span in spans) == stages
    assert covered(spans) == 28
    assert intervals(spans)["completion"] == (38, 38)


def test_a_first_token_without_a_scheduling_time_was_scheduled_when_it_was_registered():
    spans = intervals(stage_spans(moments(scheduled=None), WORK, finished=True))
    assert (spans["scheduler"], spans["prefill"]) == ((16, 16), (16, 25))


def test_p4_clocks_that_step_back_make_no_negative_span():
    numbers = random.Random(4)
    for _ in range(300):
        values = [numbers.uniform(-9, 9) for _ in range(8)]
        work = Work(
            seconds(numbers), FirstToken(seconds(numbers), seconds(numbers), values[0]), seconds(numbers), values[1]
        )
        for finished, first in itertools.product((True, False), (work.first, None)):
            known = values if first else [*values[:5], None, None, values[7]]
            spans = stage_spans(
                Moments(*known), Work(work.registered, first, work.end, work.admit_s), finished=finished
            )
            assert all(0 <= span.busy_s <= span.end - span.start for span in spans)
            whole = max(span.end for span in spans) - spans[0].start
            assert covered(spans) == pytest.approx(whole)


def seconds(numbers):
    return StageSeconds(*(numbers.uniform(-9, 9) for _ in range(6)))


def test_stages_share_the_forward_pass_by_their_tokens():
    total = StageSeconds()
    total.add(STEP)
    total.add(StepStats(detokenize_s=7))  # an idle step has no tokens to divide by
    assert total == StageSeconds(scheduler=1, prefill=6, decode=2, sampler=3, detokenizer=7, completion=5)


def test_work_of_the_step_in_hand_counts_after_it_and_not_before():
    work = StageWork()
    work.end(STEP)
    assert work.before() == work.after(99.0)
    work.begin(STEP, 100.0)
    assert work.before().sampler == 3
    assert (work.after(104.0).sampler, work.after(104.0).detokenizer, work.sample_s) == (6, 4, 3)
    kept = work.before()
    work.end(STEP)
    assert kept.sampler == 3, "a sum that a request keeps must not grow"
    assert work.before().sampler == work.after(200.0).sampler == 6


def test_busy_seconds_are_those_of_the_request_s_own_steps():
    work = StageWork()
    work.end(STEP)  # others', before it came
    start = work.after(0.0)
    work.end(STEP)  # others', while it waited
    work.begin(STEP, 0.0)
    first = FirstToken(work.before(), work.after(0.0), work.sample_s)
    work.end(STEP)
    work.begin(STEP, 0.0)
    spans = stage_spans(
        Moments(0, 0, 0, 0, 100, 200, 300, 400), Work(start, first, work.after(0.0), 0.0), finished=True
    )  # fmt: skip
    busy = {span.stage: span.busy_s for span in spans}
    assert busy == {
        "frontend": 0,
        "renderer": 0,
        "admission": 0,
        "scheduler": 2,
        "prefill": 12,  # the step in which it waited counts: when its own began is known to the engine alone
        "decode": 2,
        "sampler": 6,
        "detokenizer": 0,
        "completion": 100,
    }
