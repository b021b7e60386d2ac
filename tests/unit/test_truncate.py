"""The best candidates in a stable order, and the prefix that min-p, top-k and top-p keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.testing.sampler import assert_frequencies
from plugins.samplers.blocks import Blocks
from plugins.samplers.candidates import BLOCK, block_maxima, first_maximum, top_candidates
from plugins.samplers.draw import uniforms
from plugins.samplers.nucleus import in_nucleus
from plugins.samplers.truncate import Limits, draw_kept, kept_prefix
from plugins.samplers.weights import Scales

INF = float("inf")


def stable_order(values: torch.Tensor) -> torch.Tensor:
    return (-values).sort(dim=-1, stable=True).indices


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    width=st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 40 * BLOCK + 7]),
    count=st.sampled_from([1, 2, 3, 10, 64, 5000]),
    levels=st.sampled_from([1, 2, 5, 1000]),
    seed=st.integers(0, 1000),
)
def test_candidates_equal_a_stable_sort(width: int, count: int, levels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-levels, levels, (3, width), generator=generator) / 4.0
    rows[0, torch.rand(width, generator=generator) < 0.3] = -INF
    rows[1, torch.rand(width, generator=generator) < 0.3] = -0.0
    maxima = block_maxima(rows)
    order = stable_order(rows)
    found = top_candidates(rows, maxima, count)
    assert torch.equal(found.ids, order[:, :count])
    assert torch.equal(found.values, rows.gather(1, order[:, :count]))
    assert torch.equal(first_maximum(rows, maxima), rows.argmax(-1))


def test_block_maxima_show_nan_and_infinity() -> None:
    rows = torch.zeros(3, 3 * BLOCK + 5)
    rows[0, -1] = float("nan")
    rows[1, 0] = INF
    rows[2] = -INF
    peaks = block_maxima(rows).amax(-1)
    assert peaks[0].isnan() and peaks[1] == INF and peaks[2] == -INF


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    width=st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 40 * BLOCK + 7]),
    levels=st.sampled_from([1, 2, 5, 1000]),
    count=st.sampled_from([1, 2, 10, 40, 64, 1000]),
    seed=st.integers(0, 1000),
)
def test_the_best_above_a_floor_equal_a_stable_sort(width: int, levels: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-levels, levels, (4, width), generator=generator) / 4.0
    rows[0, 1:][torch.rand(width - 1, generator=generator) < 0.3] = -INF
    rows[1, torch.rand(width, generator=generator) < 0.3] = -0.0
    blocks, which = Blocks.of(rows, block_maxima(rows)), np.array([0, 1, 3])
    floors = blocks.kth_best(which, np.full(3, min(count, width)))
    found = blocks.best_above(which, floors)
    for at, row in enumerate(which):
        order = stable_order(rows[row : row + 1])[0]
        reach = int((rows[row] >= floors[at]).sum())
        assert reach >= min(count, width)
        assert found.ids[at, :reach].tolist() == order[:reach].tolist()
        assert (found.values[at, :reach] == rows[row][order[:reach]].numpy()).all()
        assert (found.values[at, reach:] == -INF).all()


def limits_of(vocab_size: int, **limits: float) -> Limits:
    used = {"temperature": 1.0, "top_k": vocab_size, "top_p": 1.0, "min_p": 0.0, **limits}
    return Limits(*(np.array([used[name]]) for name in ("temperature", "top_k", "top_p", "min_p")), vocab_size)


def keep(values: list[float], complete: bool = True, total: float = 1e9, **limits: float) -> tuple[int, bool]:
    record = limits_of(1000, **limits)
    found = kept_prefix(np.array([values], np.float32), record, np.array([complete]), np.array([total]))
    assert (found.weights[0, int(found.kept[0]) :] == 0).all()
    return int(found.kept[0]), bool(found.complete[0])


LOGS = np.log([0.4, 0.3, 0.2, 0.1]).tolist()


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, 4),
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.39}, 1),
        ({"top_p": 0.41}, 2),
        ({"top_p": 0.7}, 2),  # reached exactly
        ({"top_p": 1e-12}, 1),
        ({"top_p": 0.999}, 4),
        ({"min_p": 0.5}, 3),  # 0.2 / 0.4, inclusive up to rounding
        ({"min_p": 0.6}, 2),
        ({"min_p": 1.0}, 1),
        ({"top_k": 2, "top_p": 0.6}, 2),  # 0.4 / 0.7 is less than 0.6
        ({"top_k": 2, "top_p": 0.5}, 1),
        ({"min_p": 0.6, "top_p": 0.5}, 1),
        ({"temperature": 1e-5}, 1),
        ({"temperature": 100.0, "top_p": 0.5}, 2),
    ],
)
def test_kept_prefix_of_a_whole_vocabulary(limits: dict[str, float], kept: int) -> None:
    assert keep(LOGS, **limits) == (kept, True)


def test_ties_are_cut_at_a_stable_place() -> None:
    assert keep([0.0] * 4, top_p=0.5) == (2, True)
    assert keep([0.0] * 3, top_p=2 / 3) == (2, True)
    assert keep([0.0] * 4, min_p=1.0) == (4, True)


def test_candidates_that_do_not_reach_far_enough_are_reported() -> None:
    assert keep(LOGS, complete=False, top_p=0.9, total=2.7) == (4, True)
    assert keep(LOGS, complete=False, top_p=0.9, total=2.9)[1] is False
    assert keep(LOGS, complete=False, top_p=0.3, total=2.9) == (1, True)


def test_masked_candidates_are_never_kept() -> None:
    assert keep([0.0, -INF, -INF], top_k=3) == (1, True)
    assert keep([0.0, -1.0, -INF], complete=False, top_p=0.9999, total=1.36) == (2, True)


def test_sums_do_not_depend_on_the_number_of_candidates() -> None:
    values = np.sort(np.random.default_rng(1).normal(size=500).astype(np.float32))[::-1]
    limits, complete = limits_of(1000, temperature=0.7, top_k=40, top_p=0.9), np.array([True])
    few, many = (kept_prefix(values[None, :count], limits, complete, np.ones(1)) for count in (64, 500))
    assert few.kept == many.kept
    assert (few.weights[0, :40] == many.weights[0, :40]).all()


def test_what_is_kept_is_drawn_in_order_of_ids() -> None:
    ids = np.array([[30, 10, 20, 40], [4, 3, 2, 1]])
    values = np.log(np.array([[0.5, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]], np.float32))
    limits = Limits(np.ones(2), np.array([3, 1]), np.ones(2), np.zeros(2), 1000)
    prefix = kept_prefix(values, limits, np.ones(2, bool), np.ones(2))
    for number, wanted in ((0.01, 10), (0.29, 10), (0.31, 20), (0.49, 20), (0.51, 30), (0.99, 30)):
        assert draw_kept(prefix, ids, np.array([number, number])).tolist() == [wanted, 4]


@pytest.mark.parametrize("levels", [3, 40, 10**6])
@pytest.mark.parametrize("width", [50, 64 * 300, 40_000])
def test_a_token_lies_in_the_nucleus_as_the_sorted_row_has_it(levels: int, width: int) -> None:
    """With few levels nearly all logits are ties, which rank by id; a wide row is read in pieces."""
    generator = torch.Generator().manual_seed(levels)
    logits = (torch.randn(3, width, generator=generator) * 1.5 * levels).round() / levels
    weights = Scales().weigh(logits, np.arange(3), Blocks.of(logits, block_maxima(logits)), np.ones(3))
    order = stable_order(logits).numpy()
    for row in range(3):
        ranked = weights.values[row].reshape(-1)[order[row]].astype(np.float64)
        before = ranked.cumsum() - ranked
        goal = 0.8 * before[-1]
        border = int((before < goal).sum())
        at = np.unique(
            np.clip([0, 1, border // 2, border - 2, border + 2, (border + width) // 2, width - 1], 0, width - 1)
        )
        inside = in_nucleus(weights, np.full(len(at), row), order[row][at], np.full(len(at), goal))
        assert inside.tolist() == (before[at] < goal).tolist()


def test_attempts_in_the_nucleus_are_distributed_as_the_nucleus() -> None:
    """Rejection: what is drawn from the whole and lies in the nucleus has the nucleus' own shares."""
    logits = torch.tensor([[0.5, 2.0, 1.0, 1.5, 0.0, 1.0]])
    count = 6000
    weights = Scales().weigh(logits, np.arange(1), Blocks.of(logits, block_maxima(logits)), np.ones(1))
    drawn = weights.draw(np.zeros(count, np.int64), uniforms(range(count), [0] * count, [0] * count))
    inside = in_nucleus(weights, np.zeros(count, np.int64), drawn, np.full(count, 0.7 * weights.totals[0]))
    kept = np.where(np.isin(np.arange(6), [1, 3, 2]), np.exp(logits[0].numpy().astype(np.float64)), 0.0)
    assert_frequencies(np.bincount(drawn[inside], minlength=6), kept / kept.sum())
