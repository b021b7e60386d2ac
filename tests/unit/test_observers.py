"""Observers stay away from the pipeline: slow, raising, exiting and blocking ones cost it nothing but their own records."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from core.errors import PluginError
from core.observer_thread import QUEUE_RECORDS
from core.observers import Named, Observers
from core.outputs import RequestRecord, StepStats, Timings, Usage
from core.request import FinishReason
from core.testing.harness.frontend_thread import wait_until

PLUGIN = "acme, acme-wheel 1.0"
STEP = StepStats(step=1, num_requests=1)
RECORD = RequestRecord("r", "", (FinishReason.LENGTH,), Usage(1, 1), Timings())


class Seen:
    """Keeps what it sees; `act` may do worse."""

    def __init__(self, act=lambda record: None):
        self.records, self.num_closed, self.threads = [], 0, set()
        self.step_finished = self.request_finished = self.take
        self._act = act

    def take(self, record):
        self.threads.add(threading.current_thread())
        self._act(record)
        self.records.append(record)

    def close(self):
        self.num_closed += 1


def observers(*members, **limits):
    made = Observers([Named(f"o{index}", PLUGIN, member) for index, member in enumerate(members)], **limits)
    made.start()
    return made


def raising(error):
    def act(record):
        raise error

    return act


def test_records_come_in_order_in_a_daemon_thread_of_their_own():
    one, two = Seen(), Seen()
    told = observers(one, two)
    steps = [StepStats(step=index) for index in range(200)]
    for step in steps:
        told.step_finished(step)
    told.request_finished(RECORD)
    told.close()
    assert one.records == two.records == [*steps, RECORD]
    assert (one.num_closed, two.num_closed) == (1, 1)
    (first,), (second,) = one.threads, two.threads
    assert first.daemon and second.daemon
    assert len({first, second, threading.current_thread()}) == 3
    assert told.incidents() == ()


async def test_flush_returns_when_all_that_was_told_has_been_seen():
    seen = Seen()
    told = observers(seen)
    for number in range(1, 20):
        told.step_finished(STEP)
        await told.flush(5)
        assert len(seen.records) == number
    told.close()


async def test_flush_does_not_wait_for_one_that_blocks_and_holds_up_nobody():
    release = threading.Event()
    blocked, fine = Seen(lambda record: release.wait(20)), Seen()
    told = observers(blocked, fine)
    told.step_finished(STEP)
    ticks = []

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    await told.flush(0.2)
    ticking.cancel()
    assert len(ticks) > 2, "the event loop stood still"
    assert (fine.records, blocked.records) == ([STEP], [])
    release.set()
    told.close()


async def test_observers_may_flush_themselves_after_each_batch():
    seen = Seen()
    flushed = []
    seen.flush = lambda: flushed.append(len(seen.records))
    told = observers(seen)
    told.step_finished(STEP)
    await told.flush(5)
    assert 1 in flushed
    told.close()


@pytest.mark.parametrize("error", [RuntimeError("no\nroom"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_one_that_raises_is_told_of_and_switched_off_after_so_many(error, caplog):
    broken, fine = Seen(raising(error)), Seen()
    told = observers(broken, fine, quarantine_after=3)
    for _ in range(2):
        told.step_finished(STEP)
    wait_until(lambda: told.incidents() and told.incidents()[0].failures == 2, 5)
    (incident,) = told.incidents()
    assert (incident.group, incident.name, incident.plugin, incident.quarantined) == ("observers", "o0", PLUGIN, False)
    assert incident.reason.startswith(type(error).__name__)
    assert "\n" not in incident.reason
    told.request_finished(RECORD)
    wait_until(lambda: told.incidents()[0].quarantined, 5)
    wait_until(lambda: broken.num_closed == 1, 5)  # it may write out what it has
    told.step_finished(STEP)
    told.close()
    assert told.incidents()[0].failures == 3, "it was called after it had been switched off"
    assert fine.records == [STEP, STEP, RECORD, STEP]
    assert "observers=o0 (plugin acme, acme-wheel 1.0) is switched off" in caplog.text


def test_a_log_of_failures_does_not_grow_with_them(caplog):
    told = observers(Seen(raising(RuntimeError("boom"))), quarantine_after=1000)
    for _ in range(100):
        told.step_finished(STEP)
    told.close()
    assert told.incidents()[0].failures == 100
    assert [record.args[-1] for record in caplog.records] == [1, 2, 3, 4, 8, 16, 32, 64]
    assert all(record.exc_info for record in caplog.records)


def test_a_reason_can_be_printed_and_encoded():
    told = observers(Seen(raising(RuntimeError("odd \ud800\x1b[2J"))), quarantine_after=1)
    told.step_finished(STEP)
    told.close()
    assert told.incidents()[0].reason == "RuntimeError: odd ??[2J"


def test_an_error_that_cannot_say_what_it_is():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("mute")

    told = observers(Seen(raising(Mute())), quarantine_after=1)
    told.step_finished(STEP)
    told.close()
    (incident,) = told.incidents()
    assert (incident.reason, incident.quarantined) == ("Mute: an error without a text", True)


def test_one_that_blocks_is_switched_off_by_the_watch():
    release = threading.Event()
    blocked, fine = Seen(lambda record: release.wait(60)), Seen()
    told = observers(blocked, fine, block_timeout=0.2)
    told.step_finished(STEP)
    wait_until(lambda: told.incidents() and told.incidents()[0].quarantined, 10)
    (incident,) = told.incidents()
    assert incident.reason == "blocked 0.2 s in one call (plugins.block_timeout=0.2)"
    told.step_finished(STEP)
    started = time.monotonic()
    told.close(0.3)
    assert time.monotonic() - started < 5, "closing waits for nobody"
    assert (fine.records, fine.num_closed, blocked.records) == ([STEP, STEP], 1, [])
    release.set()
    wait_until(lambda: blocked.num_closed == 1, 5)  # come back, it is closed; the second record it never sees
    assert blocked.records == [STEP]


def test_one_that_is_slow_in_many_short_calls_is_not_taken_for_a_blocked_one():
    slow = Seen(lambda record: time.sleep(0.05))
    told = observers(slow, block_timeout=0.2)
    for _ in range(15):
        told.step_finished(STEP)
    wait_until(lambda: len(slow.records) == 15, 10)
    assert told.incidents() == ()
    told.close()


def test_a_close_that_blocks_or_raises_holds_up_nothing():
    release = threading.Event()
    blocked, broken, fine = Seen(), Seen(), Seen()
    blocked.close = lambda: release.wait(60)
    broken.close = lambda: 1 / 0
    told = observers(blocked, broken, fine)
    told.step_finished(STEP)
    started = time.monotonic()
    told.close(0.3)
    assert time.monotonic() - started < 5
    assert fine.num_closed == 1
    release.set()


def test_a_full_queue_drops_the_oldest_and_counts_each():
    release = threading.Event()
    slow, fine = Seen(lambda record: release.wait(60)), Seen()
    told = observers(slow, fine, block_timeout=60)
    steps = [StepStats(step=index) for index in range(QUEUE_RECORDS + 100)]
    told.step_finished(steps[0])
    wait_until(lambda: slow.threads, 5)  # it holds the first one
    for step in steps[1:]:
        told.step_finished(step)
        if step.step % 1000 == 0:
            time.sleep(0.1)  # the other keeps up
    assert told.dropped() == {"o0": 99, "o1": 0}
    (incident,) = told.incidents()
    assert (incident.reason, incident.failures, incident.quarantined) == (
        "it is too slow: 99 records dropped", 0, False,
    )  # fmt: skip
    release.set()
    told.close(20)
    assert slow.records == [steps[0], *steps[100:]]
    assert fine.records == steps


def test_closed_without_a_start_each_is_closed():
    seen = Seen()
    told = Observers([Named("o", PLUGIN, seen)])
    told.close()
    assert seen.num_closed == 1
    told.step_finished(STEP)
    assert seen.records == []


def test_what_is_no_observer_is_refused_by_name():
    with pytest.raises(PluginError, match=r"observers=o \(plugin acme, acme-wheel 1.0\) has no method step_finished"):
        Observers([Named("o", PLUGIN, object())])


def test_taps_are_called_at_once_and_members_are_found_by_class():
    seen = Seen()
    told = observers(seen)
    tapped = []
    told.add_taps([tapped.append])
    told.step_finished(STEP)
    assert tapped == [STEP]
    assert told.find(Seen) is seen
    assert told.find(Observers) is None
    told.close()
