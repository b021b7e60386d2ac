"""Prompts that share their beginning: system prompts, and conversations whose next turn repeats the turns before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice

import msgspec
import numpy as np

from core.simulation.records import Arrival

BLOCK = 64  # tokens per content number: sharing is cut down to a multiple of it
NUM_LIVE = 512  # conversations that may be continued: the latest ones
CHUNK = 8192


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request that was sent, and the answer to it, as the next turn would repeat them."""

    time_s: float
    num_tokens: int
    blocks: tuple[int, ...]  # of the whole blocks in num_tokens


class Prompts:
    """Gives arrivals their content; lengths and times stay as they are, and so do their statistics.

    A follow-up repeats the longest earlier conversation that fits its length; where none does, it begins a new one.
    System prompts are chosen with weights 1, 1/2, 1/3 …; a prompt shorter than a system prompt has the head of it.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        rng: np.random.Generator,
        *,
        num_system_prompts: int,
        system_prompt_len: int,
        followups: float,
        think_s: float,
    ):
        self._arrivals = arrivals
        self._rng = rng
        self._followups = followups
        self._think_s = think_s
        self._fresh = count()
        per_prompt = system_prompt_len // BLOCK
        self._system = [tuple(islice(self._fresh, per_prompt)) for _ in range(num_system_prompts)]
        self._weights = 1 / np.arange(1, num_system_prompts + 1)
        self._live: deque[Conversation] = deque(maxlen=NUM_LIVE)

    def __iter__(self) -> Iterator[Arrival]:
        for arrival, chance, system in zip(self._arrivals, self._chances(), self._choices(), strict=False):
            head = self._earlier(arrival) if chance < self._followups else ()
            yield self._filled(arrival, head or (self._system[system] if self._system else ()))

    def _filled(self, arrival: Arrival, head: tuple[int, ...]) -> Arrival:
        num_prompt, num_all = arrival.num_prompt_tokens, arrival.num_prompt_tokens + arrival.num_output_tokens
        shared = head[: num_prompt // BLOCK]
        blocks = (*shared, *islice(self._fresh, -(-num_prompt // BLOCK) - len(shared)))
        if self._followups:
            whole = blocks[: num_prompt // BLOCK]
            answered = (*whole, *islice(self._fresh, num_all // BLOCK - len(whole)))
            self._live.append(Conversation(arrival.time_s, num_all, answered))
        return msgspec.structs.replace(arrival, block_hashes=blocks, hash_block_size=BLOCK)

    def _earlier(self, arrival: Arrival) -> tuple[int, ...]:
        """The blocks of a conversation to continue, which then is over: its next turn continues this one."""
        latest = arrival.time_s - self._think_s
        fitting = (c for c in self._live if c.time_s <= latest and c.num_tokens < arrival.num_prompt_tokens)
        found = max(fitting, key=lambda c: c.num_tokens, default=None)
        if found is None:
            return ()
        self._live.remove(found)
        return found.blocks

    def _chances(self) -> Iterator[float]:
        while True:
            yield from self._rng.random(CHUNK).tolist()

    def _choices(self) -> Iterator[int]:
        """Indices of system prompts; zeros where there are none."""
        num = len(self._system)
        weights = self._weights / self._weights.sum() if num else None
        while True:
            yield from self._rng.choice(max(num, 1), CHUNK, p=weights).tolist()
