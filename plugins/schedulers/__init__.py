"""Built-in schedulers."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION

_SCHEDULERS = (
    ("fcfs", "fcfs:Fcfs", "first come, first served; preempts the youngest"),
    ("priority", "priority:Priority", "better levels first, with aging; a full batch makes room for them"),
    ("time_slice", "time_slice:TimeSlice", "round robin: a few steps in a row each, while others wait"),
    ("slo", "slo:Slo", "earliest token deadline first; late requests yield"),
    ("srtf", "srtf:Srtf", "shortest remaining time first, as a predictor expects it, with aging"),
    ("fair", "fair:Fair", "tokens shared among tenants by weight, or round robin over tiers"),
    ("prefix_aware", "prefix_aware:PrefixAware", "longest cached prefix first, with a bound on waiting"),
    ("static", "static:Static", "batches that run to completion: the baseline"),
)
"""Name, module and class here, summary."""

_WORDS = {"srtf": ("predictor",), "priority": ("priority",)}


@hookimpl
def provide_schedulers() -> Iterable[Component]:
    for name, target, summary in _SCHEDULERS:
        yield Component(
            name, f"plugins.schedulers.{target}", summary, provides=("drafts", "jump_forward", *_WORDS.get(name, ()))
        )
