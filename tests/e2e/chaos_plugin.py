"""A third party's plugin for the fault tests: sampler `chaos`, and an observer that writes a ledger of ended requests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from core.hookspecs import Component, hookimpl
from core.stages.sampler import SAMPLER_FIELDS
from plugins.samplers.settings import StandardSettings

NONET_API = "1.1"


class ChaosSettings(StandardSettings):
    """Times in seconds."""

    fault_seed: int = Field(default=666, description="requests with this seed fail at `fault_position`")
    fault_position: int = Field(default=4, ge=0)
    pause: float = Field(default=0.0, ge=0, description="sleep in each step")
    start_pause: float = Field(default=0.0, ge=0, description="sleep while the engine starts")


class LedgerSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    path: Path = Field(description="a file that gets one JSON line per ended request")


@hookimpl
def provide_samplers() -> Iterable[Component]:
    yield Component(
        "chaos",
        "chaos_sampler:Chaos",
        "the standard sampler with faults and pauses",
        settings="chaos_plugin:ChaosSettings",
        provides=(*sorted(SAMPLER_FIELDS - {"min_tokens"}), "drafts", "logits_processors"),
    )


@hookimpl
def provide_observers() -> Iterable[Component]:
    yield Component(
        "chaos_ledger", "chaos_ledger:Ledger", "a line per ended request", settings="chaos_plugin:LedgerSettings"
    )
