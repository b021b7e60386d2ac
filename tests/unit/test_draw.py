"""The random stream: a pure function of (seed, choice, position), uniform and without visible correlation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.testing.sampler import assert_frequencies, make_row
from plugins.samplers.blocks import Blocks
from plugins.samplers.candidates import block_maxima
from plugins.samplers.draw import Floats, Ints, Streams, pick, uniforms
from plugins.samplers.weights import Scales, Weights


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


def test_attempts_are_streams_of_their_own() -> None:
    seeds, choices, positions = list(range(2000)), [1] * 2000, [5] * 2000
    numbers = [uniforms(seeds, choices, positions, attempt) for attempt in range(5)]
    assert (numbers[0] == uniforms(seeds, choices, positions)).all()
    assert len({*np.concatenate(numbers).tolist()}) == 5 * 2000
    for one, other in zip(numbers, numbers[1:], strict=False):
        cells = (one * 8).astype(np.int64) * 8 + (other * 8).astype(np.int64)
        assert_frequencies(np.bincount(cells, minlength=64), np.full(64, 1 / 64))
    rows = [make_row(f"r{i}", seed=i, choice=1, position=5) for i in range(2000)]
    assert (Streams.of_rows(rows).take(np.array([7, 3])).numbers(4) == numbers[4][[7, 3]]).all()


def test_pick_takes_the_first_entry_past_the_number() -> None:
    row = np.repeat(np.array([[0.0, 2.0, 2.0, 4.0, 4.0]]), 5, 0)
    numbers = np.array([1e-18, 0.49, 0.5, 0.51, 1 - 2.0**-53])
    assert pick(row, numbers).tolist() == [1, 1, 3, 3, 3], "an entry without weight is never picked"
    assert pick(row[:1] * 1e300, np.array([1 - 2.0**-53])).tolist() == [3]
    assert pick(row[:1] * 1e-300, np.array([1 - 2.0**-53])).tolist() == [3]


def test_frequencies_of_a_draw() -> None:
    weights = np.array([5.0, 3.0, 0.0, 1.5, 0.5, 7.0])
    count = 10_000
    numbers = uniforms([3] * count, [1] * count, list(range(count)))
    found = pick(np.repeat(weights.cumsum()[None], count, 0), numbers)
    assert_frequencies(np.bincount(found, minlength=6), weights / weights.sum())


def weigh(logits: torch.Tensor, temperature: Floats, rows: Ints | None = None, min_p: Floats | None = None) -> Weights:
    which = np.arange(len(logits)) if rows is None else rows
    return Scales().weigh(logits, which, Blocks.of(logits, block_maxima(logits)), temperature, min_p)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200, 4096, 5001])
def test_whole_draw_is_the_inverse_of_the_distribution_function(width: int) -> None:
    logits = torch.randn(50, width, generator=torch.Generator().manual_seed(width)) * 2
    logits[:, ::3] = float("-inf") if width > 3 else logits[:, ::3]
    numbers = uniforms(list(range(50)), [0] * 50, [0] * 50)
    found = weigh(logits, np.full(50, 0.7)).draw(np.arange(50), numbers)
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
    assert weigh(logits, np.ones(2)).draw(np.arange(2), ends).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [1e-5, 0.05, 1.0, 30.0, 1e30])
@pytest.mark.parametrize("offset", [0.0, -700.0, 900.0])
def test_weights_are_powers_of_the_logits_at_any_temperature(temperature: float, offset: float) -> None:
    logits = torch.randn(3, 130, generator=torch.Generator().manual_seed(1)) * 4 + offset
    logits[1, 7] = float("-inf")
    found = weigh(logits, np.full(3, temperature))
    wide = logits.double().numpy()
    wanted = np.exp((wide - wide.max(1, keepdims=True)) / temperature)
    given = found.values.reshape(3, -1)[:, :130].astype(np.float64)
    np.testing.assert_allclose(given / given.max(1, keepdims=True), wanted, rtol=1e-4, atol=1e-37)
    np.testing.assert_allclose(found.totals, given.sum(1), rtol=1e-6)
    np.testing.assert_allclose(found.maxima, found.values.max(2), rtol=2e-7, atol=1e-37)


def test_min_p_cuts_weights() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(2)) * 3
    logits[3] += 500.0  # the peak is taken off first
    least = np.array([1e-30, 0.01, 0.5, 1.0])
    found = weigh(logits, np.full(4, 1.5), min_p=least).values.reshape(4, -1)[:, :1000]
    wide = logits.double().numpy()
    share = np.exp((wide - wide.max(1, keepdims=True)) / 1.5)
    assert ((found > 0) == (share >= least[:, None])).all()
    np.testing.assert_allclose(found.max(1), 1 / least, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_a_row_is_weighed_alike_in_any_company(threads: int) -> None:
    """Also beside rows whose peak is taken off first, in memory that other rows have used, and whatever share of the numbers a
    thread gets: the last ones of a share go another way."""
    logits = torch.randn(7, 32_777, generator=torch.Generator().manual_seed(3)) * 5
    logits[4] += 5000.0
    scales, blocks, before = Scales(), Blocks.of(logits, block_maxima(logits)), torch.get_num_threads()
    temperature = np.array([1.0, 0.1, 1e-5, 2.0, 1.0, 0.7, 1.3])
    torch.set_num_threads(1)
    wanted = [Scales().weigh(logits, np.array([i]), blocks, temperature[[i]]) for i in range(7)]
    torch.set_num_threads(threads)
    try:
        for rows in ([0, 1, 2, 3, 4, 5, 6], [0, 4], [1, 3, 5], [2], [0, 1, 2, 3, 6]):
            found = scales.weigh(logits, np.array(rows), blocks, temperature[rows])
            for at, row in enumerate(rows):
                assert (found.values[at] == wanted[row].values[0]).all()
                assert (found.cumulative[at] == wanted[row].cumulative[0]).all()
                assert (found.maxima[at] == wanted[row].maxima[0]).all()
    finally:
        torch.set_num_threads(before)
