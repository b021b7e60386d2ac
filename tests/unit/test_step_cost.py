"""What an engine step takes, learnt from steps: exact where the world is linear, sound where it is not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.simulation.cost import Work
from core.simulation.least_squares import non_negative
from core.stages.step_cost import StepCost, StepTime, _not_negative, attended

TRUTH = (0.004, 2e-5, 3e-4, 1e-8)  # fixed, per prefill token, per decode, per attended position


def true_seconds(num_prefill: int, num_decodes: int, num_attended: int) -> float:
    return sum(term * value for term, value in zip(TRUTH, (1, num_prefill, num_decodes, num_attended), strict=True))


def random_step(rng: random.Random, noise: float = 0.0) -> StepTime:
    num_prefill = rng.choice([0, 0, rng.randint(1, 1024)])
    num_decodes, num_attended = rng.randint(0, 64), attended(rng.randrange(8192), num_prefill) if num_prefill else 0
    seconds = true_seconds(num_prefill, num_decodes, num_attended) * (1 + rng.uniform(-noise, noise))
    return StepTime(num_prefill, num_decodes, seconds, num_attended)


def taught(steps: list[StepTime]) -> StepCost:
    cost = StepCost()
    for step in steps:
        cost.observe(step)
    return cost


def test_attended_is_the_sum_over_tokens() -> None:
    for start, count in ((0, 1), (0, 5), (7, 1), (100, 33)):
        assert attended(start, count) == sum(position + 1 for position in range(start, start + count))


def test_a_linear_world_is_known_after_forty_steps() -> None:
    rng = random.Random(1)
    cost = taught([random_step(rng) for _ in range(40)])
    for _ in range(20):
        step = random_step(rng)
        found = cost.seconds(step.num_prefill_tokens, step.num_decodes, step.num_attended)
        assert found == pytest.approx(step.seconds, rel=0.01)


def test_noise_and_hiccups_move_it_little() -> None:
    rng = random.Random(2)
    steps = [random_step(rng, noise=0.1) for _ in range(400)]
    for index in range(50, 400, 45):
        steps[index] = StepTime(steps[index].num_prefill_tokens, 8, 30.0, steps[index].num_attended)
    cost = taught(steps)
    for num_prefill, num_decodes in ((0, 16), (256, 16), (512, 0), (1024, 64)):
        expected = true_seconds(num_prefill, num_decodes, attended(1000, num_prefill))
        assert cost.seconds(num_prefill, num_decodes, attended(1000, num_prefill)) == pytest.approx(expected, rel=0.35)


def test_a_thousand_decodes_do_not_make_it_forget_prompts() -> None:
    rng = random.Random(3)
    steps = [random_step(rng) for _ in range(60)]
    cost = taught(steps + [StepTime(0, 16, true_seconds(0, 16, 0)) for _ in range(1000)])
    expected = true_seconds(512, 16, attended(4000, 512))
    assert cost.seconds(512, 16, attended(4000, 512)) == pytest.approx(expected, rel=0.05)


def test_it_follows_a_machine_that_became_slower() -> None:
    rng = random.Random(4)
    slow = [
        StepTime(step.num_prefill_tokens, step.num_decodes, 2 * step.seconds, step.num_attended)
        for step in (random_step(rng) for _ in range(300))
    ]
    cost = taught([random_step(rng) for _ in range(300)] + slow)
    assert cost.seconds(512, 16, 0) == pytest.approx(2 * true_seconds(512, 16, 0), rel=0.1)


def test_no_term_is_negative_whatever_it_sees() -> None:
    rng = random.Random(5)
    for _ in range(50):
        cost = taught(
            [
                StepTime(
                    rng.randrange(600), rng.randrange(20), rng.choice([1e-9, 1e-3, 1.0, 1e9]), rng.randrange(10**6)
                )
                for _ in range(12)
            ]
        )
        assert all(term >= 0 for term in cost._fitted())


def test_the_tokens_that_fit_are_those_whose_seconds_do() -> None:
    rng = random.Random(6)
    cost = taught([random_step(rng) for _ in range(60)])
    for start in (0, 500, 8000, 100_000):
        for room in (0.001, 0.01, 0.1):
            found = cost.num_tokens_in(room, start)
            assert found is not None
            base = cost.seconds(0, 0, 0)
            assert cost.seconds(found, 0, attended(start, found)) - base <= room * 1.001 + 1e-5
            assert cost.seconds(found + 2, 0, attended(start, found + 2)) - base > room * 0.999
    assert cost.num_tokens_in(0.0, 0) == 0 and cost.num_tokens_in(-1.0, 0) == 0


def test_pairs_of_a_simulated_chunk_are_the_attended_positions() -> None:
    work = Work()
    for start, count in ((0, 5), (7, 1), (100, 33)):
        work.add_chunk(start, count)
    assert work.num_pairs == sum(attended(*chunk) for chunk in ((0, 5), (7, 1), (100, 33)))


def test_its_terms_are_those_of_the_exhaustive_twin() -> None:
    """Where the worst term goes first the optimum is not always met: its error is never below, and hardly above."""
    rng = np.random.default_rng(7)
    for _ in range(300):
        rows = np.abs(rng.normal(size=(12, 4))) * rng.choice([1.0, 100.0], 4)
        truth = np.maximum(rng.normal(size=4), 0.0)
        targets = rows @ truth + rng.normal(scale=0.3, size=12)
        found = np.array(_not_negative((rows.T @ rows).tolist(), (rows.T @ targets).tolist()))
        best = non_negative(rows, targets)
        errors = [float(np.square(rows @ terms - targets).sum()) for terms in (found, best)]
        assert (found >= 0).all()
        assert errors[1] - 1e-6 <= errors[0] <= 1.05 * errors[1] + 1e-6
