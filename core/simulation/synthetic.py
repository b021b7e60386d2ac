"""Traffic that is made up: arrivals, lengths, tenants, priorities and shared prompts, drawn from seeded generators.

Everything is drawn in chunks of columns, so a million requests take seconds. Each column has a random stream of its own:
the same seed gives the same lengths at any rate, with any number of tenants, with and without shared prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Literal

import numpy as np

from core.simulation.lengths import Lengths
from core.simulation.prompts import Prompts
from core.simulation.records import Arrival, Ints

CHUNK = 8192
LEAST_BOUND = 16  # clients do not ask for less


@dataclass(frozen=True, slots=True)
class Profile:
    """Requests of one kind."""

    name: str
    prompt: Lengths
    output: Lengths
    priority: int = 0

    def with_lengths(self, prompt: int | Lengths | None, output: int | Lengths | None) -> Profile:
        """None: as it is; a number: all of that length."""
        return replace(self, prompt=_lengths(prompt, self.prompt), output=_lengths(output, self.output))


@dataclass(frozen=True, slots=True)
class Shape:
    """What all kinds of traffic have in common."""

    rate: float  # requests per second
    num_requests: int | None  # None: as many as there are
    cv: float = 1.0
    seed: int = 0
    bound: Literal["exact", "power_of_two"] | int = "exact"
    ttl_s: float | None = None
    tenant_shares: tuple[float, ...] = (1.0,)
    priority_shares: tuple[float, ...] | None = None  # None: the kind's own
    system_prompts: int = 0
    system_prompt_len: int = 512
    followups: float = 0.0
    think_s: float = 0.0


class Streams:
    """Independent random streams of one seed, one per column. A new column goes to the end."""

    def __init__(self, seed: int):
        spawned = [np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(7)]
        self.gap, self.kind, self.prompt, self.output, self.tenant, self.priority, self.content = spawned


class Synthetic:
    """A `core.simulation.records.Traffic`: `profiles` mixed by `shares`."""

    def __init__(self, shape: Shape, profiles: Sequence[Profile], shares: Sequence[float] = (1.0,)):
        self._shape = shape
        self._profiles = profiles
        self._shares = np.asarray(shares, np.float64) / sum(shares)

    @property
    def shares_content(self) -> bool:
        return bool(self._shape.system_prompts or self._shape.followups)

    def __iter__(self) -> Iterator[Arrival]:
        streams = Streams(self._shape.seed)
        arrivals = islice(self._arrivals(streams), self._shape.num_requests)
        return iter(with_content(arrivals, self._shape, streams) if self.shares_content else arrivals)

    def _arrivals(self, streams: Streams) -> Iterator[Arrival]:
        shape, now = self._shape, 0.0
        while True:
            times = now + np.cumsum(gaps(shape.cv, streams.gap, CHUNK)) / shape.rate
            now = float(times[-1])
            kinds = streams.kind.choice(len(self._profiles), CHUNK, p=self._shares)
            prompts = self._drawn([p.prompt for p in self._profiles], kinds, streams.prompt)
            bounds, outputs = bounded(
                self._drawn([p.output for p in self._profiles], kinds, streams.output), shape.bound
            )
            columns = (times, prompts, outputs, bounds)
            tenants = self._tenants(kinds, streams)
            priorities = self._priorities(kinds, streams)
            yield from map(Arrival, *(c.tolist() for c in columns), tenants, priorities, repeat(shape.ttl_s))

    def _drawn(self, lengths: Sequence[Lengths], kinds: Ints, rng: np.random.Generator) -> Ints:
        """[CHUNK] lengths: one normal score each, whatever its kind."""
        scores = rng.standard_normal(len(kinds))
        return np.choose(kinds, [one.at(scores) for one in lengths])

    def _tenants(self, kinds: Ints, streams: Streams) -> list[str]:
        """The only tenant is called by the kind of its requests, where there are several kinds."""
        if len(self._shape.tenant_shares) == 1 and len(self._profiles) > 1:
            return [self._profiles[kind].name for kind in kinds.tolist()]
        return tenant_names(self._shape.tenant_shares, streams.tenant, len(kinds))

    def _priorities(self, kinds: Ints, streams: Streams) -> list[int]:
        if self._shape.priority_shares is not None:
            return drawn_priorities(self._shape.priority_shares, streams.priority, len(kinds))
        return [self._profiles[kind].priority for kind in kinds.tolist()]


def gaps(cv: float, rng: np.random.Generator, num: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[num] gaps of mean 1 between arrivals: Gamma distributed, which with cv = 1 is a Poisson process."""
    if cv == 0:
        return np.ones(num)
    if cv == 1:
        return rng.standard_exponential(num)
    return rng.gamma(1 / cv**2, cv**2, num)


def bounded(outputs: Ints, bound: Literal["exact", "power_of_two"] | int) -> tuple[Ints, Ints]:
    """(max_tokens, outputs): what clients ask for, and what they then get."""
    if bound == "exact":
        return outputs, outputs
    if bound == "power_of_two":
        powers = np.exp2(np.ceil(np.log2(outputs))).astype(np.int64)
        return np.maximum(powers, LEAST_BOUND), outputs
    return np.full_like(outputs, bound), np.minimum(outputs, bound)


def tenant_names(shares: Sequence[float], rng: np.random.Generator, num: int) -> list[str]:
    """t0, t1, …: each request's tenant by chance, in these shares."""
    names = [f"t{index}" for index in range(len(shares))]
    if len(names) == 1:
        return names * num
    return [names[index] for index in rng.choice(len(names), num, p=_normalised(shares)).tolist()]


def drawn_priorities(shares: Sequence[float], rng: np.random.Generator, num: int) -> list[int]:
    found: list[int] = rng.choice(len(shares), num, p=_normalised(shares)).tolist()
    return found


def with_content(arrivals: Iterable[Arrival], shape: Shape, streams: Streams) -> Iterable[Arrival]:
    return Prompts(
        arrivals,
        streams.content,
        num_system_prompts=shape.system_prompts,
        system_prompt_len=shape.system_prompt_len,
        followups=shape.followups,
        think_s=shape.think_s,
    )


def _lengths(given: int | Lengths | None, own: Lengths) -> Lengths:
    return own if given is None else Lengths.of(given) if isinstance(given, int) else given


def _normalised(shares: Sequence[float]) -> list[float]:
    return [share / sum(shares) for share in shares]
