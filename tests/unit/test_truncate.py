"""The best candidates in a stable order, and the prefix that min-p, top-k and top-p keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.samplers.candidates import BLOCK, block_maxima, first_maximum, top_candidates
from plugins.samplers.truncate import Limits, kept_prefix

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


def keep(values: list[float], vocab_size: int = 1000, total: float = 1e9, **limits: float) -> tuple[int, bool]:
    used = {"temperature": 1.0, "top_k": vocab_size, "top_p": 1.0, "min_p": 0.0, **limits}
    record = Limits(*(np.array([used[name]]) for name in ("temperature", "top_k", "top_p", "min_p")))
    found = kept_prefix(np.array([values], np.float32), record, np.array([total]), vocab_size)
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
    nudged = {name: value - 1e-9 if name == "min_p" and value < 1 else value for name, value in limits.items()}
    assert keep(LOGS, vocab_size=4, **nudged) == (kept, True)


def test_ties_are_cut_at_a_stable_place() -> None:
    assert keep([0.0] * 4, vocab_size=4, top_p=0.5) == (2, True)
    assert keep([0.0] * 3, vocab_size=3, top_p=2 / 3) == (2, True)
    assert keep([0.0] * 4, vocab_size=4, min_p=1.0) == (4, True)


def test_candidates_that_do_not_reach_far_enough_are_reported() -> None:
    assert keep(LOGS, top_p=0.9, total=2.7) == (4, True)
    assert keep(LOGS, top_p=0.9, total=2.9)[1] is False
    assert keep(LOGS, top_p=0.3, total=2.9) == (1, True)
    assert keep(LOGS, min_p=0.01)[1] is False
    assert keep(LOGS, min_p=0.3) == (3, True)
    assert keep(LOGS, min_p=0.01, top_p=0.1)[1] is False  # the share is of what min_p leaves, not yet known
    assert keep(LOGS, top_k=5)[1] is False
    assert keep(LOGS, top_k=4) == (4, True)


def test_masked_candidates_are_never_kept() -> None:
    assert keep([0.0, -INF, -INF], top_k=3) == (1, True)
    assert keep([0.0, -1.0, -INF], top_p=0.9999, total=1.4) == (2, True)


def test_sums_do_not_depend_on_the_number_of_candidates() -> None:
    values = np.sort(np.random.default_rng(1).normal(size=500).astype(np.float32))[::-1]
    limits = Limits(np.array([0.7]), np.array([40]), np.array([0.9]), np.array([0.0]))
    few, many = (kept_prefix(values[None, :count], limits, np.ones(1), 1000) for count in (64, 500))
    assert few.kept == many.kept
    assert (few.cumulative[0, :40] == many.cumulative[0, :40]).all()
