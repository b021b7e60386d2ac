"""What every observer must do, as tests::

class TestMine(ObserverContract):
    component = Mine
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

from core.components import STAGES
from core.model.spec import ModelFiles, ModelSpec
from core.observers import Named, Observer, ObserverContext, Observers
from core.outputs import RequestRecord, StageSpan, StepStats, Timings, Usage
from core.pipeline import PipelineDescription
from core.request import FinishReason
from core.testing.contract import Contract

Record = StepStats | RequestRecord
NUM_STEPS = 40_000
MAX_KEPT_BYTES = 2 << 20  # a bounded buffer is fine; so many records are four times this
TIMEOUT_S = 20.0
SPAN_SECONDS = (0.001, 0.002, 0.0, 0.5, 0.04, 1.5, 1.5, 1.5, 0.0001)  # of the nine stages


@cache
def description() -> PipelineDescription:
    """The nine stages and their parts as they are by default."""
    from core.session import open_session

    return open_session(()).description


def observer_context() -> ObserverContext:
    files = ModelFiles("hf", Path("fake"), "fake")
    return ObserverContext(ModelSpec("fake/model", files, {}, 512, 2048, frozenset({0})), description())


def step(number: int) -> StepStats:
    return StepStats(
        step=number,
        num_requests=8,
        num_scheduled_tokens=40,
        num_prefill_tokens=33,
        running=8,
        waiting=number % 5,
        kv_blocks_free=number % 64,
        kv_blocks_total=64,
        schedule_s=0.0001,
        forward_s=0.02,
        sample_s=0.001,
        detokenize_s=0.0002,
    )


def record(request_id: str = "cmpl-1", num_stages: int = 9, start: float = 1000.0, **values: object) -> RequestRecord:
    """An ended request that reached so many stages."""
    ends = list(accumulate(SPAN_SECONDS[:num_stages], initial=start))
    spans = (StageSpan(*row) for row in zip(STAGES, ends, ends[1:], SPAN_SECONDS, strict=False))
    timings = Timings(queue=0.5, ttft=0.6, tpot=0.01, e2e=3.6)
    fields = {"finish_reasons": (FinishReason.LENGTH,), "usage": Usage(12, 8, 4), "timings": timings, **values}
    return RequestRecord(request_id, **{"tenant": "", "spans": tuple(spans), **fields})  # type: ignore[arg-type]


def every_kind() -> list[Record]:
    """Steps and requests as they may come, also the rarest."""
    none = Timings()
    odd = 'a\n"b" {} \x00 \U0001f525 \\ , é'
    return [
        StepStats(),  # before the first step, and when the engine has become idle
        StepStats(kv_blocks_free=64, kv_blocks_total=64),
        step(1),
        StepStats(step=2, num_requests=1, num_scheduled_tokens=0),
        StepStats(step=3, num_requests=1, schedule_s=-1.0, forward_s=-1e-9, between_s=1e9),  # a clock that stepped back
        StepStats(step=2**62, num_requests=2**31, num_scheduled_tokens=2**31, num_prefill_tokens=2**31, running=2**31),
        record(),
        record(operation="chat", tenant=odd, num_preemptions=3),
        record(odd, finish_reasons=tuple(FinishReason)),  # n = 5
        record(finish_reasons=(FinishReason.ERROR,), error=f"ValueError: {odd * 200}"),
        record(finish_reasons=(FinishReason.ERROR,), error="", usage=Usage(0, 0), timings=none),
        record(finish_reasons=(FinishReason.ABORT,), num_stages=4, usage=Usage(12, 0), timings=none),
        record(finish_reasons=(FinishReason.ABORT,), num_stages=0, timings=none),
        record(finish_reasons=(), timings=Timings(0.0, 0.0, 0.0, 0.0), start=0.0),
        record("", trace_context="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        record("x" * 10_000, trace_context="00-" + "0" * 32 + "-" + "0" * 16 + "-00"),  # not a valid one
    ]


class ObserverContract(Contract):
    @pytest.fixture(autouse=True)
    def _in_a_folder_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    @pytest.fixture
    def observer(self) -> Iterator[Observer]:
        observer: Observer = self.make(observer_context())
        yield observer
        observer.close()

    def tell(self, observer: Observer, records: Iterable[Record]) -> None:
        """As the front does: in a thread of its own. AssertionError for what it raises, and for one that blocks."""
        told = Observers([Named("it", "under test", observer)], quarantine_after=1)
        told.start()
        for each in records:
            tell = told.request_finished if isinstance(each, RequestRecord) else told.step_finished
            tell(each)  # type: ignore[arg-type]
        told.close(TIMEOUT_S)
        for incident in told.incidents():
            raise AssertionError(f"the observer failed: {incident.reason}")
        assert not [t.name for t in threading.enumerate() if t.name == "observer-it"], "the observer blocks"

    def test_it_takes_every_kind_of_record(self, observer: Observer) -> None:
        self.tell(observer, every_kind())

    @pytest.mark.parametrize("index", range(len(every_kind())))
    def test_it_takes_each_kind_as_the_first_and_only_one(self, observer: Observer, index: int) -> None:
        self.tell(observer, [every_kind()[index]])

    def test_it_does_not_change_records(self, observer: Observer) -> None:
        records = every_kind()
        before = deepcopy(records)
        self.tell(observer, records)
        assert records == before, "records are shared by all observers"

    def test_it_may_be_closed_twice_and_without_a_record(self, observer: Observer) -> None:
        observer.close()
        observer.close()

    def test_it_may_be_closed_twice_after_records(self, observer: Observer) -> None:
        self.tell(observer, every_kind())  # closes it, in its own thread
        observer.close()

    def test_steps_are_not_kept(self, observer: Observer) -> None:
        """A server makes hundreds of millions of steps."""
        flush = getattr(observer, "flush", lambda: None)

        def run(numbers: range) -> None:
            for number in numbers:
                observer.step_finished(step(number))
                if number % 50 == 0:
                    flush()

        run(range(NUM_STEPS // 10))
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            run(range(NUM_STEPS))
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < MAX_KEPT_BYTES, "memory grows with each step"

    def test_threads_of_its_own_are_daemons(self) -> None:
        """A process must end whatever an observer does."""
        before = set(threading.enumerate())
        observer: Observer = self.make(observer_context())
        self.tell(observer, every_kind())
        left = [t.name for t in threading.enumerate() if t not in before and t.is_alive() and not t.daemon]
        assert not left, f"these threads would hold the process: {left}"

    def test_two_live_side_by_side(self) -> None:
        """Two fronts in one process, as a test or a benchmark has: nothing of the class is shared."""
        one: Observer = self.make(observer_context())
        two: Observer = self.make(observer_context())
        self.tell(one, every_kind())
        self.tell(two, every_kind())
