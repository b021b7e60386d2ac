"""What steps cost, and how that is fitted."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from core.errors import ConfigError
from core.simulation.cost import BUILT_IN, TERMS, CostModel, Seconds, StepClock, Work, load_cost
from core.simulation.least_squares import fitted, non_negative

SECONDS = BUILT_IN["cpu"].seconds


def some_works(count: int) -> list[Work]:
    rng, works = np.random.default_rng(0), []
    for _ in range(count):
        work = Work()
        for _ in range(rng.integers(0, 4)):
            work.add_chunk(int(rng.integers(0, 2000)), int(rng.integers(1, 512)))
        for _ in range(rng.integers(0 if work.num_chunks else 1, 30)):
            work.add_decode(int(rng.integers(1, 4000)))
        works.append(work)
    return works


def test_a_step_is_the_sum_of_its_terms() -> None:
    terms = np.array([getattr(SECONDS, term) for term in TERMS])
    for work in some_works(20):
        assert StepClock(SECONDS).of(work) == pytest.approx(float(terms @ work.features()))


def test_pairs_are_those_that_a_causal_mask_leaves() -> None:
    work = Work()
    work.add_chunk(3, 4)
    assert work.num_pairs == 4 + 5 + 6 + 7


def test_steps_in_a_row_are_single_steps_one_after_the_other() -> None:
    """The slow twin adds each step up anew."""
    starts = {100: 3, 250: 5, 40: 5, 7: 1}  # where a decode began -> steps that it takes part in
    first, leaving = Work(), dict[int, list[int]]()
    for start, count in starts.items():
        first.add_decode(start)
        leaving.setdefault(count, []).append(start)
    single = []
    for index in range(5):
        work = Work()
        for start, count in starts.items():
            if index < count:
                work.add_decode(start + index)
        single.append(StepClock(SECONDS).of(work))
    assert StepClock(SECONDS).of_steps(first, 5, leaving) == pytest.approx(list(itertools.accumulate(single)))


def test_a_fit_finds_the_terms_again_through_noise_and_hiccups() -> None:
    rng = np.random.default_rng(1)
    features = np.array([work.features() for work in some_works(400)])
    truth = np.array([getattr(SECONDS, term) for term in TERMS])
    seconds = features @ truth * rng.normal(1, 0.01, len(features))
    seconds[::25] *= 5  # the machine did something else
    found = fitted(features, seconds)
    assert features @ found == pytest.approx(features @ truth, rel=0.03)
    for term in ("step", "prefill_token", "decode", "decode_context"):
        index = TERMS.index(term)
        assert found[index] == pytest.approx(truth[index], rel=0.1), term


def test_terms_are_never_negative() -> None:
    """Without the bound the second term would be negative; the best non-negative one is then 0, and the first alone fits."""
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(rows, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative(rows, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])
    assert non_negative(rows, np.array([-1.0, -1.0, -1.0])).tolist() == [0.0, 0.0]


def test_a_cost_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    cost = CostModel(about="here", seconds=Seconds(step=0.5), num_kv_slots=64, fit={"steps": 3})
    path.write_text(cost.model_dump_json(), encoding="utf-8")
    assert load_cost(str(path)) == cost


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cost=.*: not JSON"),
        ('{"seconds": {"stepp": 1}}', r"cost=.*cost\.json: unknown key 'seconds.stepp'; did you mean step"),
        ('{"seconds": {"step": -1}}', r"cost=.*cost\.json: seconds\.step: Input should be"),
        ("[1]", r"cost=.*cost\.json: it holds keys of its own \(got \[1\]\)"),
        ("{}", r"cost=.*cost\.json: seconds: it must be set"),
    ],
)
def test_a_wrong_cost_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        load_cost(str(path))


def test_a_missing_cost_file_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"cost=gpuu: no such file; did you mean gpu, cpu\?") as caught:
        load_cost("gpuu")
    assert caught.value.key == "cost"
