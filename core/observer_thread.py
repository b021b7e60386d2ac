"""One observer in a thread of its own: its queue, what it raises, how long it blocks, and how it is switched off."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from core.outputs import PluginIncident, RequestRecord, StepStats

if TYPE_CHECKING:
    from core.observers import Named

log = logging.getLogger("nonet.observers")

QUEUE_RECORDS = 4096
INTERVAL_S = 0.05  # an observer wakes by itself: waking it for each record would cost each step a switch of threads
LOG_EVERY_S = 10.0
REASON_CHARS = 300


class ObserverThread:
    """`put` is for one thread, the event loop's; all else may be called from any."""

    def __init__(self, member: Named, quarantine_after: int, on_quarantine: Callable[[], None]):
        self.member = member
        self.num_dropped = 0  # written by the thread that puts
        self._quarantine_after = quarantine_after
        self._on_quarantine = on_quarantine
        self._queue: deque[StepStats | RequestRecord] = deque()
        self._step_finished = member.observer.step_finished
        self._request_finished = member.observer.request_finished
        self._flush: Callable[[], None] | None = getattr(member.observer, "flush", None)
        self._waiting: deque[Callable[[], object]] = deque()  # who wants to know when the queue has been worked off
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=f"observer-{member.name}", daemon=True)
        self._lock = threading.Lock()
        self._failures = 0
        self._reason = ""
        self._quarantined = False
        self._logged_at: float | None = None
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
        return self._quarantined

    def incident(self) -> PluginIncident | None:
        dropped = f"it is too slow: {self.num_dropped} records dropped" if self.num_dropped else ""
        if not (self._failures or dropped):
            return None
        return PluginIncident(
            group="observers",
            name=self.member.name,
            plugin=self.member.plugin,
            reason="; ".join(filter(None, (self._reason, dropped))),
            failures=self._failures,
            quarantined=self._quarantined,
        )

    def call_when_seen(self, then: Callable[[], object]) -> None:
        """Call `then` from this thread when the observer has seen what was put so far."""
        self._waiting.append(then)
        self._wake.set()
        if self._quarantined:
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
            log.error("observers=%s (plugin %s) did not close in time", self.member.name, self.member.plugin)

    def watch(self, turns: int, seconds: float) -> None:
        """Switch the observer off when one call lasts for `turns` calls of this, which are `seconds` long.

        Counted in turns and not read from a clock: when the whole process was stopped, it is not the observer's fault.
        """
        serial = self._serial
        if serial % 2 == 0 or serial != self._watched:
            self._watched, self._stuck_turns = serial, 0
            return
        self._stuck_turns += 1
        if self._stuck_turns >= turns and not self._quarantined:
            self._note_failure(f"a call has blocked for {seconds:g} s")
            self._quarantine()

    # --- in the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._ending or self._quarantined):
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._turn()
        self._turn()
        self._call(self.member.observer.close)
        self._answer(len(self._waiting))

    def _turn(self) -> None:
        num_waiting = len(self._waiting)  # what they wait for is in the queue by now
        for _ in range(len(self._queue)):
            if self._quarantined:
                break
            try:
                record = self._queue.popleft()
            except IndexError:  # dropped meanwhile
                break
            self._tell(record)
        if self._flush is not None and not self._quarantined:
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
            self._failed(error)
        self._serial += 1

    def _failed(self, error: BaseException) -> None:
        self._note_failure(_told(error))
        now = time.monotonic()
        if self._logged_at is None or now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            who = (self.member.name, self.member.plugin)
            log.error("observers=%s (plugin %s) failed; %d times so far", *who, self._failures, exc_info=error)
        if self._failures >= self._quarantine_after and not self._quarantined:
            self._quarantine()

    def _note_failure(self, reason: str) -> None:
        with self._lock:
            self._failures += 1
            self._reason = reason

    def _quarantine(self) -> None:
        self._quarantined = True
        self._on_quarantine()
        self._queue.clear()
        who = (self.member.name, self.member.plugin)
        log.error("observers=%s (plugin %s) is switched off until the next start: %s", *who, self._reason)
        self._answer(len(self._waiting))

    def _answer(self, count: int) -> None:
        for _ in range(count):
            with suppress(IndexError, RuntimeError):  # answered by another thread; their event loop has ended
                self._waiting.popleft()()


def _told(error: BaseException) -> str:
    """One line. An exception of a stranger may fail to say what it is."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return " ".join(f"{type(error).__name__}: {text}".split())[:REASON_CHARS]
