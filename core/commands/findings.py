"""What `doctor` prints, a line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`fail`: something is broken. `warn`: something will be. `info`: something that only some need is not there.

    `detail` says what was seen and, unless ok, the next step.
    """

    level: Level
    name: str
    detail: str
