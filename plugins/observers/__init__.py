"""Built-in observers. `prometheus`, which `GET /metrics` shows, is the core's own."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION


@hookimpl
def provide_observers() -> Iterable[Component]:
    yield Component(
        "otel", "plugins.observers.otel:OpenTelemetry", "a trace per request, nine stage spans, over OTLP/HTTP"
    )
    yield Component("jsonl", "plugins.observers.jsonl:JsonLines", "steps and ended requests as lines of a JSON file")
