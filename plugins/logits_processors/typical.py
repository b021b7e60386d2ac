"""Logits processor `typical`: only tokens stay that are about as surprising as a token is expected to be.

Meister, Pimentel, Wiher, Cotterell, "Locally Typical Sampling", TACL 2023. The surprise of a token is -log p, what is expected
the entropy of the distribution. Tokens are taken in order of the distance between the two until they are `mass` likely together;
the likeliest token may be left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel

from core.batch import SampledRow
from core.stages.logits_processor import LogitsProcessorContext
from plugins.logits_processors.settings import TypicalParams, TypicalSettings

_BINS = 1024  # distances are told apart by bins of equal width, and only those of one bin are sorted
_LOWEST = -1e4  # log p that counts as 0


class Typical:
    """For requests that send parameters; with `always`, for all. `mass: 1` asks for nothing.

    The distribution is the model's own, before temperature. Tokens as far off as the last one that is taken are taken as well.
    """

    Settings = TypicalSettings

    def __init__(self, settings: TypicalSettings, context: LogitsProcessorContext):
        self._settings = settings

    def state(self, row: SampledRow, params: BaseModel | None) -> float | None:
        """The mass that stays."""
        if params is None and not self._settings.always:
            return None
        own = params.mass if isinstance(params, TypicalParams) else None
        mass = self._settings.mass if own is None else own
        return mass if mass < 1.0 else None

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow], states: Sequence[float]) -> None:
        size = max(1, (1 << 21) // logits.shape[1])  # rows at a time, as far as temporaries stay small
        for start in range(0, len(rows), size):
            part = logits[start : start + size]
            logs, shares = part.log_softmax(-1).cpu().numpy(), part.softmax(-1).cpu().numpy()
            masses = states[start : start + size]
            barred = [_untypical(log, share, mass) for log, share, mass in zip(logs, shares, masses, strict=True)]
            part.masked_fill_(torch.from_numpy(np.stack(barred)).to(logits.device), float("-inf"))


def _untypical(logs: NDArray[np.float32], shares: NDArray[np.float32], mass: float) -> NDArray[np.bool_]:
    """What is left out of a distribution [V] (its logarithms, and itself)."""
    entropy = -float((shares * np.maximum(logs, _LOWEST)).sum(dtype=np.float64))
    off = np.abs(-logs - np.float32(entropy))
    reach = float(off[shares > 0].max())
    bins = np.minimum(off * np.float32(_BINS / max(reach, 1e-6)), _BINS - 1).astype(np.int64)
    upto = np.bincount(bins, shares, _BINS).cumsum()
    goal = mass * upto[-1]
    last = int((upto < goal).sum())
    inside = np.flatnonzero((bins == last) & (shares > 0))
    ordered = inside[off[inside].argsort(kind="stable")]
    before = upto[last] - float(shares[inside].sum(dtype=np.float64))
    index = int((before + shares[ordered].astype(np.float64).cumsum() < goal).sum())
    barred: NDArray[np.bool_] = off > off[ordered[min(index, len(ordered) - 1)]]
    return barred
