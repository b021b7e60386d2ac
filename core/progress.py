"""Progress bars on stderr for downloads and loading; silent where stderr is no terminal."""

from __future__ import annotations

import sys
from typing import NoReturn

from tqdm import tqdm


class ProgressBars:
    """A `Progress` callable: one bar per thing (`what`), closed when it is done. `done` and `total` share one unit."""

    def __init__(self) -> None:
        self._bars: dict[str, tqdm[NoReturn]] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._bars:
            bar = tqdm(desc=what, total=total or None, unit_scale=True, file=sys.stderr, disable=None, leave=False)
            self._bars[what] = bar
        bar = self._bars[what]
        bar.total = total or bar.total
        bar.update(done - bar.n)
        if total and done >= total:
            bar.close()

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()
