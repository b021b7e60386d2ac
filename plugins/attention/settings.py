"""Settings of the built-in attention backends, apart from them so that a config is checked without torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TorchSdpaSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
