"""The random streams and the draw. A row's numbers depend on (seed, choice, position) alone, never on batch mates.

Counter-based, so there is no generator state to keep, save or restore: number `position` of stream (seed, choice) is
output `position` of a SplitMix64 generator (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)
whose state is a mix of seed and choice. Where one draw needs further numbers, they are outputs of a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.batch import SampledRow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_CHOICE = 0xD1342543DE82EF95  # odd; keeps (seed, choice) apart from (seed + 1, choice - 1)
_ATTEMPT = 0x8CB92BA72F3D8DD7  # odd; keeps (position, attempt) apart from (position + 1, attempt - 1)
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Streams:
    """The numbers of n draws, as many for each as are asked for."""

    bits: NDArray[np.uint64]  # [n]

    @classmethod
    def of_rows(cls, rows: Sequence[SampledRow]) -> Streams:
        return cls(_bits([r.seed for r in rows], [r.choice for r in rows], [r.position for r in rows]))

    def take(self, which: Ints) -> Streams:
        return Streams(self.bits[which])

    def numbers(self, attempt: int = 0) -> Floats:
        """The number of each draw in the open interval (0, 1), float64 [n]; another one for another attempt."""
        bits = _mix(self.bits + np.uint64(attempt * _ATTEMPT & _WORD)) if attempt else self.bits
        return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # 52 bits: the largest stays below 1


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], attempt: int = 0) -> Floats:
    """Numbers in the open interval (0, 1), float64 [n]. Any integers, negative ones too (taken modulo 2**64)."""
    return Streams(_bits(seeds, choices, positions)).numbers(attempt)


def pick(cumulative: Floats, numbers: Floats) -> Ints:
    """Inverse of the distribution function: index [n] of the first entry whose cumulative weight exceeds u * total.

    `cumulative` [n, K] non-decreasing with a positive total, `numbers` [n] in (0, 1). The entry has weight.
    """
    return pick_weight(cumulative, numbers * cumulative[:, -1])


def pick_weight(cumulative: Floats, targets: Floats) -> Ints:
    """As `pick`, for the weight that has to be exceeded; one at or past the total (by rounding) counts as just below it."""
    below = np.minimum(targets, np.nextafter(cumulative[:, -1], 0.0))
    index: Ints = (cumulative <= below[:, None]).sum(1)
    return index


def _bits(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    state = _mix(_words(seeds) + np.uint64(_GOLDEN))
    state = _mix(state + _words(choices) * np.uint64(_CHOICE))
    return _mix(state + (_words(positions) + np.uint64(1)) * np.uint64(_GOLDEN))


def _words(values: Sequence[int]) -> NDArray[np.uint64]:
    return np.array([value & _WORD for value in values], dtype=np.uint64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser; array arithmetic wraps modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
