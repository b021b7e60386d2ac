"""Mirostat against its slow twin over whole texts; the surprise it comes to; preemption, drafts, steps that are run again."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from core.batch import SampledRow
from core.request import SamplingParams
from core.stages.logits_processor import LogitsProcessorContext, parsed_params
from core.testing.sampler import make_logits, make_row
from core.testing.sampler_reference import spec_of
from plugins.logits_processors import mirostat
from plugins.logits_processors.mirostat import Mirostat
from plugins.logits_processors.settings import MirostatParams, MirostatSettings

V = 400
NEVER = float("-inf")
T = 0.8


def make_mirostat(**values: object) -> Mirostat:
    return Mirostat(MirostatSettings(**values), LogitsProcessorContext(spec_of(V), "cpu", lambda: None))


def row_at(output: list[int], drafts: tuple[int, ...] = (), name: str = "a", temperature: float = T) -> SampledRow:
    position = len(output) + len(drafts)
    params = SamplingParams(temperature=temperature)
    return make_row(name, params, output_token_ids=list(output), draft_token_ids=drafts, position=position)


def logits_at(position: int, seed: int = 0) -> torch.Tensor:
    return make_logits(1, V, seed=1000 * seed + position) / 2.0


def step(processor: Mirostat, output: list[int], seed: int = 0, **params: float) -> torch.Tensor:
    row, logits = row_at(output), logits_at(len(output), seed)
    processor.apply(logits, [row], [processor.state(row, MirostatParams(**params))])
    return logits[0]


def shares_of(logits: torch.Tensor) -> np.ndarray:
    wide = logits.numpy().astype(np.float64) / T
    shares = np.exp(wide - wide.max())
    return shares / shares.sum()


class Naive:
    """Algorithm 2 of the paper with the bound of its implementations."""

    def __init__(self, tau: float, eta: float):
        self.bound, self.tau, self.eta = 2.0 * tau, tau, eta

    def stays(self, logits: torch.Tensor) -> set[int]:
        bits = -np.log2(shares_of(logits))
        return {int(bits.argmin()), *np.flatnonzero(bits <= self.bound).tolist()}

    def observe(self, logits: torch.Tensor, token_id: int) -> None:
        left = shares_of(logits)[sorted(self.stays(logits))]
        surprise = -math.log2(shares_of(logits)[token_id] / left.sum())
        self.bound -= self.eta * (surprise - self.tau)


@pytest.mark.parametrize(("tau", "eta"), [(5.0, 0.1), (2.0, 0.9), (0.5, 0.3), (9.0, 0.0)])
def test_a_text_equals_that_of_the_slow_twin(tau: float, eta: float) -> None:
    processor, naive, output = make_mirostat(), Naive(tau, eta), list[int]()
    numbers = np.random.default_rng(1)
    for position in range(60):
        found = step(processor, output, tau=tau, eta=eta)
        raw = logits_at(position)[0]
        stays = set(torch.nonzero(found > NEVER).flatten().tolist())
        borderline = {int(i) for i in np.flatnonzero(np.abs(-np.log2(shares_of(raw)) - naive.bound) < 1e-4)}
        assert stays ^ naive.stays(raw) <= borderline
        assert torch.equal(found[sorted(stays)], raw[sorted(stays)])
        token_id = int(numbers.choice(sorted(stays)))
        naive.observe(raw, token_id)
        output.append(token_id)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_the_surprise_of_a_text_comes_to_tau(tau: float) -> None:
    processor, output, numbers, surprises = make_mirostat(tau=tau, eta=0.3), list[int](), np.random.default_rng(2), []
    for _ in range(600):
        shares = shares_of(step(processor, output))
        output.append(int(numbers.choice(V, p=shares)))
        surprises.append(-math.log2(shares[output[-1]]))
    assert np.mean(surprises[50:]) == pytest.approx(tau, rel=0.05)


def play(processor: Mirostat, tokens: list[int], start: int = 0) -> list[torch.Tensor]:
    return [step(processor, tokens[:at], eta=0.8, tau=2.0) for at in range(start, len(tokens))]


TOKENS = [int(logits_at(at)[0].argsort(descending=True)[at % 5]) for at in range(20)]


def test_a_step_may_be_run_again() -> None:
    once, processor = play(make_mirostat(), TOKENS), make_mirostat()
    for at in range(len(TOKENS)):
        for _ in range(2):
            assert torch.equal(step(processor, TOKENS[:at], eta=0.8, tau=2.0), once[at])


def test_a_preempted_request_goes_on_with_its_bound() -> None:
    """The framework drops the state, and asks for it again with the history so far."""
    once, processor = play(make_mirostat(), TOKENS), make_mirostat()
    play(processor, TOKENS[:9])
    for at in range(9, 20):
        assert torch.equal(step(processor, TOKENS[:at], eta=0.8, tau=2.0), once[at]), (
            "step() asks for the state each time"
        )


def test_a_request_id_that_begins_anew_has_a_bound_of_its_own() -> None:
    processor = make_mirostat()
    first = play(processor, TOKENS)
    assert all(torch.equal(one, other) for one, other in zip(play(processor, TOKENS), first, strict=True))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirostat, "MAX_COURSES", 3)
    processor = make_mirostat()
    for index in range(10):
        processor.state(row_at([], name=f"r{index}"), MirostatParams())
    assert list(processor._courses) == ["r7", "r8", "r9"]
    course = processor.state(row_at([5, 6], name="r1"), MirostatParams())
    assert course is not None
    course.advance([5, 6])
    assert course.bounds == [10.0, 10.0, 10.0], "what is forgotten begins at twice tau"


def test_rows_of_drafts_are_as_if_settled() -> None:
    once, processor = play(make_mirostat(), TOKENS), make_mirostat()
    play(processor, TOKENS[:6])
    rows = [row_at(TOKENS[:6], tuple(TOKENS[6 : 6 + count])) for count in range(4)]
    logits = torch.cat([logits_at(6 + count) for count in range(4)])
    state = processor.state(rows[0], MirostatParams(eta=0.8, tau=2.0))
    wrong = [rows[0], row_at(TOKENS[:6], (TOKENS[6] + 1,))]
    processor.apply(torch.cat([logits_at(6), logits_at(7)]), wrong, [state] * 2)
    processor.apply(logits, rows, [state] * 4)
    assert all(torch.equal(logits[count], once[6 + count]) for count in range(4))


def test_a_token_that_a_grammar_added_moves_nothing() -> None:
    processor = make_mirostat()
    step(processor, [])
    step(processor, [7, 8, 9])
    course = processor._courses["a"]
    assert course.bounds[1:] == [course.bounds[1]] * 3 and len(course.left) == 1


def test_who_is_concerned() -> None:
    assert make_mirostat().state(row_at([]), None) is None
    assert make_mirostat(always=True).state(row_at([], temperature=0.0), None) is None
    found = make_mirostat(always=True, tau=3.0).state(row_at([]), None)
    assert found is not None and (found.tau, found.eta) == (3.0, 0.1)


@pytest.mark.parametrize("values", [{"tau": 0.0}, {"eta": 2.0}, {"tau": "5"}, {"mode": 2}])
def test_bad_parameters_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        parsed_params(MirostatParams, values)
