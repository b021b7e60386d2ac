"""Settings of the built-in weight formats, apart from them so that a config is checked without torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class DenseSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
