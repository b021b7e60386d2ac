"""How long an engine step takes, learnt from the steps that were: seconds as a sum of what was in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FORGET = 0.97  # per step of a kind: the last thirty count
OFF = 3.0  # times longer or shorter than expected: a step that is further off counts as one that is so far
LEAST_S, MOST_S = 1e-6, 3600.0  # what a step can take
RIDGE = 1e-6  # of a term's own weight; settles what the steps so far cannot tell apart
SETTLED_AFTER = 8  # steps, before which none is called an exception


@dataclass(frozen=True, slots=True)
class StepTime:
    """What an engine step ran, and how long it took."""

    num_prefill_tokens: int
    num_decodes: int  # tokens of requests that are past their prompt: one each, and drafts
    seconds: float
    num_attended: int = 0  # positions that the prefill tokens attend to, added up over the tokens


def attended(start: int, num_tokens: int) -> int:
    """Positions that tokens [start, start + num_tokens) attend to, added up: each to itself and all before it."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class Sums:
    """Weighted sums of a least-squares fit, in which old rows fade."""

    def __init__(self, size: int):
        self.products = [[0.0] * size for _ in range(size)]
        self.targets = [0.0] * size
        self.count = 0

    def add(self, row: Sequence[float], target: float) -> None:
        """Errors count in relation to the target: a tenth too much is as bad for a short step as for a long one."""
        weight = 1.0 / (target * target)
        self.count += 1
        for line, left in zip(self.products, row, strict=True):
            for column, right in enumerate(row):
                line[column] = line[column] * FORGET + weight * left * right
        self.targets = [old * FORGET + weight * value * target for old, value in zip(self.targets, row, strict=True)]


class StepCost:
    """seconds = fixed + per prefill token + per decode + per attended position, none of them negative.

    Steps with and without prefill tokens fade apart: an hour of decodes does not make it forget what a prompt costs.
    Costs some microseconds per step.
    """

    def __init__(self) -> None:
        self._kinds = {False: Sums(4), True: Sums(4)}  # by whether there were prefill tokens
        self._terms: tuple[float, ...] | None = None  # None: to be fitted anew

    @property
    def is_known(self) -> bool:
        """Whether steps with prefill tokens have been seen, more than one."""
        return self._kinds[True].count > 1

    def observe(self, step: StepTime) -> None:
        """Steps that took no time, or no number of seconds, say nothing."""
        if not (math.isfinite(step.seconds) and step.seconds > 0):
            return
        seconds = min(max(step.seconds, LEAST_S), MOST_S)
        if self.is_known and sum(sums.count for sums in self._kinds.values()) > SETTLED_AFTER:
            expected = self.seconds(step.num_prefill_tokens, step.num_decodes, step.num_attended)
            seconds = min(max(seconds, expected / OFF), max(expected * OFF, LEAST_S))
        row = (1.0, float(step.num_prefill_tokens), float(step.num_decodes), float(step.num_attended))
        self._kinds[step.num_prefill_tokens > 0].add(row, seconds)
        self._terms = None

    def seconds(self, num_prefill_tokens: int, num_decodes: int, num_attended: int) -> float:
        """What a step is expected to take. Of use once `is_known`."""
        fixed, per_token, per_decode, per_position = self._fitted()
        return fixed + per_token * num_prefill_tokens + per_decode * num_decodes + per_position * num_attended

    def num_tokens_in(self, seconds: float, start: int) -> int | None:
        """How many tokens of a prompt from position `start` add at most so many seconds to a step; None: any number."""
        _, per_token, _, per_position = self._fitted()
        linear, square = per_token + per_position * start, per_position / 2
        if seconds <= 0:
            return 0
        if linear <= 0 and square <= 0:
            return None
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)))

    def _fitted(self) -> tuple[float, ...]:
        if self._terms is None:
            one, other = self._kinds.values()
            products = [
                [a + b for a, b in zip(*lines, strict=True)] for lines in zip(one.products, other.products, strict=True)
            ]
            targets = [a + b for a, b in zip(one.targets, other.targets, strict=True)]
            self._terms = _not_negative(products, targets)
        return self._terms


def _not_negative(products: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[float, ...]:
    """Least squares; a term that would be negative is left out, the worst first, and the others are fitted again.

    Some microseconds; the exhaustive `core.simulation.least_squares.non_negative` is its slow twin in the tests.
    """
    used = [term for term in range(len(targets)) if products[term][term] > 0]
    found = [0.0] * len(targets)
    while used:
        lines = [[products[i][j] * (1 + RIDGE * (i == j)) for j in used] + [targets[i]] for i in used]
        values = _solved(lines)
        worst = min(range(len(used)), key=lambda at: values[at] * math.sqrt(products[used[at]][used[at]]))
        if values[worst] >= 0:
            for term, value in zip(used, values, strict=True):
                found[term] = value
            break
        del used[worst]
    return tuple(found)


def _solved(lines: list[list[float]]) -> list[float]:
    """Gauss: `lines` are the coefficients with the right side last. Positive definite, so no line has to be moved."""
    size = len(lines)
    for at in range(size):
        pivot = lines[at][at]
        lines[at] = [value / pivot for value in lines[at]]
        for other in range(size):
            if other != at:
                factor = lines[other][at]
                lines[other] = [a - factor * b for a, b in zip(lines[other], lines[at], strict=True)]
    return [line[size] for line in lines]
