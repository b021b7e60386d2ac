"""Observers: who is told of each step and each ended request.

The contract, then `Observers`, which keeps them away from the pipeline: the event loop only puts a record into a queue.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from core.components import who
from core.errors import PluginError
from core.grammar.figures import GrammarFigures
from core.observer_thread import ObserverThread
from core.outputs import PluginIncident, RequestRecord, StepStats

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.pipeline import PipelineDescription

A = TypeVar("A")

CLOSE_S = 1.5  # all observers together: a server must end, whatever they do
FLUSH_S = 0.5
METHODS = ("step_finished", "request_finished", "close")
WATCH_TURNS = 4  # turns of the watch in one `block_timeout`


@dataclass(frozen=True, slots=True)
class ObserverContext:
    model: ModelSpec
    description: PipelineDescription  # stages with plugin, wheel and version, to label what is observed
    dropped: Callable[[], Mapping[str, int]] = dict  # records that each observer has missed so far, by its name
    grammars: GrammarFigures = field(default_factory=GrammarFigures)  # grows while the front runs; to be read only


class Observer(Protocol):
    """Config group `observers`; any number. Built and called in the front process, in a thread of its own.

    Calls come in order, one at a time, up to `core.observer_thread.INTERVAL_S` late. Records are shared by all observers
    and must not be changed. What a call raises is logged; after `plugins.quarantine_after` failures, or when a call takes
    longer than `plugins.block_timeout` seconds, the observer is switched off. When it is slow, the oldest records are
    dropped, and counted. It runs while tokens are delivered, and Python runs one thread at a time: be brief all the same.

    One that holds something back may also have `flush(self) -> None`: called after each batch of records, and about twenty
    times a second without any.

    Example::

        from pathlib import Path

        from core.observers import ObserverContext
        from core.outputs import RequestRecord, StepStats
        from pydantic import BaseModel, ConfigDict


        class Bill:
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")
                path: Path = Path("bill.csv")

            def __init__(self, settings: Settings, context: ObserverContext):
                self._file = settings.path.open("a", encoding="utf-8")

            def step_finished(self, stats: StepStats) -> None:
                pass

            def request_finished(self, record: RequestRecord) -> None:
                self._file.write(f"{record.tenant},{record.usage.completion_tokens}\\n")

            def close(self) -> None:
                self._file.close()
    """

    def step_finished(self, stats: StepStats) -> None:
        """One engine step has ended; once before the first, and one without requests whenever the engine becomes idle."""
        ...

    def request_finished(self, record: RequestRecord) -> None:
        """A client's request has ended, in whatever way (also abort and error)."""
        ...

    def close(self) -> None:
        """The front ends, or the observer is switched off: write out what is held back. May come twice."""
        ...


@dataclass(frozen=True, slots=True)
class Named:
    """An observer and the component it is, for messages."""

    name: str
    plugin: str  # "plugin, wheel version"
    observer: Observer


class Observers:
    """All observers of a front. One thread tells it of steps and requests; `start` and `close` are called once.

    `taps` are functions of ours that see each step at once (the benchmark's).
    """

    def __init__(self, members: Iterable[Named] = (), *, quarantine_after: int = 3, block_timeout: float = 5.0):
        self._quarantine_after = quarantine_after
        self._watch_interval = block_timeout / WATCH_TURNS
        self._threads: list[ObserverThread] = []
        self._listening: tuple[ObserverThread, ...] = ()
        self._taps: tuple[Callable[[StepStats], None], ...] = ()
        self._lock = threading.Lock()
        self._started = False
        self._closing = threading.Event()
        for member in members:
            self.add(member)

    def add(self, member: Named) -> None:
        """Raises PluginError for an object that is no observer."""
        missing = [name for name in METHODS if not callable(getattr(member.observer, name, None))]
        if missing:
            raise PluginError(
                f"{who('observers', member.name, member.plugin)} has no method {' and no '.join(missing)}"
            )
        thread = ObserverThread(member, self._quarantine_after, self._listen)
        self._threads.append(thread)
        if self._started:
            thread.start()
        self._listen()

    def add_taps(self, taps: Sequence[Callable[[StepStats], None]]) -> None:
        self._taps += tuple(taps)

    def find(self, cls: type[A]) -> A | None:
        """The observer of this class, where it is selected."""
        found = (thread.member.observer for thread in self._threads)
        return next((observer for observer in found if isinstance(observer, cls)), None)

    def start(self) -> None:
        if self._started:
            return
        self._started = True
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._watch, name="observers-watch", daemon=True).start()

    def step_finished(self, stats: StepStats) -> None:
        for tap in self._taps:
            tap(stats)
        for thread in self._listening:
            thread.put(stats)

    def request_finished(self, record: RequestRecord) -> None:
        for thread in self._listening:
            thread.put(record)

    def dropped(self) -> dict[str, int]:
        """Records that each observer has missed so far because it was slow."""
        return {thread.member.name: thread.num_dropped for thread in self._threads}

    def incidents(self) -> tuple[PluginIncident, ...]:
        """The state of each observer that has failed, was switched off or has missed records. Costs nothing to ask."""
        return tuple(incident for thread in self._threads if (incident := thread.incident()) is not None)

    async def flush(self, seconds: float = FLUSH_S) -> None:
        """Returns when the observers have seen everything told so far, after `seconds` at the latest."""
        loop = asyncio.get_running_loop()
        seen: list[asyncio.Future[None]] = []
        for thread in self._listening:
            future = loop.create_future()
            thread.call_when_seen(partial(loop.call_soon_threadsafe, _resolve, future))
            seen.append(future)
        if seen:
            await asyncio.wait(seen, timeout=seconds)

    def close(self, seconds: float = CLOSE_S) -> None:
        """Let each see what it was told and close it. Whoever takes longer than `seconds` is left to end with the process."""
        self._closing.set()
        self._listen()
        self.start()
        for thread in self._threads:
            thread.end()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _listen(self) -> None:
        """Bring the list of those who are told up to date. Called from any thread."""
        with self._lock:
            running = not self._closing.is_set()
            self._listening = tuple(thread for thread in self._threads if running and not thread.quarantined)

    def _watch(self) -> None:
        while not self._closing.wait(self._watch_interval):
            for thread in self._threads:
                thread.watch(WATCH_TURNS, self._watch_interval * WATCH_TURNS)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
