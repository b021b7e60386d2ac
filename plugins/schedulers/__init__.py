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
