"""Settings of the terminal chat, apart from it so that a config is checked without its line editor."""

from __future__ import annotations

from pydantic import Field, field_validator

from plugins.frontends.sampling_fields import SamplingFields


class ChatSettings(SamplingFields):
    system: str | None = None
    temperature: float = Field(default=0.2, ge=0, le=100)  # small quantized models ramble at the usual 0.7
    top_p: float = Field(default=0.9, gt=0, le=1)
    max_tokens: int | None = Field(default=1024, ge=1)
    n: int = Field(default=1, ge=1, le=1, description="a conversation has one reply")

    @field_validator("logprobs")
    @classmethod
    def _not_shown(cls, value: int | None) -> int | None:
        if value is not None:
            raise ValueError("a terminal chat shows no log-probabilities; use generate input=file.jsonl")
        return value
