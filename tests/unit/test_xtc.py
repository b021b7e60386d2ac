"""XTC against its slow twin, how often it acts, and that chance is the row's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from core.batch import SampledRow
from core.request import SamplingParams
from core.stages.logits_processor import LogitsProcessorContext, parsed_params
from core.testing.sampler import assert_frequencies, make_logits, make_row
from core.testing.sampler_reference import spec_of
from plugins.logits_processors.numbers import row_number
from plugins.logits_processors.settings import XtcParams, XtcSettings
from plugins.logits_processors.xtc import Xtc

V, EOS = 90, frozenset({4, 80})
NEVER = float("-inf")


def make_xtc(**values: object) -> Xtc:
    return Xtc(XtcSettings(**values), LogitsProcessorContext(spec_of(V, EOS), "cpu", lambda: None))


def edited(xtc: Xtc, logits: torch.Tensor, rows: list[SampledRow], **params: float) -> torch.Tensor:
    states = [xtc.state(row, XtcParams(**params)) for row in rows]
    found = logits.clone()
    xtc.apply(found, rows, states)
    return found


def naive(logits: np.ndarray, threshold: float) -> list[int]:
    """Ids that are left out, as text-generation-webui has it: of the sorted likely ones all but the last."""
    shares = np.exp(logits.astype(np.float64) - logits.max())
    shares /= shares.sum()
    likely = [i for i in np.argsort(-shares, kind="stable") if shares[i] >= threshold]
    return sorted(int(i) for i in likely if shares[i] > shares[likely[-1]] and i not in EOS) if len(likely) > 1 else []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 500), st.sampled_from([0.0003, 0.02, 0.1, 0.3, 0.5, 0.9]), st.sampled_from([0.5, 3.0]), st.booleans()
)
def test_it_equals_its_slow_twin(seed: int, threshold: float, spread: float, ties: bool) -> None:
    logits = make_logits(3, V, seed) / 3.0 * spread
    logits = logits.round() if ties else logits
    logits[0, 4] = 9.0  # an end of sequence is likeliest
    rows = [make_row(f"r{i}", seed=seed) for i in range(3)]
    found = edited(make_xtc(), logits, rows, probability=1.0, threshold=threshold)
    for before, after in zip(logits, found, strict=True):
        out = naive(before.numpy(), threshold)
        assert torch.nonzero(after == NEVER).flatten().tolist() == out
        assert torch.equal(after[after > NEVER], before[after > NEVER])


def test_it_acts_as_often_as_asked_and_by_chance_of_the_row_alone() -> None:
    rows = [make_row(f"r{i}", seed=i // 100, choice=i % 4, position=i // 4 % 25) for i in range(2000)]
    logits = torch.zeros(1, V).expand(2000, -1).clone()
    logits[:, 10:13] = torch.tensor([9.0, 8.5, 8.0])
    found = edited(make_xtc(), logits, rows, probability=0.3)
    acted = (found[:, 10] == NEVER).long()
    assert torch.equal(acted, (found[:, 11] == NEVER).long()) and bool((found[:, 12] > NEVER).all())
    assert_frequencies(np.bincount(acted.numpy(), minlength=2), np.array([0.7, 0.3]))
    again = edited(make_xtc(), logits[:5], rows[1000:1005][::-1], probability=0.3)
    assert torch.equal(again, found[1000:1005].flip(0))


def test_numbers_are_even_and_differ_by_purpose() -> None:
    rows = [
        make_row("r", seed=seed, choice=choice, position=at)
        for seed in range(50)
        for choice in range(4)
        for at in range(20)
    ]
    one, other = (np.array([row_number(row, purpose) for row in rows]) for purpose in (1, 2))
    assert len({*one, *other}) == 2 * len(rows)
    cells = (one * 8).astype(np.int64) * 8 + (other * 8).astype(np.int64)
    assert_frequencies(np.bincount(cells, minlength=64), np.full(64, 1 / 64))


def test_who_is_concerned() -> None:
    row = make_row("a", SamplingParams())
    assert make_xtc().state(row, None) is None
    assert make_xtc().state(row, XtcParams(probability=0.0)) is None
    assert make_xtc(probability=0.0).state(row, XtcParams()) is None
    assert make_xtc(threshold=0.2).state(row, XtcParams(probability=1.0)) == XtcParams(probability=1.0, threshold=0.2)
    assert make_xtc(always=True).state(row, None) == XtcParams(probability=0.5, threshold=0.1)


@pytest.mark.parametrize("values", [{"probability": 1.1}, {"threshold": -0.1}, {"threshold": "0.1"}, {"chance": 1}])
def test_bad_parameters_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        parsed_params(XtcParams, values)
