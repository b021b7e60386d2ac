"""Settings of the native model and the local executor, apart from them so that a config is checked without torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class NativeSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    ignore_config_keys: tuple[str, ...] = Field(
        default=(),
        description="keys of config.json that the native model does not know and that do not matter",
    )


class LocalExecutorSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    num_threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of the whole process; null: torch's choice"
    )
