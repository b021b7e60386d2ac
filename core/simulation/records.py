"""Records of the simulator: what arrives, what became of it, and what the steps added up to.

A traffic source is a `Traffic`: arrivals in time order, made one by one as they are asked for. A run gives a `RunResult`,
columns of numbers that a report reads. All times are seconds of the simulated clock, which starts at 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """One request as a client sends it, with the number of tokens that it will turn out to generate.

    `block_hashes`: the content of the prompt where it is shared with others, one number for each `hash_block_size` tokens of
    it, the last one for what is left. Equal numbers at equal places mean equal prompts up to there (Mooncake's hash ids).
    Empty: a prompt like no other.
    """

    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int  # the truth: at least 1
    max_tokens: int = 0  # the bound that the client sent; 0: the truth
    tenant: str = ""
    priority: int = 0  # lower runs first
    ttl_s: float | None = None  # not scheduled so long after arrival: it expires
    block_hashes: tuple[int, ...] = ()
    hash_block_size: int = 512


class Traffic(Protocol):
    """A source of arrivals. Iterating starts anew, and gives the same arrivals each time."""

    @property
    def shares_content(self) -> bool:
        """Whether any arrival has block hashes; without, nothing is looked up in the prefix cache."""
        ...

    def __iter__(self) -> Iterator[Arrival]:
        """In order of `time_s`."""
        ...


class Finish(IntEnum):
    """What became of a request."""

    SERVED = 0
    REFUSED = 1  # by admission: 503
    EXPIRED = 2  # not scheduled within its ttl: 503 too
    ERROR = 3  # it can never run, or the scheduler gave it up


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One row per request, in order of arrival. A moment that never came is NaN."""

    arrival_s: Floats
    scheduled_s: Floats  # first time in a step
    first_token_s: Floats
    end_s: Floats  # also of refused and expired ones: when they were told
    num_prompt_tokens: Ints
    num_output_tokens: Ints  # generated
    num_cached_tokens: Ints  # prompt tokens found in the prefix cache
    num_preemptions: Ints
    finish: Ints  # values of Finish
    tenant: Ints  # indices into `tenants`
    tenants: tuple[str, ...]
    solo_s: Floats | None = (
        None  # what the request would take on an idle machine, by the same cost model; NaN: not served
    )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def served(self) -> NDArray[np.bool_]:
        return np.equal(self.finish, int(Finish.SERVED))

    @property
    def ttft_s(self) -> Floats:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Time per output token after the first; NaN for a single one."""
        gaps = (self.num_output_tokens - 1).astype(np.float64)
        found: Floats = np.divide(self.end_s - self.first_token_s, gaps, out=np.full(len(self), np.nan), where=gaps > 0)
        return found

    @property
    def e2e_s(self) -> Floats:
        return self.end_s - self.arrival_s


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps. KV is in token slots times seconds: `kv_used` of the `kv_allocated` ones held a token."""

    num_steps: int = 0  # model iterations
    num_plans: int = 0  # calls of the scheduler; fewer, with a stride
    busy_s: float = 0.0  # simulated seconds within steps
    num_prefill_tokens: int = 0  # computed; those that are computed again count again
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    running_s: float = 0.0  # running requests times seconds: over busy_s, the mean batch
    kv_allocated_s: float = 0.0
    kv_used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The state at moments of the run, about evenly spaced; a few hundred rows however long the run."""

    time_s: Floats
    running: Ints
    waiting: Ints
    kv_used: Floats  # share of the pool's blocks that are held


@dataclass(frozen=True, slots=True)
class RunResult:
    """A whole run."""

    outcomes: Outcomes
    steps: StepTotals
    timeline: Timeline
    simulated_s: float  # from 0 to the end of the last request
    wall_s: float  # of this machine
    num_kv_slots: int  # tokens that the pool holds
    reasons: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by Finish's name: why requests ended so
    left_out: Mapping[str, int] = field(default_factory=dict)  # rows of a trace that are no requests, by why

    @property
    def kv_waste(self) -> float:
        """Share of the allocated KV slots that held no token, over time."""
        allocated = self.steps.kv_allocated_s
        return 1.0 - self.steps.kv_used_s / allocated if allocated else 0.0

    @property
    def mean_running(self) -> float:
        return self.steps.running_s / self.steps.busy_s if self.steps.busy_s else 0.0
