"""Built-in samplers."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl
from core.stages.sampler import SAMPLER_FIELDS

NONET_API = API_VERSION


@hookimpl
def provide_samplers() -> Iterable[Component]:
    yield Component(
        "standard",
        "plugins.samplers.standard:Standard",
        "penalties, masks, temperature, top-k, top-p, min-p, logprobs",
        settings="plugins.samplers.settings:StandardSettings",
        provides=(*sorted(SAMPLER_FIELDS - {"min_tokens"}), "drafts", "logits_processors"),
        # penalties and bad words read the output so far, and keep counts of it
        requires=("executor.history", "executor.state"),
    )
    yield Component(
        "greedy",
        "plugins.samplers.greedy:Greedy",
        "the most probable token, nothing else",
        settings="plugins.samplers.settings:GreedySettings",
        provides=("grammar", "drafts", "logits_processors"),
    )
