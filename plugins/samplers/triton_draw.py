"""The draw of random rows on a GPU: temperature, min-p, top-k, top-p and the choice of a token in one kernel, without a sort.

The tokens of `host_draw`, up to the rounding of sums at the border of a token's share. One program has one row, whose logits stay
in the caches while it is read again. What is kept is said by its last token in rank (larger logit, then lower id): top-k is where
`k` tokens are reached, top-p where a weight is, and both are searched for by dividing the range of logits (as integers of the
same order) by eight, eleven times at most (a search for a threshold in place of a sort: idea of RTop-K and FlashInfer).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from plugins.samplers.draw import Ints, Streams
from plugins.samplers.truncate import CHECKED_TOP_P, MIN_P_SLACK, NUM_CHECKED, TOP_P_SLACK, Limits

_OFF = 2.0  # top-p: no weight is ever reached
_BLOCK = 2048
_NUM_WARPS = 8  # with these two no register is spilled on sm_80 to sm_100 and gfx942
_PARTS = tl.constexpr(8)  # in which a search divides its range at a time


class TritonDraw:
    def __init__(self, block: int = _BLOCK):
        """`block`: logits that a program reads at once, a power of 2."""
        self._block = block

    def draw(self, logits: torch.Tensor, limits: Limits, streams: Streams, part: Ints) -> Ints:
        """Token ids [n] of the rows `part` [n] of `logits` [S, V] float32, which are good: the largest logit is finite."""
        values = torch.from_numpy(_columns(limits.take(part), streams.take(part))).to(logits.device)
        rows = torch.from_numpy(part).to(logits.device)
        token_ids = torch.empty_like(rows)
        shape = logits.shape[1], logits.stride(0), values.shape[1]
        _draw_row[(len(part),)](logits, rows, values, token_ids, *shape, NUM_CHECKED, self._block, num_warps=_NUM_WARPS)
        found: Ints = token_ids.cpu().numpy()
        return found


def _columns(limits: Limits, streams: Streams) -> np.ndarray:
    """[n, 5 + attempts + 1] float64: powers of 2 per logit, least power, top-k, top-p, whether checked, then numbers."""
    checked = limits.top_p_alone & (limits.top_p >= CHECKED_TOP_P) & (limits.top_p < 1.0)
    with np.errstate(divide="ignore"):
        least = np.log2(limits.min_p * (1.0 - MIN_P_SLACK))
    top_p = np.where(limits.top_p < 1.0, limits.top_p - TOP_P_SLACK, _OFF)
    numbers = [streams.numbers(attempt) for attempt in range(NUM_CHECKED + 1)]
    powers = math.log2(math.e) / limits.temperature
    return np.stack([powers, least, limits.top_k, top_p, checked, *numbers], axis=1).astype(np.float64)


@triton.jit
def _draw_row(
    logits_ptr, rows_ptr, values_ptr, out_ptr, V, row_stride, num_values, ATTEMPTS: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0)
    logits = logits_ptr + tl.load(rows_ptr + n) * row_stride
    values = values_ptr + n * num_values
    scale, least = tl.load(values).to(tl.float32), tl.load(values + 1)
    top_k, top_p, checked = tl.load(values + 2), tl.load(values + 3), tl.load(values + 4)
    peak = _peak(logits, V, BLOCK)
    last_key = _least_key(peak, scale, least)
    last_id = V
    attempt = 0
    found = tl.full([], -1, tl.int32)
    if checked > 0:
        goal = top_p * _amount(logits, V, peak, scale, last_key, last_key, last_id, False, BLOCK)
        while (found < 0) & (attempt < ATTEMPTS):
            drawn, key = _choose(logits, V, peak, scale, last_key, last_id, tl.load(values + 5 + attempt), BLOCK)
            if _amount(logits, V, peak, scale, key, key, drawn - 1, False, BLOCK) < goal:
                found = drawn
            attempt += 1
    if found < 0:
        if top_k < V:
            last_key, last_id = _last(logits, V, peak, scale, last_key, last_id, top_k, True, BLOCK)
        if top_p < 1.0:
            goal = top_p * _amount(logits, V, peak, scale, last_key, last_key, last_id, False, BLOCK)
            last_key, last_id = _last(logits, V, peak, scale, last_key, last_id, goal, False, BLOCK)
        found, _ = _choose(logits, V, peak, scale, last_key, last_id, tl.load(values + 5 + attempt), BLOCK)
    tl.store(out_ptr + n, found)


@triton.jit
def _key(x):
    """Integers in the order of float32 numbers; those of -0.0 and 0.0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _peak(logits, V, BLOCK: tl.constexpr):
    peak = tl.full([], -float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.max(tl.load(logits + ids, mask=ids < V, other=-float("inf")), 0))
    return peak


@triton.jit
def _least_key(peak, scale, least):
    """The key from which on a weight is at least 2 ** `least` of the best one's."""
    floor = peak.to(tl.float64) + least / scale.to(tl.float64)
    return _key(floor.to(tl.float32))


@triton.jit
def _read(logits, start, V, peak, scale, last_key, last_id, BLOCK: tl.constexpr):
    """Ids, keys and weights of some tokens; the weight is 0 where one ranks behind (last_key, last_id)."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits + ids, mask=ids < V, other=-float("inf"))
    key = _key(x)
    kept = (ids < V) & ((key > last_key) | ((key == last_key) & (ids <= last_id)))
    return ids, key, kept, tl.where(kept, tl.exp2((x - peak) * scale), 0.0)


@triton.jit
def _amount(logits, V, peak, scale, least, last_key, last_id, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Weight, or number, of the tokens from the key `least` on that do not rank behind (last_key, last_id)."""
    amount = tl.full([], 0.0, tl.float64)
    for start in range(0, V, BLOCK):
        _, key, kept, weight = _read(logits, start, V, peak, scale, last_key, last_id, BLOCK)
        each = kept.to(tl.float32) if COUNT else weight
        amount += tl.sum(tl.where(key >= least, each, 0.0).to(tl.float64), 0)
    return amount


@triton.jit
def _last(logits, V, peak, scale, last_key, last_id, goal, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The token at which, best first, a weight or number is reached, as (key, id)."""
    low, high = last_key.to(tl.int64), _key(peak).to(tl.int64)
    parts = tl.arange(0, _PARTS) + 1
    while low < high:
        step = tl.maximum((high - low + _PARTS - 1) // _PARTS, 1)
        least = low + parts * step
        amounts = tl.zeros([_PARTS], tl.float64)
        for start in range(0, V, BLOCK):
            _, key, kept, weight = _read(logits, start, V, peak, scale, last_key, last_id, BLOCK)
            each = kept.to(tl.float32) if COUNT else weight
            amounts += tl.sum(tl.where(key[:, None] >= least[None, :], each[:, None], 0.0), 0).to(tl.float64)
        low += step * tl.sum(((amounts >= goal) & (least <= high)).to(tl.int64), 0)
        high = tl.minimum(high, low + step - 1)
    missing = goal - _amount(logits, V, peak, scale, low + 1, last_key, last_id, COUNT, BLOCK)
    seen = tl.full([], 0.0, tl.float64)
    found = V
    for start in range(0, V, BLOCK):
        ids, key, kept, weight = _read(logits, start, V, peak, scale, last_key, last_id, BLOCK)
        equal = kept & (key == low)
        each = tl.where(equal, kept.to(tl.float32) if COUNT else weight, 0.0).to(tl.float64)
        reached = equal & (seen + tl.cumsum(each, 0) >= missing)
        found = tl.minimum(found, tl.min(tl.where(reached, ids, V), 0))
        seen += tl.sum(each, 0)
    return low.to(tl.int32), found


@triton.jit
def _choose(logits, V, peak, scale, last_key, last_id, number, BLOCK: tl.constexpr):
    """The token whose share of (0, 1) `number` falls into, in order of ids, and its key."""
    lowest = tl.full([], -2147483648, tl.int32)
    target = number * _amount(logits, V, peak, scale, lowest, last_key, last_id, False, BLOCK)
    before = tl.full([], 0.0, tl.float64)
    found, found_key = tl.full([], -1, tl.int32), lowest
    for start in range(0, V, BLOCK):
        ids, key, _, weight = _read(logits, start, V, peak, scale, last_key, last_id, BLOCK)
        wide = weight.to(tl.float64)
        has = tl.max(tl.where(weight > 0.0, ids, -1), 0)
        if (has >= 0) & (before <= target):  # the newest token counts where rounding leaves none past the number
            past = (before + tl.cumsum(wide, 0) > target) & (weight > 0.0)
            first = tl.min(tl.where(past, ids, V), 0)
            found = tl.where(first < V, first, has)
            found_key = tl.max(tl.where(ids == found, key, lowest), 0)
        before += tl.sum(wide, 0)
    return found, found_key
