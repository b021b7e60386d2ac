"""Built-in schedulers."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION


@hookimpl
def provide_schedulers() -> Iterable[Component]:
    yield Component(
        "fcfs",
        "plugins.schedulers.fcfs:Fcfs",
        "first come, first served; preempts the youngest",
        provides=("drafts",),
    )
    yield Component(
        "priority",
        "plugins.schedulers.priority:Priority",
        "better levels first, with aging; a full batch makes room for them",
        provides=("drafts",),
    )
    yield Component(
        "time_slice",
        "plugins.schedulers.time_slice:TimeSlice",
        "round robin: a few steps in a row each, while others wait",
        provides=("drafts",),
    )
    yield Component(
        "slo",
        "plugins.schedulers.slo:Slo",
        "earliest token deadline first; late requests yield",
        provides=("drafts",),
    )
    yield Component(
        "srtf",
        "plugins.schedulers.srtf:Srtf",
        "shortest remaining time first, as a predictor expects it, with aging",
        provides=("drafts",),
    )
    yield Component(
        "fair",
        "plugins.schedulers.fair:Fair",
        "tokens shared among tenants by weight, or round robin over tiers",
        provides=("drafts",),
    )
    yield Component(
        "prefix_aware",
        "plugins.schedulers.prefix_aware:PrefixAware",
        "longest cached prefix first, with a bound on waiting",
        provides=("drafts",),
    )
    yield Component(
        "static",
        "plugins.schedulers.static:Static",
        "batches that run to completion: the baseline",
        provides=("drafts",),
    )
