"""`prefill: chunked` beside its contract: sizes by time, few long prompts at once, and a bounded gap for running streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from core.batch import ScheduledRequest, SchedulerOutput
from core.isolation.stages import step_time
from core.request import Request, RequestStatus
from core.stages.prefill import Chunked, PrefillContext
from core.stages.step_cost import StepTime, attended
from core.testing.engines import engine_request, make_engine
from core.testing.fake_loop import fake_engine
from core.testing.fakes import FakeEngine, Limits, make_request
from core.testing.harness.fake_executors import FakeExecutor
from core.testing.scheduler_checks import SchedulerChecks
from core.testing.scheduler_machine import PREFILLS
from plugins.schedulers.fcfs import Fcfs

BUDGET = 2048
FIXED_S, PER_TOKEN_S, PER_DECODE_S, PER_POSITION_S = 0.005, 5e-5, 5e-4, 5e-9


class AnyScheduler(SchedulerChecks):
    component = Fcfs


def chunked(budget: int = BUDGET, **settings: Any) -> Chunked:
    return Chunked(Chunked.Settings(**settings), PrefillContext(budget))


def step_seconds(num_prefill: int, num_decodes: int, num_attended: int) -> float:
    return FIXED_S + PER_TOKEN_S * num_prefill + PER_DECODE_S * num_decodes + PER_POSITION_S * num_attended


def run_prompt(prefill: Chunked, length: int, num_decodes: int) -> list[float]:
    """A prompt beside running streams, on a machine of the costs above. The seconds of each step with some of it."""
    request, took = make_request("long", [1] * length, status=RequestStatus.RUNNING), []
    while request.num_computed_tokens < length:
        start = request.num_computed_tokens
        count = prefill.num_tokens(request, length - start, BUDGET - num_decodes)
        took.append(step_seconds(count, num_decodes, attended(start, count)))
        request.num_computed_tokens += count
        prefill.step_finished(StepTime(count, num_decodes, took[-1], attended(start, count)))
    return took


def start(prefill: Chunked, request: Request, token_budget: int) -> int:
    """As a scheduler does that has room for it. The tokens of its first chunk."""
    count = prefill.num_tokens(request, request.num_tokens, token_budget)
    if count:
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, count
    return count


def paced(target: float = 0.03, num_decodes: int = 8) -> Chunked:
    """It knows what steps of the costs above take, and that streams run."""
    prefill = chunked(target_tpot=target)
    for _ in range(2):
        run_prompt(prefill, 3000, num_decodes)
    return prefill


def test_a_bound_of_chunks_by_time_needs_a_time() -> None:
    with pytest.raises(ValidationError, match="prefill.min_chunk .* set prefill.target_tpot"):
        Chunked.Settings(min_chunk=8)
    assert Chunked.Settings(min_chunk=8, target_tpot=0.1).min_chunk == 8


# --- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "chunk"), [(8191, 512), (8192, 1024), (100, 100)])
def test_the_default_is_512_and_1024_for_8k(length: int, chunk: int) -> None:
    assert chunked().num_tokens(make_request("a", [1] * length), length, BUDGET) == chunk


@pytest.mark.parametrize("target", [0.015, 0.03, 0.06])
def test_steps_stay_within_the_target_once_their_cost_is_known(target: float) -> None:
    prefill = chunked(target_tpot=target)
    for _ in range(30):
        prefill.step_finished(StepTime(0, 8, step_seconds(0, 8, 0)))
    run_prompt(prefill, 3000, 8)
    took = run_prompt(prefill, 12_000, 8)
    assert max(took) <= target * 1.02
    assert sorted(took)[len(took) // 2] >= target * 0.9, "and use it"


def test_a_target_that_cannot_be_met_leaves_the_least_chunk() -> None:
    prefill = chunked(target_tpot=0.001, min_chunk=48)
    run_prompt(prefill, 3000, 8)
    request = make_request("a", [1] * 1000)
    assert start(prefill, request, BUDGET - 8) == 48
    assert prefill.num_tokens(make_request("b", [1] * 1000), 1000, BUDGET - 56) == 0, "one of them moves on, not each"


def test_all_prompts_of_a_step_share_its_target() -> None:
    prefill = chunked(target_tpot=0.03)
    for length in (3000, 3000):
        run_prompt(prefill, length, 8)
    budget, total, positions = BUDGET - 8, 0, 0
    for name in "abcdef":
        count = start(prefill, make_request(name, [1] * 150), budget)
        budget, total, positions = budget - count, total + count, positions + attended(0, count)
    assert step_seconds(total, 8, positions) <= 0.03 * 1.02 and total > 300


def test_without_streams_chunks_have_their_fixed_sizes() -> None:
    prefill = chunked(target_tpot=0.001)
    for _ in range(10):
        prefill.step_finished(StepTime(512, 0, 0.05, attended(0, 512)))
    assert prefill.num_tokens(make_request("a", [1] * 1000), 1000, BUDGET) == 512


def test_prompts_that_are_through_count_as_streams_of_the_next_step() -> None:
    prefill = chunked(target_tpot=0.02)
    for _ in range(10):
        prefill.step_finished(StepTime(512, 0, 0.1, attended(0, 512)))
    assert start(prefill, make_request("short", [1] * 100), BUDGET) == 100
    prefill.step_finished(StepTime(100, 0, 0.02, attended(0, 100)))
    assert prefill.num_tokens(make_request("long", [1] * 5000), 5000, BUDGET - 1) < 200


def test_one_that_was_asked_for_and_not_started_takes_nothing_of_the_step() -> None:
    prefill, budget = paced(), BUDGET - 8
    alone = prefill.num_tokens(make_request("a", [1] * 1000), 1000, budget)
    assert alone > 200
    for name in "bcd":
        assert prefill.num_tokens(make_request(name, [1] * 1000), 1000, budget) == alone
    assert start(prefill, make_request("e", [1] * 1000), budget) == alone
    assert prefill.num_tokens(make_request("f", [1] * 1000), 1000, budget - alone) == 0


def test_a_second_question_in_a_step_forgets_nothing_that_was_given() -> None:
    """Nor does the scheduler's question what a whole step would do, whose answer is that of a step with nothing in it."""
    prefill, budget = paced(), BUDGET - 8
    late = make_request("late", [1] * 1000)
    first = start(prefill, make_request("a", [1] * 200), budget)
    second = prefill.num_tokens(late, 1000, budget - first)
    assert first == 200 and 16 < second < 300
    assert prefill.num_tokens(late, 1000, BUDGET) > 300
    assert prefill.num_tokens(late, 1000, budget - first) == second
    assert start(prefill, late, budget - first) == second
    assert prefill.num_tokens(make_request("b", [1] * 1000), 1000, budget - first - second) == 0


def test_a_prefix_hit_is_where_a_waiting_request_begins() -> None:
    """Later positions attend to more: fewer of them fit, whether they were computed or found."""
    prefill = chunked(target_tpot=0.03)
    for length in (3000, 12_000):
        run_prompt(prefill, length, 8)
    found = prefill.num_tokens(make_request("a", [1] * 12_000), 2000, BUDGET)
    computed = make_request("b", [1] * 12_000, status=RequestStatus.RUNNING, num_computed_tokens=10_000)
    assert found == prefill.num_tokens(computed, 2000, BUDGET)
    assert found < prefill.num_tokens(make_request("c", [1] * 12_000), 12_000, BUDGET)


def test_a_prompt_that_has_ended_with_its_first_token_is_no_stream_of_the_next_step() -> None:
    prefill = chunked(target_tpot=0.02)
    for _ in range(10):
        prefill.step_finished(StepTime(512, 0, 0.1, attended(0, 512)))
    short = make_request("short", [1] * 100, 1)
    assert start(prefill, short, BUDGET) == 100
    short.status = RequestStatus.FINISHED_LENGTH
    prefill.step_finished(StepTime(100, 0, 0.02, attended(0, 100)))
    assert prefill.num_tokens(make_request("long", [1] * 5000), 5000, BUDGET) == 512


def test_a_step_that_failed_untold_leaves_the_next_one_whole() -> None:
    prefill = paced()
    first = start(prefill, make_request("a", [1] * 1000), BUDGET - 8)
    assert prefill.num_tokens(make_request("b", [1] * 1000), 1000, BUDGET - 8) == first


def test_in_an_engine_steps_with_prompts_stay_within_the_target() -> None:
    """With few blocks: most of those that are asked for do not start."""
    limits = Limits(max_num_scheduled_tokens=BUDGET, max_num_running_reqs=12, max_model_len=4096)
    prefill = chunked(target_tpot=0.03)
    engine = fake_engine(120, limits, prefill=prefill)
    engine.watcher = None  # it is told of other costs here
    engine.add(*(make_request(f"s{i}", [i] * 20, 200) for i in range(4)))
    took: list[float] = []
    for number in range(150):
        if number % 3 == 0:
            engine.add(make_request(f"r{number}", [number] * 400, 10))
        parts = engine.step().scheduled
        chunks = [(p.start, p.num_tokens) for p in parts if p.num_tokens > 1]
        num_prefill, num_attended = sum(n for _, n in chunks), sum(attended(*chunk) for chunk in chunks)
        seconds = step_seconds(num_prefill, len(parts) - len(chunks), num_attended)
        took += [seconds] if number > 20 and chunks else []
        prefill.step_finished(StepTime(num_prefill, len(parts) - len(chunks), seconds, num_attended))
    assert len(took) > 30 and max(took) <= 0.03 * 1.05
    assert sorted(took)[len(took) // 2] >= 0.03 * 0.6


# --- long prompts ------------------------------------------------------------------------------------------------------


def long_ones(*names: str, length: int = 100) -> list[Request]:
    return [make_request(name, [1] * length) for name in names]


def ask(prefill: Chunked, *requests: Request) -> list[bool]:
    """Whether each gets tokens; those that do are started, as a scheduler would."""
    given = []
    for request in requests:
        count = prefill.num_tokens(request, request.num_tokens - request.num_computed_tokens, 64)
        given.append(count > 0)
        if count:
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens += count
    return given


CAP: dict[str, Any] = {"long_prompt": 80, "chunk_size": 10, "long_chunk_size": 10, "max_long_prefills": 2}


def test_no_more_long_prompts_than_the_cap_and_short_ones_pass() -> None:
    prefill = chunked(**CAP)
    a, b, c = long_ones("a", "b", "c")
    short = make_request("s", [1] * 79)
    assert ask(prefill, a, b, c, short) == [True, True, False, True]
    assert ask(prefill, a, b, c) == [True, True, False]
    a.num_computed_tokens = 100  # the last chunk of its prompt is planned
    assert ask(prefill, b, c) == [True, True]


@pytest.mark.parametrize(
    "status",
    [
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_EXPIRED,
        RequestStatus.FINISHED_ERROR,
        RequestStatus.PREEMPTED,
        RequestStatus.SWAPPED,
        RequestStatus.WAITING,
    ],
)
def test_a_place_is_free_again_however_its_request_lost_it(status: RequestStatus) -> None:
    prefill = chunked(**CAP)
    a, b, c = long_ones("a", "b", "c")
    assert ask(prefill, a, b, c) == [True, True, False]
    b.status = status
    assert ask(prefill, c) == [True]
    if not status.is_finished:
        b.num_computed_tokens = 0
        assert ask(prefill, b) == [False]
        a.status = RequestStatus.FINISHED_LENGTH
        assert ask(prefill, b) == [True]


def test_one_that_was_asked_for_and_not_started_takes_no_place() -> None:
    prefill = chunked(**CAP)
    a, b, c, d = long_ones("a", "b", "c", "d")
    for request in (a, b, c, d):
        assert prefill.num_tokens(request, 100, 64) == 10  # no blocks for it, says the scheduler
    assert ask(prefill, c, d, a) == [True, True, False]


def test_a_running_one_is_never_held_back() -> None:
    prefill = chunked(**CAP)
    requests = long_ones("a", "b", "c")
    for request in requests:
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, 10
    assert ask(prefill, *requests) == [True, True, True]


def test_a_prompt_that_the_cache_holds_is_not_long() -> None:
    prefill = chunked(**CAP)
    assert ask(prefill, *long_ones("a", "b")) == [True, True]
    assert prefill.num_tokens(make_request("c", [1] * 100), 79, 64) == 10


def test_in_an_engine_with_aborts_and_preemptions_all_end() -> None:
    limits = Limits(max_num_scheduled_tokens=64, max_num_running_reqs=8)
    prefill = chunked(64, **{**CAP, "max_long_prefills": 1})
    engine = fake_engine(14, limits, prefill=prefill)
    requests = [make_request(f"r{i}", [i] * (100 if i % 3 else 20), 40) for i in range(24)]

    def check(engine: FakeEngine) -> None:
        computing = [r for r in engine.requests.values() if r.status is RequestStatus.RUNNING and in_long_prompt(r)]
        assert len(computing) <= 1
        if engine.num_steps % 7 == 0 and computing:
            engine.abort(computing[0].request_id)

    engine.add(*requests)
    engine.drain(check)
    assert engine.preempted and {r.status for r in requests} > {RequestStatus.FINISHED_ABORTED}
    assert not [request for request in prefill._long if not request.is_finished]


def in_long_prompt(request: Request) -> bool:
    return request.num_prompt_tokens >= 80 and request.num_computed_tokens < request.num_prompt_tokens


# --- F43 ---------------------------------------------------------------------------------------------------------------


def gaps(steps: Sequence[tuple[set[str], int]], name: str) -> list[int]:
    """Tokens of work between two tokens of a stream."""
    found, work = [], 0
    for ids, num_tokens in steps:
        work += num_tokens
        if name in ids:
            found.append(work)
            work = 0
    return found[1:]


@pytest.mark.parametrize("first", [True, False], ids=["in front", "behind"])
def test_f43_an_8k_prompt_does_not_hold_up_16_short_streams(first: bool) -> None:
    """Each step has at most a chunk of it, and a token of every stream that runs."""
    limits = Limits(max_num_scheduled_tokens=BUDGET, max_num_running_reqs=32, max_model_len=16_384)
    prefill = chunked(chunk_size=256, long_chunk_size=256)
    engine = fake_engine(700, limits, prefill=prefill)
    long = make_request("long", [i % 50 for i in range(8192)], 4)
    short = [make_request(f"s{i}", [i] * 20, 60) for i in range(16)]
    steps: list[tuple[set[str], int]] = []

    def run(count: int) -> None:
        for _ in range(count):
            output = engine.step()
            steps.append(({p.request.request_id for p in output.scheduled if p.samples}, output.num_scheduled_tokens))

    engine.add(*([long] if first else []), *short)
    run(3)
    engine.add(*([] if first else [long]))
    run(80)
    engine.drain()
    for request in short:
        work = gaps(steps[: 59 + 2], request.request_id)
        assert len(work) >= 50, "a token in each step"
        assert max(work) <= 256 + 16, "with one chunk of the long prompt at most"
    assert long.num_output_tokens == 4


# --- the engine tells --------------------------------------------------------------------------------------------------


class Watching(Chunked):
    """Notes what it is told."""

    told: list[StepTime] = []

    def step_finished(self, step: StepTime) -> None:
        self.told.append(step)


class Failing(Chunked):
    def step_finished(self, step: StepTime) -> None:
        raise ValueError("no interest")


class Silent:
    """As a prefill of API 1.1: nothing but what was asked of it."""

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> int:
        return min(remaining, token_budget)


def run_engine(prefill: Any) -> Any:
    engine = make_engine(Fcfs, Fcfs.Settings(), FakeExecutor(), prefill=lambda: prefill)
    engine.add([engine_request("a", list(range(40)), 5), engine_request("b", list(range(50, 90)), 3)])
    outputs = []
    while engine.has_work():
        outputs.append(engine.step())
    tokens: dict[str, list[int]] = {}
    for delta in (delta for output in outputs for delta in output.deltas):
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens, outputs


def test_the_engine_tells_of_each_step() -> None:
    prefill = Watching(Chunked.Settings(chunk_size=24), PrefillContext(256))
    prefill.told = []
    run_engine(prefill)
    first, second, third = prefill.told[:3]
    assert (first.num_prefill_tokens, first.num_decodes, first.num_attended) == (48, 0, 2 * attended(0, 24))
    assert (second.num_prefill_tokens, second.num_decodes, second.num_attended) == (32, 0, 2 * attended(24, 16))
    assert (third.num_prefill_tokens, third.num_decodes, third.num_attended) == (0, 2, 0)
    assert all(step.seconds > 0 for step in prefill.told)
    assert sum(step.num_decodes for step in prefill.told) == 4 + 2


def test_a_part_is_a_decode_where_it_is_one_token_past_the_prompt_and_drafts() -> None:
    """Output that a preempted request computes again is prefill, and so is the last token of a prompt alone."""
    request = make_request("a", [1] * 40)
    request.append_output(range(60))
    parts = (
        ScheduledRequest(request, 99, 1),
        ScheduledRequest(request, 99, 4, num_drafts=3),
        ScheduledRequest(request, 40, 60),  # computed again
        ScheduledRequest(request, 50, 20, samples=False),
        ScheduledRequest(request, 30, 50, samples=False),
        ScheduledRequest(request, 39, 1, samples=False),
    )
    told = step_time(SchedulerOutput(1, parts), 0.5)
    num_attended = sum(attended(part.start, part.num_tokens) for part in parts[2:])
    assert told == StepTime(60 + 20 + 50 + 1, 1 + 4, 0.5, num_attended)


def test_one_that_fails_to_listen_fails_nobody_and_is_reported() -> None:
    expected, _ = run_engine(chunked(256))
    found, outputs = run_engine(Failing(Chunked.Settings(), PrefillContext(256)))
    assert found == expected
    incidents = [incident for output in outputs for incident in output.incidents]
    assert incidents and all(i.group == "prefill" and "no interest" in i.reason for i in incidents)


def test_one_of_api_1_1_is_not_told() -> None:
    assert run_engine(Silent())[0] == run_engine(chunked(256))[0]


@pytest.mark.parametrize("options", PREFILLS, ids=str)
def test_the_scheduler_machine_meets_each_of_its_prefills(options: dict[str, Any]) -> None:
    """Long prompts wait for each other until the last chunk, and chunks get as small as the target says, beside a stream."""
    limits = Limits(48, 6, max_model_len=200)
    engine = AnyScheduler().make_engine(60, limits, prefix_caching=False, chunk_size=13, **options)
    engine.add(make_request("stream", [1], 200))
    num_begun, num_tokens = [], []  # prompts that go on in the next step, and tokens of prompts
    for index in range(12):
        engine.add(make_request(f"long{index}", [index] * 45, 1))
    for _ in range(40):
        parts = engine.step().scheduled
        num_begun.append(sum(not part.samples for part in parts))
        num_tokens.append(sum(part.num_tokens for part in parts if part.num_tokens > 1))
    assert max(num_begun) == (0 if options["whole"] else 1 if "max_long_prefills" in options["chunked"] else 4)
    assert (max(num_tokens[8:]) <= 10) == ("target_tpot" in options["chunked"])
