"""One observer in a thread of its own: its queue, what it raises, how long it blocks, and how it is switched off."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from core.errors import described
from core.isolation.faults import ComponentName, Tally, blocked_text
from core.outputs import PluginIncident, RequestRecord, StepStats

if TYPE_CHECKING:
    from core.observers import Named

log = logging.getLogger("nonet.observers")

QUEUE_RECORDS = 4096
INTERVAL_S = 0.05  # an observer wakes by itself: waking it for each record would cost each step a switch of threads


class ObserverThread:
    """`put` is for one thread, the event loop's; all else may be called from any."""

    def __init__(self, member: Named, quarantine_after: int, on_quarantine: Callable[[], None]):
        self.member = member
        self.num_dropped = 0  # written by the thread that puts
        self._on_quarantine = on_quarantine
        self._queue: deque[StepStats | RequestRecord] = deque()
        self._step_finished = member.observer.step_finished
        self._request_finished = member.observer.request_finished
        self._flush: Callable[[], None] | None = getattr(member.observer, "flush", None)
        self._waiting: deque[Callable[[], object]] = deque()  # who wants to know when the queue has been worked off
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=f"observer-{member.name}", daemon=True)
        self._part = ComponentName("observers", member.name, member.plugin)
        self._tally = Tally(self._part, log, quarantine_after)
        self._serial = 0  # odd while the observer is being called
        self._watched = 0
        self._stuck_turns = 0

    # --- for the front ------------------------------------------------------------------------------

    def put(self, record: StepStats | RequestRecord) -> None:
        queue = self._queue
        if len(queue) >= QUEUE_RECORDS:
            with suppress(IndexError):  # its thread may have woken just now
                queue.popleft()
                self.num_dropped += 1
        queue.append(record)

    @property
    def quarantined(self) -> bool:
        return self._tally.quarantined

    def incident(self) -> PluginIncident | None:
        latest, part = self._tally.latest, self._part
        if not self.num_dropped:
            return latest
        dropped = f"it is too slow: {self.num_dropped} records dropped"
        if latest is None:
            return PluginIncident(group=part.group, name=part.name, plugin=part.plugin, reason=dropped, failures=0)
        return msgspec.structs.replace(latest, reason=f"{latest.reason}; {dropped}")

    def call_when_seen(self, then: Callable[[], object]) -> None:
        """Call `then` from this thread when the observer has seen what was put so far."""
        self._waiting.append(then)
        self._wake.set()
        if self.quarantined:
            self._answer(len(self._waiting))

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Let it see what was put, close it, and end the thread."""
        self._ending = True
        self._wake.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.error("%s did not close in time", self._part.who)

    def watch(self, turns: int, seconds: float) -> None:
        """Switch the observer off when one call lasts for `turns` calls of this, which are `seconds` long.

        Counted in turns and not read from a clock: when the whole process was stopped, it is not the observer's fault.
        """
        serial = self._serial
        if serial % 2 == 0 or serial != self._watched:
            self._watched, self._stuck_turns = serial, 0
            return
        self._stuck_turns += 1
        if self._stuck_turns >= turns and not self.quarantined:
            self._failed(blocked_text(seconds, seconds), final=True)

    # --- in the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._ending or self.quarantined):
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._turn()
        self._turn()
        self._call(self.member.observer.close)
        self._answer(len(self._waiting))

    def _turn(self) -> None:
        num_waiting = len(self._waiting)  # what they wait for is in the queue by now
        for _ in range(len(self._queue)):
            if self.quarantined:
                break
            try:
                record = self._queue.popleft()
            except IndexError:  # dropped meanwhile
                break
            self._tell(record)
        if self._flush is not None and not self.quarantined:
            self._call(self._flush)
        self._answer(num_waiting)

    def _tell(self, record: StepStats | RequestRecord) -> None:
        if isinstance(record, RequestRecord):
            self._call(self._request_finished, record)
        else:
            self._call(self._step_finished, record)

    def _call(self, call: Callable[..., None], *arguments: StepStats | RequestRecord) -> None:
        self._serial += 1
        try:
            call(*arguments)
        except BaseException as error:  # also SystemExit: it would end this thread, and nobody would know
            self._failed(described(error), error)
        self._serial += 1

    def _failed(self, reason: str, cause: BaseException | None = None, *, final: bool = False) -> None:
        was_off = self.quarantined
        if self._tally.failed(reason, cause, final=final).quarantined and not was_off:
            self._on_quarantine()
            self._queue.clear()
            self._answer(len(self._waiting))

    def _answer(self, count: int) -> None:
        for _ in range(count):
            with suppress(IndexError, RuntimeError):  # answered by another thread; their event loop has ended
                self._waiting.popleft()()
