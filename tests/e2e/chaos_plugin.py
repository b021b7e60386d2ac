"""A third party's plugin for the fault tests: sampler `chaos`, and an observer that writes a ledger of ended requests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from core.hookspecs import Component, hookimpl
from core.stages.sampler import SAMPLER_FIELDS
from plugins.samplers.settings import StandardSettings

if TYPE_CHECKING:
    from core.outputs import RequestRecord

LEDGER = "CHAOS_LEDGER"  # environment variable: a file that gets one JSON line per ended request


class ChaosSettings(StandardSettings):
    """Times in seconds."""

    fault_seed: int = Field(default=666, description="requests with this seed fail at `fault_position`")
    fault_position: int = Field(default=4, ge=0)
    pause: float = Field(default=0.0, ge=0, description="sleep in each step")
    start_pause: float = Field(default=0.0, ge=0, description="sleep while the engine starts")


@hookimpl
def provide_samplers() -> Iterable[Component]:
    yield Component(
        "chaos",
        "chaos_sampler:Chaos",
        "the standard sampler with faults and pauses",
        settings="chaos_plugin:ChaosSettings",
        provides=tuple(sorted(SAMPLER_FIELDS)),
    )


@hookimpl
def request_finished(record: RequestRecord) -> None:
    line = {
        "id": record.request_id,
        "reasons": [str(reason) for reason in record.finish_reasons],
        "prompt_tokens": record.usage.prompt_tokens,
        "completion_tokens": record.usage.completion_tokens,
    }
    with open(os.environ[LEDGER], "a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(line) + "\n")
