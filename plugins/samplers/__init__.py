"""Built-in samplers."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import Component, hookimpl
from core.stages.sampler import SAMPLER_FIELDS


@hookimpl
def provide_samplers() -> Iterable[Component]:
    yield Component(
        "standard",
        "plugins.samplers.standard:Standard",
        "penalties, masks, temperature, top-k, top-p, min-p, logprobs",
        settings="plugins.samplers.settings:StandardSettings",
        provides=tuple(sorted(SAMPLER_FIELDS)),
    )
    yield Component(
        "greedy",
        "plugins.samplers.greedy:Greedy",
        "the most probable token, nothing else",
        settings="plugins.samplers.settings:GreedySettings",
    )
