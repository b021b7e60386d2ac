"""How far a long run is, on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from tqdm import tqdm

INTERVAL_S: Final = 10.0  # between lines


def say(text: str) -> None:
    """A line that belongs to no result."""
    print(text, file=sys.stderr, flush=True)


class Course:
    """`what` is counted, up to `total` where that is known. May be told from several threads."""

    def __init__(self, what: str, total: int | None = None, clock: Callable[[], float] = time.monotonic):
        self._what, self._total, self._clock = what, total, clock
        self._started = self._told = clock()
        self._done = 0
        self._lock = threading.Lock()
        self._bar = tqdm(total=total, desc=what, file=sys.stderr) if sys.stderr.isatty() else None

    def __enter__(self) -> Course:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self) -> None:
        """One more is done."""
        with self._lock:
            self._show(self._done + 1)

    def at(self, done: int) -> None:
        """So many are done."""
        with self._lock:
            self._show(done)

    def _show(self, done: int) -> None:
        more, self._done = done - self._done, done
        if self._bar is not None:
            self._bar.update(more)
            return
        now = self._clock()
        if now - self._told >= INTERVAL_S:
            self._told = now
            of = "" if self._total is None else f" of {self._total:,}"
            say(f"{done:,}{of} {self._what} after {now - self._started:.0f} s")
