"""Settings of the model plugins of this folder. Torch-free, so that a config is checked without loading torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TransformersSettings(BaseModel):
    """Settings of `model.name=transformers`: none beyond those all models share."""

    model_config = ConfigDict(frozen=True, extra="forbid")
