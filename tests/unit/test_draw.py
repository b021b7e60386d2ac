"""The random stream: a pure function of (seed, choice, position), uniform and without visible correlation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.testing.sampler import assert_frequencies
from plugins.samplers.draw import pick, uniforms
from plugins.samplers.whole import pick_whole, probabilities


def test_numbers_are_fixed_for_all_time() -> None:
    """A change of the stream would change every stored seeded answer."""
    found = uniforms([0, 7, -1, 2**63 - 1, -(2**63)], [0, 1, 2, 3, 0], [0, 0, 5, 1000, 2])
    assert found.tolist() == [
        slow_uniform(*key) for key in [(0, 0, 0), (7, 1, 0), (-1, 2, 5), (2**63 - 1, 3, 1000), (-(2**63), 0, 2)]
    ]


def slow_uniform(seed: int, choice: int, position: int) -> float:
    """The same in plain integers."""
    word, golden = 2**64, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % word
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % word
        return x ^ (x >> 31)

    state = mix((seed + golden) % word)
    state = mix((state + choice * 0xD1342543DE82EF95) % word)
    return ((mix((state + (position + 1) * golden) % word) >> 12) + 0.5) / 2**52


def test_open_interval_and_no_dependence_on_batch_mates() -> None:
    seeds, positions = list(range(-500, 500)), list(range(1000))
    numbers = uniforms(seeds, [0] * 1000, positions)
    assert 0.0 < numbers.min() and numbers.max() < 1.0
    assert len(set(numbers.tolist())) == 1000
    assert [
        float(uniforms([seed], [0], [at])[0]) for seed, at in zip(seeds, positions, strict=True)
    ] == numbers.tolist()
    assert uniforms([], [], []).shape == (0,)


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_uniform_along_each_axis_and_for_neighbours(axis: str) -> None:
    count = 20_000
    keys = {"seed": [11] * count, "choice": [0] * count, "position": [3] * count, axis: list(range(count))}
    numbers = uniforms(keys["seed"], keys["choice"], keys["position"])
    cells = (numbers * 50).astype(np.int64)
    assert_frequencies(np.bincount(cells, minlength=50), np.full(50, 1 / 50))
    pairs = (numbers[:-1] * 8).astype(np.int64) * 8 + (numbers[1:] * 8).astype(np.int64)
    assert_frequencies(np.bincount(pairs, minlength=64), np.full(64, 1 / 64))


def test_small_seeds_and_choices_do_not_meet() -> None:
    """F3: choice i of seed s is not choice j of another seed, at any position."""
    keys = [(seed, choice, at) for seed in range(-20, 20) for choice in range(10) for at in range(20)]
    assert len(set(uniforms(*map(list, zip(*keys, strict=True))).tolist())) == len(keys)


def test_pick_takes_the_first_entry_past_the_number() -> None:
    cumulative = np.array([[0.0, 2.0, 2.0, 4.0, 9.0]])
    row = np.repeat(cumulative, 5, 0)
    numbers = np.array([1e-18, 0.49, 0.5, 0.51, 1 - 2.0**-53])
    assert pick(row, np.full(5, 4), numbers).tolist() == [1, 1, 3, 3, 3]
    assert pick(row[:1], np.array([1]), np.array([0.99])).tolist() == [0]


def test_frequencies_of_a_truncated_draw() -> None:
    weights = np.array([5.0, 3.0, 0.0, 1.5, 0.5, 7.0])
    count = 10_000
    numbers = uniforms([3] * count, [1] * count, list(range(count)))
    found = pick(np.repeat(weights.cumsum()[None], count, 0), np.full(count, 5), numbers)
    kept = np.where(np.arange(6) < 5, weights, 0.0)
    assert_frequencies(np.bincount(found, minlength=6), kept / kept.sum())


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200, 4096, 5001])
def test_whole_draw_is_the_inverse_of_the_distribution_function(width: int) -> None:
    logits = torch.randn(50, width, generator=torch.Generator().manual_seed(width)) * 2
    logits[:, ::3] = float("-inf") if width > 3 else logits[:, ::3]
    numbers = uniforms(list(range(50)), [0] * 50, [0] * 50)
    temperature = np.full(50, 0.7)
    found = pick_whole(logits.clone(), logits.amax(-1), temperature, numbers)
    wide = logits.double().numpy() / 0.7
    weights = np.exp(wide - wide.max(1, keepdims=True))
    upper = (weights / weights.sum(1, keepdims=True)).cumsum(1)
    lower = np.concatenate([np.zeros((50, 1)), upper[:, :-1]], 1)
    at = np.arange(50)
    assert (weights[at, found] > 0).all()
    assert (lower[at, found] <= numbers + 1e-6).all() and (upper[at, found] >= numbers - 1e-6).all()


def test_whole_draw_at_the_ends_of_the_interval() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2)
    ends = np.array([2.0**-53, 1 - 2.0**-53])
    assert pick_whole(logits, logits.amax(-1), np.ones(2), ends).tolist() == [1, 2]


def test_probabilities_stay_exact_at_extreme_temperatures() -> None:
    logits = torch.tensor([[20.0, 20.0 - 1e-5 * 4, -5.0], [20.0, 0.0, -5.0]])
    found = probabilities(logits, logits.amax(-1), np.array([1e-5, 1e30]))
    step = (float(logits[0, 1]) - 20.0) / 1e-5
    assert found[0].tolist() == pytest.approx(
        [1 / (1 + np.exp(step)), np.exp(step) / (1 + np.exp(step)), 0.0], abs=1e-5
    )
    assert found[1].tolist() == pytest.approx([1 / 3] * 3)
