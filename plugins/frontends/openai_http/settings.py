"""Settings of the `openai_http` frontend. Torch-free and web-free, so a config can be checked without a server."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Bounds(_Frozen):
    """Largest sizes of what a request may ask for; past them a 400 names the field."""

    n: int = Field(default=16, ge=1, le=1024)
    prompts: int = Field(default=64, ge=1, le=4096)
    messages: int = Field(default=1024, ge=1, le=65536)
    tools: int = Field(default=128, ge=1, le=4096)
    content_parts: int = Field(default=256, ge=1, le=65536)
    stop: int = Field(default=16, ge=1, le=256)
    stop_bytes: int = Field(default=256, ge=1, le=65536)
    stop_token_ids: int = Field(default=256, ge=1, le=65536)
    allowed_token_ids: int = Field(default=4096, ge=1, le=1 << 20)
    logit_bias: int = Field(default=1024, ge=1, le=1 << 20)
    bad_words: int = Field(default=256, ge=1, le=65536)
    bad_word_bytes: int = Field(default=256, ge=1, le=65536)
    logprobs: int = Field(default=20, ge=0, le=1024)
    logits_processors: int = Field(default=16, ge=0, le=256)


class Limits(_Frozen):
    """What one connection may use. Times in seconds, sizes in bytes."""

    body_bytes: int = Field(default=4 << 20, ge=1024, le=1 << 30)
    header_bytes: int = Field(default=16 << 10, ge=1024, le=1 << 20)
    headers: int = Field(default=100, ge=8, le=10_000)
    json_depth: int = Field(default=64, ge=8, le=200)
    header_seconds: float = Field(default=10.0, gt=0, le=3600)
    body_seconds: float = Field(default=30.0, gt=0, le=3600)
    write_seconds: float = Field(default=60.0, gt=0, le=3600)  # a client that reads nothing for so long is dropped
    idle_seconds: int = Field(default=5, ge=1, le=3600)  # keep-alive connection without a request
    connections: int = Field(default=1024, ge=1, le=65536)


class Settings(_Frozen):
    """Config group `frontend`, choice `openai_http`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free port
    root_path: str = Field(default="", pattern=r"^(/[A-Za-z0-9._~-]+)*$")  # prefix that a proxy strips
    api_key_env: str = Field(
        default="NONET_API_KEY", min_length=1
    )  # comma-separated KEY or NAME KEY; unset: no key needed
    api_key_file: str | None = None  # KEY or NAME KEY per line, `#` starts a comment; added to those of the environment
    allowed_hosts: tuple[str, ...] = ()  # Host names beside the loopback ones; empty and not loopback: any
    allowed_origins: tuple[str, ...] = ()  # browser origins that may call (CORS); empty: none
    admin: bool = False  # POST /reset_prefix_cache
    keep_alive_seconds: float = Field(default=10.0, gt=0, le=3600)  # SSE comment after so long without a delta
    default_sampling: Literal["openai", "model"] = "openai"  # model: unset fields come from generation_config
    access_log: bool = False
    bounds: Bounds = Bounds()
    limits: Limits = Limits()

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
