"""Synthetic workloads: seeded random token ids, so that every run and every machine sees the same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from core.model.spec import ModelSpec


class FixedLengths(BaseModel):
    """`num_requests` prompts of `input_len` tokens, each answered with `output_len` tokens. Lengths in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    num_requests: int = Field(default=16, ge=1, le=100_000)
    input_len: int = Field(default=128, ge=1)
    output_len: int = Field(default=64, ge=1)
    concurrency: int = Field(default=16, ge=1, le=4096, description="requests in flight at once (closed loop)")
    seed: int = 0
    warmup: int = Field(default=1, ge=0, description="requests that are run first and not counted")


@dataclass(frozen=True, slots=True)
class WorkItem:
    prompt_token_ids: list[int]
    output_len: int


def fixed_lengths(settings: FixedLengths, model: ModelSpec) -> list[WorkItem]:
    """Ids are drawn from what the model may sample, special tokens left out by drawing from the middle of the vocabulary."""
    draw = random.Random(settings.seed)
    low, high = model.vocab_size // 10, model.vocab_size * 9 // 10
    return [
        WorkItem([draw.randrange(low, high) for _ in range(settings.input_len)], settings.output_len)
        for _ in range(settings.num_requests + settings.warmup)
    ]
