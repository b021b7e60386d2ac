"""Log-probabilities of the model's own distribution: finite, ranked, best first, in chunks."""

from __future__ import annotations

import math

import pytest
import torch

from core.batch import PromptRows
from core.testing.sampler import make_logits
from plugins.samplers.logprobs import LOWEST, Logprobs, Target

INF = float("inf")
NOTHING = Logprobs(frozenset(), None, 2**20)


def test_values_rank_and_alternatives() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.2, 0.1]]))
    (found,) = NOTHING.of_targets(logits, [Target(0, 3, 4)])
    assert found is not None
    assert (found.token_id, found.rank) == (3, 2)
    assert found.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [i for i, _ in found.top] == [1, 2, 3, 0]  # ties by id
    assert [value for _, value in found.top] == pytest.approx([math.log(p) for p in (0.4, 0.2, 0.2, 0.1)], abs=1e-6)


def test_zero_alternatives_and_more_than_the_vocabulary() -> None:
    """E1, E4."""
    none, all_ = NOTHING.of_targets(make_logits(2, 6), [Target(0, 1, 0), Target(1, 1, 20)])
    assert none is not None and all_ is not None
    assert none.top == []
    assert sorted(i for i, _ in all_.top) == list(range(6))


def test_numbers_are_finite() -> None:
    """E3: a masked token has LOWEST, also when it is the token asked for."""
    logits = torch.tensor([[0.0, -INF, -2e4, -INF]])
    (found,) = NOTHING.of_targets(logits, [Target(0, 1, 4)])
    assert found is not None
    assert (found.logprob, found.rank) == (LOWEST, 3)
    assert found.top == [(0, 0.0), (2, LOWEST), (1, LOWEST), (3, LOWEST)]


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_a_row_without_a_distribution_has_none(bad: float) -> None:
    logits = make_logits(2, 8)
    logits[0] = bad
    first, second = NOTHING.of_targets(logits, [Target(0, 1, 1), Target(1, 1, 1)])
    assert first is None
    assert second is not None


def test_unusable_ids_are_no_alternatives_and_stay_in_the_softmax() -> None:
    logits = make_logits(1, 8)
    logits[0, [6, 7]] = 9.0
    before = logits.clone()
    (found,) = Logprobs(frozenset({6, 7}), slice(6, 8), 2**20).of_targets(logits, [Target(0, 2, 8)])
    assert found is not None
    assert sorted(i for i, _ in found.top) == list(range(6))
    assert found.rank == 1 + int((logits[0, :6] > logits[0, 2]).sum())
    assert found.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 2]), abs=1e-6)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("chunk_floats", [1, 100, 250, 10_000])
def test_chunks_give_the_same_numbers(chunk_floats: int) -> None:
    """E6: chunked or not, each position has its own row."""
    logits = make_logits(9, 100)
    part = PromptRows("a", (8, 0, 3, 3, 5), (1, 2, 3, 4, 5), 3)
    whole, _ = NOTHING.of_prompt(logits, [part])
    found, errors = Logprobs(frozenset(), None, chunk_floats).of_prompt(logits, [part])
    assert found == whole
    assert not errors
    assert [entry.token_id for entry in found["a"]] == [1, 2, 3, 4, 5]
    wanted = logits.log_softmax(-1)
    for entry, row in zip(found["a"], part.rows, strict=True):
        assert entry.logprob == pytest.approx(float(wanted[row, entry.token_id]), abs=1e-6)


def test_parts_of_one_prompt_join_in_order_and_errors_stay_apart() -> None:
    logits = make_logits(4, 20)
    logits[2, 0] = float("nan")
    parts = [PromptRows("a", (0,), (4,), 0), PromptRows("b", (2,), (5,), 0), PromptRows("a", (1,), (6,), 0)]
    found, errors = NOTHING.of_prompt(logits, parts)
    assert [entry.token_id for entry in found["a"]] == [4, 6]
    assert errors.keys() == {"b"}
    assert "NaN" in errors["b"]
