"""The draw over the whole vocabulary, for rows with a temperature alone: no sort, no copy of V numbers to the host.

Inverse distribution function in order of token ids, in two steps: blocks of ids by their sums, then one block.
"""

from __future__ import annotations

import numpy as np
import torch

from plugins.samplers.candidates import BLOCK, take_blocks
from plugins.samplers.draw import Floats, Ints, pick


def probabilities(logits: torch.Tensor, peaks: torch.Tensor, temperature: Floats) -> torch.Tensor:
    """softmax((logits - peak) / temperature), float32 [n, V]. The peak goes first: at a temperature of 1e-5 the
    quotients are so large that float32 could not tell neighbours apart. `peaks` [n] finite."""
    divisor = torch.from_numpy(temperature.astype(np.float32)).to(logits.device)
    shifted = (logits - peaks.unsqueeze(1)).div_(divisor.unsqueeze(1))
    return shifted.softmax(-1)


def total_weights(logits: torch.Tensor, peaks: torch.Tensor, temperature: Floats) -> Floats:
    """Weight of the whole vocabulary where the best token weighs 1, [n]."""
    best = probabilities(logits, peaks, temperature).amax(-1)
    weights: Floats = 1.0 / best.cpu().numpy().astype(np.float64)
    return weights


def pick_whole(logits: torch.Tensor, peaks: torch.Tensor, temperature: Floats, numbers: Floats) -> Ints:
    """Token ids [n] drawn with `numbers` [n] in (0, 1)."""
    weights = probabilities(logits, peaks, temperature)
    sums = _block_sums(weights).cpu().numpy()
    cumulative = sums.cumsum(1)
    block = pick(cumulative, _last_positive(sums) + 1, numbers)
    before = np.where(block > 0, np.take_along_axis(cumulative, np.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0)
    rest = numbers * cumulative[:, -1] - before
    found = take_blocks(weights, torch.from_numpy(block[:, None]).to(weights.device))
    inside = np.maximum(found.values.cpu().numpy().astype(np.float64), 0.0)  # -inf past the last id
    index = np.minimum((inside.cumsum(1) <= rest[:, None]).sum(1), _last_positive(inside))
    ids: Ints = block * BLOCK + index
    return ids


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """[n, V] -> float64 [n, ceil(V / BLOCK)]."""
    width = weights.shape[1]
    whole = width // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(weights[:, :whole].view(len(weights), -1, BLOCK).sum(-1, dtype=torch.float64))
    if whole < width:
        parts.append(weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _last_positive(weights: Floats) -> Ints:
    """Index [n] of the last entry above 0 in each row of [n, K]; one exists."""
    last: Ints = weights.shape[1] - 1 - (weights[:, ::-1] > 0.0).argmax(1)
    return last
