"""Whether each position's logits are the same to the last bit, whatever is computed beside them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from torch import Tensor

from core.lab.shown_logits import shown_logits
from core.stages.frontend import GenerateRequest
from core.testing.harness.pipelines import call

Digests = dict[str, list[bytes]]
"""By call: of the logits of each position of its prompt, then of each token that it generates."""
NUM_BLOCKS = "cache.num_blocks=600"
LENGTHS = (3, 90, 17, 200, 31, 64, 5, 48, 150, 80, 9, 230, 33, 16, 120, 65)  # of the prompts, in tokens


class RowDigests:
    """Takes logits as they come."""

    def __init__(self) -> None:
        self.found: defaultdict[str, list[bytes]] = defaultdict(list)

    def take(self, name: str, logits: Tensor) -> None:
        rows = logits.float().contiguous().numpy()
        self.found[name] += [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def calls_of(ids: Sequence[int], num_tokens: int, start: Sequence[int] = ()) -> list[GenerateRequest]:
    """Sixteen, each with a piece of its own of `ids`; half of them are greedy, half draw with a seed."""
    made = []
    for index, (length, end) in enumerate(zip(LENGTHS, accumulate(LENGTHS), strict=True)):
        params: dict[str, Any] = {"temperature": 0.0} if index % 2 else {"temperature": 1.0, "seed": index}
        prompt = [*start, *ids[end - length : end]]
        made.append(call(f"r{index}", prompt, num_tokens, prompt_logprobs=0, logprobs=0, **params))
    return made


async def alone(overrides: Sequence[str], calls: Sequence[GenerateRequest]) -> Digests:
    """Of calls that have the engine to themselves, one after the other."""
    digests = RowDigests()
    async with shown_logits([*overrides, NUM_BLOCKS], digests.take) as pipeline:
        await pipeline.answer_each(calls)
    return dict(digests.found)


async def together(overrides: Sequence[str], calls: Sequence[GenerateRequest], seed: int) -> Digests:
    """Of the same calls at once, in another order."""
    digests, shuffled = RowDigests(), list(calls)
    random.Random(seed).shuffle(shuffled)
    async with shown_logits([*overrides, NUM_BLOCKS], digests.take) as pipeline:
        await pipeline.answer_all(shuffled)
    return dict(digests.found)


def num_different(ours: Digests, others: Digests) -> int:
    """Positions whose logits are not the same, or that only one side has."""
    return sum(
        sum(one != other for one, other in zip(ours.get(name, []), others.get(name, []), strict=False))
        + abs(len(ours.get(name, [])) - len(others.get(name, [])))
        for name in ours.keys() | others.keys()
    )
