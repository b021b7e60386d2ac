"""How far a download or a load is: the callable that is handed down, and bars on stderr. Imports tqdm when it draws."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tqdm import tqdm

Progress = Callable[[str, int, int], None]
"""(what, done, total) in one unit; total 0 while unknown. Whoever reports does so often; the receiver decides what to show."""


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing."""


class ProgressBars:
    """A `Progress` that draws one bar at a time, for the thing (`what`) reported last; silent where stderr is no terminal."""

    def __init__(self) -> None:
        self._what = ""
        self._bar: tqdm[NoReturn] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.close()
        if total and done >= total:
            self.close()
        elif sys.stderr.isatty():
            self._draw(what, done, total)

    def _draw(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            size = total or None
            self._bar = tqdm(desc=what, total=size, initial=done, unit_scale=True, file=sys.stderr, leave=False)
            self._what = what
        self._bar.total = total or self._bar.total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Wipe the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._what = None, ""
