"""The contract of observers, kept by the built-in ones."""

from __future__ import annotations

from core.metrics import Metrics
from core.testing.observer import ObserverContract
from plugins.observers.jsonl import JsonLines
from plugins.observers.otel import OpenTelemetry


class TestPrometheus(ObserverContract):
    component = Metrics


class TestJsonLines(ObserverContract):
    component = JsonLines
    settings = {"steps": True, "flush_interval": 0.0}


class TestJsonLinesInSmallFiles(ObserverContract):
    component = JsonLines
    settings = {"steps": True, "max_bytes": 4096, "flush_interval": 3600.0}


class TestOpenTelemetryWithoutACollector(ObserverContract):
    component = OpenTelemetry
    settings = {"endpoint": "http://127.0.0.1:9/v1/traces", "timeout": 0.2, "interval": 0.05}
