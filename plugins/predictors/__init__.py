"""Built-in predictors."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION


@hookimpl
def provide_predictors() -> Iterable[Component]:
    yield Component(
        "learnt",
        "plugins.predictors.learnt:Learnt",
        "learnt from requests that have ended, by length, tenant and tokens of the prompt",
        requires=("scheduler.predictor",),
    )
    yield Component(
        "oracle",
        "plugins.predictors.oracle:Oracle",
        "output lengths that an experiment knows, by request id",
        requires=("scheduler.predictor",),
    )
