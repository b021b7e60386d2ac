"""Traffic for tests of the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.simulation.records import Arrival


@dataclass(frozen=True, slots=True)
class Listed:
    """Traffic of a list."""

    arrivals: Sequence[Arrival]
    shares_content: bool = False

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self.arrivals)
