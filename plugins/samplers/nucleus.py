"""top-p without a sort: a token is drawn from the whole distribution, and counts if it belongs to the nucleus.

It belongs where the tokens that rank before it (larger weight, then lower id) weigh less than `top_p` of the whole. That is one
sum, which a look at the blocks mostly spares. What is drawn so is distributed as in the nucleus (rejection sampling; the idea of
a draw without a sort: FlashInfer's sampling kernels).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from plugins.samplers.candidates import BLOCK
from plugins.samplers.draw import Floats, Ints
from plugins.samplers.weights import Weights

_ROUNDING = np.float32(1.0 - 2.0**-20)
_PIECE = 512  # blocks that are read at once: torch starts no threads for so few


def in_nucleus(weights: Weights, which: Ints, token_ids: Ints, goals: Floats) -> NDArray[np.bool_]:
    """Whether less than `goals` [k] ranks before the tokens `token_ids` [k] of the rows `which` [k]."""
    block, place = np.divmod(token_ids, BLOCK)
    own = weights.values[which, block, place]
    hit = (
        weights.maxima[which] >= own[:, None] * _ROUNDING
    )  # blocks with the token and all that ranks before it, at least
    sums = weights.sums[which] * hit
    most = sums.sum(1) - own
    inside: NDArray[np.bool_] = most < goals
    for k in np.flatnonzero(~inside):
        token = Token(weights.values[which[k]], int(token_ids[k]), own[k])
        inside[k] = token.ranks_within(goals[k], float(most[k]), sums[k])
    return inside


class Token(NamedTuple):
    """One that the blocks alone do not decide."""

    values: NDArray[np.float32]  # [number of blocks, BLOCK], the weights of its row
    token_id: int
    weight: np.float32

    def ranks_within(self, goal: float, most: float, sums: Floats) -> bool:
        """`most` bounds what ranks before it: all that is in `sums` [number of blocks]. What weighs less than the token is taken
        off, until that is enough."""
        below, read = float(np.nextafter(self.weight, np.float32(-1.0))), torch.from_numpy(self.values)
        for start in range(0, len(sums), _PIECE):
            piece = slice(start, start + _PIECE)
            reached = torch.threshold(read[piece], below, 0.0).sum()
            most -= float(sums[piece].sum()) - float(reached)
            if most < goal:
                return True
        behind = np.count_nonzero(self.values.reshape(-1)[self.token_id + 1 :] == self.weight)
        return bool(most - float(self.weight) * behind < goal)
