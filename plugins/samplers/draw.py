"""The random stream and the draw. A row's number depends on (seed, choice, position) alone, never on batch mates.

Counter-based, so there is no generator state to keep, save or restore: number `position` of stream (seed, choice) is
output `position` of a SplitMix64 generator (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)
whose state is a mix of seed and choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.batch import SampledRow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_CHOICE = 0xD1342543DE82EF95  # odd; keeps (seed, choice) apart from (seed + 1, choice - 1)
_WORD = (1 << 64) - 1


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> Floats:
    """Numbers in the open interval (0, 1), float64 [n]. Any integers, negative ones too (taken modulo 2**64)."""
    state = _mix(_words(seeds) + np.uint64(_GOLDEN))
    state = _mix(state + _words(choices) * np.uint64(_CHOICE))
    bits = _mix(state + (_words(positions) + np.uint64(1)) * np.uint64(_GOLDEN))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # 52 bits: the largest stays below 1


def row_uniforms(rows: Sequence[SampledRow]) -> Floats:
    return uniforms([r.seed for r in rows], [r.choice for r in rows], [r.position for r in rows])


def pick(cumulative: Floats, kept: Ints, numbers: Floats) -> Ints:
    """Inverse of the distribution function: index of the first entry whose cumulative weight exceeds u * total.

    `cumulative` [n, K] non-decreasing, `kept` [n] entries that may be drawn (the last of them has weight), `numbers` [n].
    """
    last = kept - 1
    target = numbers * np.take_along_axis(cumulative, last[:, None], 1)[:, 0]
    index: Ints = np.minimum((cumulative <= target[:, None]).sum(1), last)
    return index


def _words(values: Sequence[int]) -> NDArray[np.uint64]:
    return np.array([value & _WORD for value in values], dtype=np.uint64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser; array arithmetic wraps modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
