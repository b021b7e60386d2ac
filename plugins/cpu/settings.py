"""Settings of the native CPU code, apart from it so that a config is checked without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from core.model.model_settings import NativeSettings

Instructions = Literal["auto", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]


class NativeCode(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    instructions: Instructions = Field(default="auto", description="what kernels are compiled for; auto: the best here")


class CpuModelSettings(NativeSettings, NativeCode):
    weight_cache: bool = Field(default=True, description="whether packed weights are kept on disk for the next start")
    weight_cache_bytes: int = Field(default=32 * 2**30, ge=0, description="of all packed weights that are kept")
    profile: bool = Field(
        default=False, description="take the time of each operation, for `bench` to print; no step begins ahead then"
    )
    overlap_requests: int = Field(
        default=8,
        ge=0,
        description="decodes of a step, at most, whose next one begins beside what the engine does between the two; 0: none",
    )


class CpuAttentionSettings(NativeCode):
    kv_format: Literal["auto", "int8"] = Field(
        default="auto",
        description="of keys and values; auto: model.dtype; int8: 8 bits, a scale for each token and kv head",
    )


class CpuQuantSettings(NativeCode):
    pass
