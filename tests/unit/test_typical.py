"""Typical sampling against its slow twin: the definition of the paper, over the sorted row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from core.stages.logits_processor import LogitsProcessorContext, parsed_params
from core.testing.sampler import make_logits, make_row
from core.testing.sampler_reference import spec_of
from plugins.logits_processors.settings import TypicalParams, TypicalSettings
from plugins.logits_processors.typical import Typical

NEVER = float("-inf")


def edited(logits: torch.Tensor, *masses: float) -> torch.Tensor:
    typical = Typical(TypicalSettings(), LogitsProcessorContext(spec_of(logits.shape[1]), "cpu", lambda: None))
    rows = [make_row(f"r{i}") for i in range(len(logits))]
    states = [typical.state(row, TypicalParams(mass=mass)) for row, mass in zip(rows, masses, strict=True)]
    found = logits.clone()
    typical.apply(found, rows, states)
    return found


def naive(logits: np.ndarray, mass: float) -> tuple[set[int], set[int]]:
    """Ids that stay for certain, and those that may: distances are told apart to a hundred-thousandth, sums to a millionth."""
    wide = logits.astype(np.float64)
    logs = wide - wide.max()
    logs -= np.log(np.exp(logs).sum())
    shares = np.exp(logs)
    entropy = -float((shares * np.where(shares > 0, logs, 0.0)).sum())
    off = np.abs(-logs - entropy)
    order = np.argsort(off, kind="stable")
    before = shares[order].cumsum() - shares[order]
    reach = [off[order[before < max(mass + shift, 1e-12)][-1]] for shift in (-1e-6, 1e-6)]
    return set(np.flatnonzero(off <= reach[0] - 1e-5)), set(np.flatnonzero(off <= reach[1] + 1e-5))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.integers(0, 500),
    st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.9999]),
    st.sampled_from([0.0, 0.5, 3.0, 40.0]),
    st.sampled_from([1, 2, 90, 3000]),
    st.booleans(),
)
def test_it_equals_its_slow_twin(seed: int, mass: float, spread: float, width: int, ties: bool) -> None:
    logits = make_logits(2, width, seed) / 3.0 * spread
    logits = logits.round() if ties else logits
    logits[1, 1::3] = NEVER
    for before, after in zip(logits, edited(logits, mass, mass), strict=True):
        surely, maybe = naive(before.numpy(), mass)
        stays = set(torch.nonzero(after > NEVER).flatten().tolist())
        assert stays, "nothing is left"
        assert surely - {*torch.nonzero(before == NEVER).flatten().tolist()} <= stays <= maybe
        assert torch.equal(after[after > NEVER], before[after > NEVER])


def test_the_likeliest_token_may_be_left_out() -> None:
    """The entropy of these is above what the likeliest token tells."""
    shares = torch.tensor([[0.4, *[0.06] * 10]])
    assert torch.nonzero(edited(shares.log(), 0.3)[0] > NEVER).flatten().tolist() == list(range(1, 11))


def test_who_is_concerned() -> None:
    context, row = LogitsProcessorContext(spec_of(9), "cpu", lambda: None), make_row("a")
    assert Typical(TypicalSettings(), context).state(row, None) is None
    assert Typical(TypicalSettings(), context).state(row, TypicalParams(mass=1.0)) is None
    assert Typical(TypicalSettings(mass=0.4), context).state(row, TypicalParams()) == 0.4
    assert Typical(TypicalSettings(always=True), context).state(row, None) == 0.9


@pytest.mark.parametrize("values", [{"mass": 0.0}, {"mass": 1.5}, {"p": 0.5}])
def test_bad_parameters_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        parsed_params(TypicalParams, values)
