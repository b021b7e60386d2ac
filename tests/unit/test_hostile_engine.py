"""Plugins of the engine that raise what nobody catches, answer with what cannot be sent, or change what is not theirs.

Whatever one does, the engine lives, the request that it touched fails, and all others end with the tokens of a solo run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from core.assembly import _build_cache
from core.batch import SampledRow, SamplerOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs, Verdict
from core.border.inline_client import InlineClient
from core.border.thread_client import EngineStatus
from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.components import PluginRecord, Provided
from core.engine import Engine
from core.errors import EngineDeadError, PluginError, described, shown, told
from core.hookspecs import Component
from core.isolation.faults import ComponentName
from core.logits.chain import ProcessorChain
from core.logits.rows import Member
from core.model.interface import StepResult
from core.outputs import PluginIncident, StepOutput, StepStats, TokenDelta
from core.pipeline import Part
from core.request import EngineRequest, FinishReason, ReadOnlyList, Request, RequestStatus, SamplingParams
from core.stages.completion import CompletionContext, Standard
from core.stages.decode import DecodeContext, Plain
from core.stages.prefill import Chunked, PrefillContext
from core.testing.engines import MAX_MODEL_LEN, engine_request, fake_spec
from core.testing.fakes import FakeDrafts
from core.testing.harness.engine_isolation import NUM_BLOCKS, Answers, assert_whole, engine_of, run, solo
from core.testing.harness.fake_executors import FakeExecutor
from core.wire import Output, decode, output_frames
from plugins.schedulers.fcfs import Fcfs

VICTIM = "v"
BIG = 2**70


class WeirdError(BaseException):
    """No Exception."""


class Evil:
    def __str__(self) -> str:
        raise WeirdError

    __repr__ = __str__

    def __iter__(self) -> Any:
        raise WeirdError


class EvilList(list[Any]):
    def __iter__(self) -> Any:
        raise WeirdError


def due(request: Request) -> bool:
    return request.request_id == VICTIM and request.num_output_tokens >= 3


Act = Callable[..., Any]


@dataclass
class Hooks:
    """What each stage does to its answer once the victim is due; None: nothing."""

    schedule: Act | None = None
    update: Act | None = None
    counts: Act | None = None
    prefill: Act | None = None
    propose: Act | None = None
    judge: Act | None = None
    sample: Act | None = None
    result: Act | None = None
    free: Act | None = None


def engine_with(hooks: Hooks, **options: Any) -> Engine:
    class Scheduler(Fcfs):
        def schedule(self) -> Any:
            plan = super().schedule()
            parts = [part for part in plan.scheduled if due(part.request)]
            return hooks.schedule(plan, parts[0].request) if hooks.schedule and parts else plan

        def update(self, output: SchedulerOutput, verdicts: Any) -> Any:
            ended = super().update(output, verdicts)
            found = [part for part in output.scheduled if due(part.request)]
            return hooks.update(ended, found[0].request) if hooks.update and found else ended

        def counts(self) -> Any:
            return hooks.counts(super().counts()) if hooks.counts else super().counts()

    class Prefill(Chunked):
        def num_tokens(self, request: Request, remaining: int, token_budget: int) -> Any:
            count = super().num_tokens(request, remaining, token_budget)
            return hooks.prefill(count, request) if hooks.prefill and request.request_id == VICTIM else count

    class Decode(Plain):
        def propose(self, requests: Any) -> Any:
            drafts = super().propose(requests)
            found = [request for request in requests if due(request)]
            return hooks.propose(drafts, found[0]) if hooks.propose and found else drafts

    class Completion(Standard):
        def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Any:
            verdicts = dict(super().judge(output, sampled))
            found = [part.request for part in output.scheduled if due(part.request)]
            return hooks.judge(verdicts, found[0]) if hooks.judge and found else verdicts

    class Cache(PagedCache):
        def free(self, request: Request, discard: bool = False) -> None:
            if hooks.free and request.request_id == VICTIM:
                hooks.free()
            super().free(request, discard)

    class Executor(FakeExecutor):
        def submit(self, batch: Any) -> Any:
            done = super().submit(batch)
            if not any(row.request_id == VICTIM and row.position >= 3 for row in batch.sampling.rows):
                return done
            sampled = hooks.sample(done.sampled) if hooks.sample else done.sampled
            result = StepResult(sampled)
            return Finished(hooks.result(result) if hooks.result else result)

    parts: dict[str, Any] = {
        "executor": Executor(),
        "prefill": partial(Prefill, Chunked.Settings(chunk_size=24), PrefillContext(256)),
        "decode": partial(Decode, Plain.Settings(), DecodeContext(MAX_MODEL_LEN)),
        "completion": Completion(Standard.Settings(), CompletionContext(fake_spec())),
        "cache": partial(Cache, PagedCache.Settings(), CacheContext(NUM_BLOCKS, MAX_MODEL_LEN)),
    }
    return engine_of(Scheduler, **{**parts, **options})


@dataclass
class Finished:
    outcome: Any

    def result(self) -> Any:
        return self.outcome


def sent() -> list[EngineRequest]:
    return [engine_request(key, list(range(i, i + 6)), max_tokens=8) for i, key in enumerate(("a", "b", VICTIM, "c"))]


def as_the_front_has_it(output: StepOutput) -> StepOutput:
    """Over the border, as an engine process sends it."""
    parts = [cast(Output, decode(frame)).output for frame in output_frames(output, 1)]
    return msgspec.structs.replace(parts[-1], deltas=[delta for part in parts for delta in part.deltas])


def answers_of(engine: Engine) -> Answers:
    requests, answers = sent(), Answers()
    engine.add(requests)
    for _ in range(300):
        if not engine.has_work():
            break
        answers.take(as_the_front_has_it(engine.step()))
    assert not engine.has_work()
    for request in requests:
        if request.request_id != VICTIM:
            assert answers.ids(request.request_id) == solo(request)
            assert answers.ends(request.request_id) == [FinishReason.LENGTH]
    assert len(answers.ends(VICTIM)) == 1
    return answers


def assert_victim_failed(hooks: Hooks, *words: str, **options: Any) -> Answers:
    engine = engine_with(hooks, **options)
    answers = answers_of(engine)
    assert answers.ends(VICTIM) == [FinishReason.ERROR]
    right = solo(sent()[2])
    assert answers.ids(VICTIM) == right[: len(answers.ids(VICTIM))]
    for word in words:
        assert word in answers.error(VICTIM)
    for field in vars(hooks):
        setattr(hooks, field, None)
    again = engine_request("again", [5, 6, 7])
    assert run(engine, [again]).ids("again") == solo(again)
    assert_whole(engine)
    return answers


# --- 1: what is no Exception


@pytest.mark.parametrize("error", [WeirdError(), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
@pytest.mark.parametrize("stage", ["schedule", "update", "prefill", "propose", "judge", "sample", "result"])
def test_what_no_except_catches_fails_one_request(stage: str, error: BaseException) -> None:
    def act(*_: object) -> None:
        raise error

    assert_victim_failed(Hooks(**{stage: act}), type(error).__name__)


def test_a_cache_that_raises_no_exception_when_blocks_come_back_costs_nobody_else() -> None:
    def act() -> None:
        raise WeirdError

    engine = engine_with(Hooks(free=act))
    answers_of(engine)


@pytest.mark.parametrize(
    "hooks",
    [
        Hooks(schedule=lambda plan, _: Evil()),
        Hooks(schedule=lambda plan, _: replace(plan, refused=EvilList())),
        Hooks(schedule=lambda plan, _: replace(plan, scheduled=EvilList(plan.scheduled))),
        Hooks(update=lambda ended, _: EvilList([1])),
        Hooks(propose=lambda drafts, _: {VICTIM: EvilList([1])}),
        Hooks(judge=lambda verdicts, _: Evil()),
        Hooks(judge=lambda verdicts, _: {**verdicts, VICTIM: Evil()}),
        Hooks(judge=lambda verdicts, _: {**verdicts, VICTIM: Verdict(EvilList([1]))}),  # type: ignore[arg-type]
        Hooks(sample=lambda sampled: Evil()),
        Hooks(sample=lambda sampled: with_error(sampled, Evil())),
        Hooks(result=lambda result: Evil()),
    ],
)
def test_answers_that_raise_when_they_are_looked_at(hooks: Hooks) -> None:
    assert_victim_failed(hooks)


def test_counts_that_raise_are_only_a_gauge() -> None:
    for counts in (Evil(), (BIG, 1 - BIG), (-5, 9)):
        answers = answers_of(engine_with(Hooks(counts=lambda _, counts=counts: counts)))
        assert answers.ends(VICTIM) == [FinishReason.LENGTH]
        assert {incident.group for incident in answers.incidents} == {"scheduler"}


def test_texts_of_strangers_are_told_whatever_they_are() -> None:
    class NoText(Exception):
        def __str__(self) -> str:
            raise WeirdError

    assert described(NoText()) == "NoText: an error without a text"
    assert shown(Evil()) == "a Evil"
    assert told(Evil()) == "a Evil without a text"
    assert told("bad \ud800 text") == "bad ? text"


@pytest.mark.parametrize("error", [WeirdError("w"), KeyboardInterrupt(), asyncio.CancelledError(), SystemExit(3)])
@pytest.mark.parametrize("where", ["step", "info", "build", "add"])
def test_an_engine_thread_that_ends_is_dead_and_nobody_waits_for_ever(where: str, error: BaseException) -> None:
    class Broken:
        def _raise(self, *_: object) -> Any:
            raise error

        step = _raise
        abort = _raise

        def __init__(self) -> None:
            if where == "build":
                self._raise()

        def __getattr__(self, name: str) -> Any:
            return self._raise if name == where else {"has_work": lambda: False}.get(name, lambda *_: None)

    async def go() -> EngineStatus:
        client = InlineClient(cast(Any, Broken))
        with pytest.raises(EngineDeadError):
            await client.start()
            reply = asyncio.ensure_future(client.reset_prefix_cache())
            with pytest.raises(EngineDeadError):
                await client.receive()
            await asyncio.wait([reply])
            reply.exception()
            client.send_add([engine_request("late", [1])])
        return client.health().status

    assert asyncio.run(asyncio.wait_for(go(), 20)) is EngineStatus.DEAD


# --- 2: what cannot be sent


def with_error(sampled: SamplerOutput, error: Any) -> SamplerOutput:
    ids = {key: found for key, found in sampled.token_ids.items() if key != VICTIM}
    return SamplerOutput(ids, errors={VICTIM: error})


def with_logprobs(make: Callable[[int], Any]) -> Hooks:
    def act(sampled: SamplerOutput) -> SamplerOutput:
        return SamplerOutput(sampled.token_ids, {VICTIM: (make(sampled.token_ids[VICTIM][0]),)})

    return Hooks(sample=act)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: TokenLogprobs(i, cast(float, np.float32(-1.0)), 1),
        lambda i: TokenLogprobs(i, cast(float, torch.tensor(-1.0)), 1),
        lambda i: TokenLogprobs(i, 10**400, 1),
        lambda i: TokenLogprobs(i, float("nan"), 1),
        lambda i: TokenLogprobs(BIG, -1.0, 1),
        lambda i: TokenLogprobs(i, -1.0, BIG),
        lambda i: TokenLogprobs(i, -1.0, 1, [(i, cast(float, torch.tensor(-1.0)))]),
        lambda i: TokenLogprobs(i, -1.0, 1, cast(Any, {(i, -1.0): 1})),
        lambda i: TokenLogprobs(i, -1.0, 1, cast(Any, [(i,)])),
        lambda i: TokenLogprobs(i, -1.0, 1, cast(Any, Evil())),
        lambda i: Evil(),
    ],
)
def test_log_probabilities_that_cannot_be_sent_fail_their_request(make: Callable[[int], Any]) -> None:
    assert_victim_failed(with_logprobs(make), "sampler=chaos (plugin chaos, acme-chaos 1.0)", "log-probabilities")


def test_log_probabilities_that_are_right_arrive() -> None:
    answers = answers_of(engine_with(with_logprobs(lambda i: TokenLogprobs(i, -1.0, 1, [(i, -1.0), (3, -2.0)]))))
    assert answers.ends(VICTIM) == [FinishReason.LENGTH]
    assert answers.deltas[VICTIM][-1].logprobs[0].top[1] == (3, -2.0)


def setting(**values: Any) -> Act:
    """Sets fields of the victim, and leaves the stage's answer as it is."""

    def act(answer: Any, request: Request) -> Any:
        for name, value in values.items():
            setattr(request, name, value)
        return answer

    return act


def refusing(plan: SchedulerOutput, request: Request) -> SchedulerOutput:
    request.status, request.finish_reason = RequestStatus.FINISHED_ERROR, cast(FinishReason, "banana")
    return replace(plan, scheduled=tuple(p for p in plan.scheduled if p.request is not request), refused=(request,))


def verdict(stop_reason: Any) -> Hooks:
    return Hooks(
        judge=lambda verdicts, _: {
            **verdicts,
            VICTIM: Verdict(verdicts[VICTIM].token_ids, FinishReason.STOP, stop_reason),
        }
    )


@pytest.mark.parametrize(
    "hooks",
    [
        Hooks(sample=lambda sampled: with_error(sampled, "\ud800 broke")),
        verdict("\ud800"),
        verdict(BIG),
        verdict(True),
        Hooks(schedule=lambda plan, _: replace(plan, step=BIG)),
        Hooks(schedule=setting(num_cached_tokens=BIG)),
        Hooks(schedule=setting(num_preemptions="many")),
        Hooks(schedule=setting(first_scheduled_time="now")),
        Hooks(propose=setting(num_preemptions="many")),
        Hooks(judge=setting(num_cached_tokens=BIG)),
        Hooks(schedule=refusing),
    ],
)
def test_a_value_that_cannot_be_sent_fails_its_request(hooks: Hooks) -> None:
    assert_victim_failed(hooks)


@pytest.mark.parametrize(
    "incident",
    [
        PluginIncident(group="g", name="n", plugin="p", reason="\ud800"),
        PluginIncident(group="g", name="n", plugin="p", reason="", failures=BIG),
        PluginIncident(group=cast(str, 5), name=cast(str, None), plugin="p", reason=""),
        "no incident",
    ],
)
def test_an_incident_that_cannot_be_sent_is_the_executors(incident: Any) -> None:
    answers = answers_of(engine_with(Hooks(result=lambda result: replace(result, incidents=(incident,)))))
    assert answers.ends(VICTIM) == [FinishReason.LENGTH]
    assert {found.group for found in answers.incidents} == {"executor"}


def test_the_border_cuts_out_what_cannot_be_sent() -> None:
    good = TokenDelta(request_id="good", token_ids=[1])
    bad = [
        TokenDelta(request_id="text", error="\ud800"),
        TokenDelta(request_id="number", num_cached_tokens=BIG),
        TokenDelta(request_id="value", token_ids=[cast(int, np.int64(3))]),
        TokenDelta(request_id="reason", finish_reason=cast(FinishReason, "banana"), num_preemptions=BIG),
    ]
    incident = PluginIncident(group="g", name="n", plugin="p", reason="\ud800")
    output = StepOutput(deltas=[*bad, good], stats=StepStats(step=BIG), incidents=[incident])
    found = as_the_front_has_it(output)
    assert found.deltas[-1] == good
    assert [(delta.request_id, delta.finish_reason) for delta in found.deltas[:-1]] == [
        (delta.request_id, FinishReason.ERROR) for delta in bad
    ]
    assert all("cannot be sent" in str(delta.error) for delta in found.deltas[:-1])
    assert found.stats == StepStats()
    assert found.incidents == []


# --- 3: the cache's geometry


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("block_size", 8, "its block_size is 8, and KV memory is laid out for 16"),
        ("num_blocks", 400, "its num_blocks is 400, and KV memory is laid out for 100"),
        ("num_blocks", 100.0, "its num_blocks is 100.0"),
        ("block_size", None, "its block_size cannot be read: WeirdError"),
    ],
)
def test_a_cache_of_another_geometry_is_refused(name: str, value: Any, words: str, monkeypatch: Any) -> None:
    def read(_: object) -> Any:
        if value is None:
            raise WeirdError
        return value

    part = cache_part()
    assert _build_cache(part, 16, CacheContext(100, 64)).num_blocks == 100
    monkeypatch.setattr(PagedCache, name, property(read))
    with pytest.raises(PluginError) as raised:
        _build_cache(part, 16, CacheContext(100, 64))
    assert str(raised.value).startswith(f"cache=lying (plugin acme, acme-cache 1.0): {words}")


def cache_part() -> Part:
    component = Component("lying", "core.cache.paged:PagedCache", "a test")
    provided = Provided("cache", component, PluginRecord("acme", "acme-cache", "1.0", "loaded"))
    return Part("cache", provided, PagedCache.Settings())


# --- 4: a completion that never ends


def never(verdicts: dict[str, Verdict], request: Request) -> dict[str, Verdict]:
    return {**verdicts, VICTIM: Verdict(verdicts[VICTIM].token_ids)}


def test_a_completion_without_an_end_is_ended_at_max_tokens() -> None:
    answers = assert_victim_failed(Hooks(judge=never), "completion=chaos (plugin chaos, acme-chaos 1.0)", "max_tokens")
    assert answers.ids(VICTIM) == solo(sent()[2])
    assert [incident.group for incident in answers.incidents] == ["completion"]


def test_accepted_drafts_past_max_tokens_are_cut() -> None:
    def act(verdicts: dict[str, Verdict], request: Request) -> dict[str, Verdict]:
        ids = all_sampled[VICTIM]
        return {**verdicts, VICTIM: Verdict(ids)}

    all_sampled: dict[str, tuple[int, ...]] = {}

    def sample(sampled: SamplerOutput) -> SamplerOutput:
        all_sampled.update(sampled.token_ids)
        return sampled

    class Drafts:
        def propose(self, requests: Any) -> Any:
            return FakeDrafts(3, 0).propose(requests)

    hooks = Hooks(judge=act, sample=sample)
    answers = assert_victim_failed(hooks, "completion=chaos", decode=Drafts)
    assert len(answers.ids(VICTIM)) <= 8


def test_a_completion_without_an_end_is_ended_with_the_context() -> None:
    class Endless(Standard):
        def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Any:
            return {key: Verdict(ids) for key, ids in sampled.token_ids.items()}

    completion = Endless(Standard.Settings(), CompletionContext(fake_spec()))
    request = engine_request("long", [1, 2, 3] * 340, max_tokens=100)
    answers = run(engine_of(Fcfs, completion=completion), [request])
    assert len(answers.ids("long")) == MAX_MODEL_LEN - 1020
    assert "at the end of the context" in answers.error("long")


# --- 5: a logits processor that spoils a neighbour


def test_one_suspect_for_a_spoilt_row_has_the_step_run_request_by_request() -> None:
    class Spoiler:
        def state(self, row: SampledRow, params: Any) -> Any:
            return row.request_id

        def apply(self, logits: torch.Tensor, rows: Any, states: Any) -> None:
            if VICTIM in states:
                logits[0] = float("nan")

        def forget(self, request_ids: Any) -> None:
            pass

    def row(key: str) -> SampledRow:
        return SampledRow(key, SamplingParams(), 0, 0, 4, [1], [2])

    part = ComponentName("logits_processors", "spoiler", "acme, acme-words 1.0")
    chain = ProcessorChain([Member(part, Spoiler())])
    rows = [row("mate"), row(VICTIM)]
    chain.apply(torch.zeros(2, 5), rows)
    with pytest.raises(PluginError, match="spoiler"):
        chain.blame(rows[0])
    assert not chain.incidents()
    alone = torch.zeros(1, 5)
    chain.apply(alone, [rows[0]])
    assert not alone.any()
    with pytest.raises(PluginError, match="NaN"):
        chain.apply(torch.zeros(1, 5), [rows[1]])
    assert [incident.failures for incident in chain.incidents()] == [1]


def test_a_processor_whose_answer_raises_is_at_fault_itself() -> None:
    class Liar:
        def state(self, row: SampledRow, params: Any) -> Any:
            return 1

        def apply(self, logits: torch.Tensor, rows: Any, states: Any) -> Any:
            return EvilList([0])

    part = ComponentName("logits_processors", "liar", "acme, acme-words 1.0")
    chain = ProcessorChain([Member(part, cast(Any, Liar()))])
    with pytest.raises(PluginError, match="liar.*WeirdError"):
        chain.apply(torch.zeros(1, 5), [SampledRow("a", SamplingParams(), 0, 0, 4, [1], [2])])
    assert len(chain.incidents()) == 1


# --- 6: what a stage changes and is not its own


def changed(name: str) -> Any:
    return {
        "params": SamplingParams(max_tokens=5, ignore_eos=True),
        "prompt_token_ids": ReadOnlyList([9] * 6),
        "output_token_ids": ReadOnlyList([7] * 3),
    }[name]


@pytest.mark.parametrize("name", ["params", "prompt_token_ids", "output_token_ids"])
@pytest.mark.parametrize(
    ("stage", "group"),
    [("schedule", "scheduler"), ("propose", "decode"), ("judge", "completion"), ("prefill", "prefill")],
)
def test_a_stage_that_puts_other_ids_or_params_in_place_is_found(stage: str, group: str, name: str) -> None:
    assert_victim_failed(Hooks(**{stage: setting(**{name: changed(name)})}), f"{group}=chaos", "changed a request")


def test_a_scheduler_that_empties_the_output_is_named() -> None:
    assert_victim_failed(Hooks(schedule=setting(output_token_ids=[])), "scheduler=chaos")


@pytest.mark.parametrize("stage", ["schedule", "propose", "judge"])
def test_params_are_read_only_down_to_their_dicts(stage: str) -> None:
    def act(answer: Any, request: Request) -> Any:
        request.params.logit_bias[5] = 100.0
        return answer

    assert_victim_failed(Hooks(**{stage: act}), "read only")


def test_read_only_params_are_equal_and_can_be_sent() -> None:
    params = SamplingParams(logit_bias={5: 1.0}, extra={"dry": {"multiplier": 0.8}})
    message = EngineRequest(request_id="a", prompt_token_ids=[1], params=params, seed=0)
    request = Request.from_engine_request(message)
    assert request.params == params
    assert msgspec.msgpack.encode(request.params) == msgspec.msgpack.encode(params)
    for change in (
        lambda: request.params.extra["dry"].update(multiplier=2),
        lambda: request.params.extra.pop("dry"),
        lambda: request.params.logit_bias.clear(),
    ):
        with pytest.raises(TypeError, match="read only"):
            change()


def test_a_part_of_another_class_is_no_part() -> None:
    class Part(ScheduledRequest):
        pass

    def act(plan: SchedulerOutput, request: Request) -> SchedulerOutput:
        parts = tuple(Part(p.request, p.start, p.num_tokens) if p.request is request else p for p in plan.scheduled)
        return replace(plan, scheduled=parts)

    assert_victim_failed(Hooks(schedule=act), "ScheduledRequest")
