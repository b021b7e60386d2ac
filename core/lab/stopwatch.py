"""What a pipeline's parts take per step, watched from outside, with the watching itself taken off."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from core.stages.logits_processor import LogitsChain

CALIBRATION_CALLS = 2000


@dataclass(slots=True)
class Counter:
    """Seconds and calls of one function since the last `take`."""

    seconds: float = 0.0
    calls: int = 0

    def timed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter

        def call(*args: Any) -> Any:
            started = clock()
            try:
                return fn(*args)
            finally:
                self.seconds += clock() - started
                self.calls += 1

        return call

    def take(self) -> tuple[float, int]:
        taken, self.seconds, self.calls = (self.seconds, self.calls), 0.0, 0
        return taken


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that watching adds: to what is counted by a call itself (`own_s`), and to a call around it (`around_s`)."""

    own_s: float
    around_s: float

    @classmethod
    def measured(cls) -> Overhead:
        inner, outer = Counter(), Counter()
        call = outer.timed(inner.timed(lambda: None))
        own, around = [], []
        for _ in range(CALIBRATION_CALLS):
            call()
            own.append(inner.take()[0])
            around.append(outer.take()[0] - own[-1])
        return cls(median(own), median(around))


@dataclass(frozen=True, slots=True)
class ChainStep:
    """What a chain took in one step, in seconds."""

    chain_s: float  # beside the processors' own arithmetic
    processors_s: float


@dataclass(slots=True)
class ChainWatch:
    """Times a chain's calls from outside and its processors' inside, step by step. A step begins with `touches`."""

    overhead: Overhead
    steps: list[ChainStep] = field(default_factory=list)
    _chain: Counter = field(default_factory=Counter)
    _own: Counter = field(default_factory=Counter)

    def watch(self, chain: LogitsChain) -> None:
        for member in getattr(chain, "_members", ()):
            member.processor = _Timed(member.processor, self._own)
        touches, apply = self._chain.timed(chain.touches), self._chain.timed(chain.apply)

        def touches_first(*args: Any) -> Any:
            self._end_step()
            return touches(*args)

        for name, method in (("touches", touches_first), ("apply", apply)):
            setattr(chain, name, method)

    def _end_step(self) -> None:
        (chain_s, num_calls), (own_s, num_own) = self._chain.take(), self._own.take()
        if num_calls:
            # what the wrapper of `apply` and `touches` counts of itself, and all that those inside add
            beside = chain_s - own_s - num_calls * self.overhead.own_s - num_own * self.overhead.around_s
            self.steps.append(ChainStep(max(beside, 0.0), max(own_s - num_own * self.overhead.own_s, 0.0)))


class _Timed:
    """A logits processor whose arithmetic is timed."""

    def __init__(self, processor: Any, counter: Counter):
        self.state = processor.state
        self.apply = counter.timed(processor.apply)
