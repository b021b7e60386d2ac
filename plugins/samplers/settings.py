"""Settings of the built-in samplers. Torch-free, so that a config can be checked before a model is loaded."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GreedySettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StandardSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk_mib: int = Field(default=8, ge=1, le=4096)  # bound of one [rows, V] float32 temporary; near the caches
    first_candidates: int = Field(default=256, ge=1, le=65536)  # tried first for a top_p under 0.5 alone
