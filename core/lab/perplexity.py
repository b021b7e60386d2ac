"""Perplexity of a text through the whole engine, by the log-probabilities that it gives for prompts.

The text is cut into chunks of equal length, each a prompt of its own and scored from its second token: no token is judged without
a context, and none has more than a chunk. Two ways of computing are compared chunk by chunk, so that what makes one chunk harder
than another is in neither's favour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Self

from core.lab.shown_logits import PATIENT, runs_native_code
from core.testing.harness.pipelines import Answered, call, running

CHUNK = 1024  # tokens
AT_ONCE = 4  # chunks that share steps
STEP_TOKENS = "scheduler.max_num_scheduled_tokens=512"  # a step's logits are [512, V] float32 at most
SURE = 1.96  # standard errors, of 95 %


def chunks_of(ids: Sequence[int], size: int, start: Sequence[int] = ()) -> list[list[int]]:
    """Whole ones of `size` tokens in all, each behind the ids of `start`; what is left over is dropped."""
    own = size - len(start)
    if own < 2:
        raise ValueError(f"a chunk of {size} tokens has nothing to score")
    return [[*start, *ids[at : at + own]] for at in range(0, len(ids) - own + 1, own)]


def loss(logprobs: Iterable[float]) -> float:
    """Mean negative log-probability, in nats."""
    return -fmean(logprobs)


@dataclass(frozen=True, slots=True)
class Rise:
    """By what share one perplexity lies above another, and how sure that is (95 %)."""

    share: float
    margin: float

    def __str__(self) -> str:
        return f"{self.share:+.3%} ± {self.margin:.3%}"


@dataclass(frozen=True, slots=True)
class Scores:
    """Losses of chunks of equal length, in nats per token."""

    losses: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(fmean(self.losses))

    def first(self, count: int) -> Self:
        return type(self)(self.losses[:count])

    def rise_over(self, base: Scores) -> Rise:
        """Of the same chunks. The margin is that of the mean difference, 0 where there is one chunk."""
        differences = [own - other for own, other in zip(self.losses, base.losses, strict=True)]
        spread = stdev(differences) if len(differences) > 1 else 0.0
        ratio = math.exp(fmean(differences))
        return Rise(ratio - 1, ratio * SURE * spread / math.sqrt(len(differences)))


@dataclass(frozen=True, slots=True)
class Scored:
    scores: Scores
    is_native: bool  # compiled code ran the model


async def score(overrides: Sequence[str], chunks: Sequence[Sequence[int]]) -> Scored:
    """Raises RuntimeError where an answer has not a log-probability for each token but the first."""
    num_blocks = AT_ONCE * (max(map(len, chunks)) // 16 + 2)
    losses: list[float] = []
    async with running(*overrides, PATIENT, STEP_TOKENS, f"cache.num_blocks={num_blocks}") as pipeline:
        for first in range(0, len(chunks), AT_ONCE):
            group = chunks[first : first + AT_ONCE]
            calls = [call(f"c{first + at}", ids, 1, prompt_logprobs=0) for at, ids in enumerate(group)]
            answers = await pipeline.answer_all(calls)
            losses += [_loss(answer, ids) for answer, ids in zip(answers, group, strict=True)]
        return Scored(Scores(tuple(losses)), runs_native_code(pipeline))


def _loss(answer: Answered, ids: Sequence[int]) -> float:
    found = answer.prompt_logprobs or ()
    if [one.token_id for one in found] != list(ids[1:]):
        raise RuntimeError(f"{len(found)} log-probabilities for a prompt of {len(ids)} tokens, or of other tokens")
    return loss(one.logprob for one in found)
