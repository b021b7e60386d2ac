"""Sampling fields that the terminal frontends offer, with their bounds, and the SamplingParams they make."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from core.request import SamplingParams


class SamplingFields(BaseModel):
    """A client-side subset of `core.request.SamplingParams`, under the same names."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    max_tokens: int | None = Field(default=None, ge=1, description="null: what is left of the context")
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=10)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    seed: int | None = None
    n: int = Field(default=1, ge=1, le=16)
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(default=None, ge=0, le=20)
    logits_processors: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="what a request sends to logits processors, by name: {dry: {multiplier: 0.8}}"
    )

    def params(self) -> SamplingParams:
        values: dict[str, Any] = {name: getattr(self, name) for name in SamplingFields.model_fields}
        values["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        values.pop("max_tokens")  # admission resolves it from GenerateRequest.max_tokens
        values["extra"] = values.pop("logits_processors")
        return SamplingParams(**values)
