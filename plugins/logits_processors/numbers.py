"""Random numbers of a row: each a function of (seed, choice, position) and what it is for, never of batch mates or calls."""

from __future__ import annotations

from core.batch import SampledRow

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def row_number(row: SampledRow, purpose: int) -> float:
    """In the open interval (0, 1)."""
    state = _mix(row.seed + _GOLDEN)
    for part in (row.choice, row.position, purpose):
        state = _mix(state + (part + 1) * _GOLDEN)
    return ((state >> 12) + 0.5) * 2.0**-52


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    x &= _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
