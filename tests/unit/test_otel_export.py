"""`observers: otel` with a collector that is down: what the log says, and how often."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from plugins.observers.otel_export import WARNING_INTERVAL_S, TellingExporter


@pytest.fixture
def exporter() -> Iterator[OTLPSpanExporter]:
    yield OTLPSpanExporter(endpoint="http://127.0.0.1:9/v1/traces", timeout=0.2)  # port 9: nobody listens


def test_a_collector_that_is_down_costs_the_log_a_line_per_minute(exporter, caplog):
    now = [0.0]
    telling = TellingExporter(exporter, "http://me:secret@127.0.0.1:9/v1/traces", clock=lambda: now[0])
    span = TracerProvider(shutdown_on_exit=False).get_tracer("test").start_span("one")
    with caplog.at_level(logging.DEBUG):
        for seconds in (0.0, 1.0, WARNING_INTERVAL_S - 1, WARNING_INTERVAL_S):
            now[0] = seconds
            assert telling.export([span]) is SpanExportResult.FAILURE
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    place = "http://127.0.0.1:9/v1/traces"
    assert [line.split(": ")[:2] for line in told] == [
        ["observers=otel", f"the collector at {place} does not take spans, {lost} are lost so far"] for lost in (1, 4)
    ]


def test_at_its_end_the_logger_is_as_it_was(exporter):
    logger = logging.getLogger(OTLPSpanExporter.__module__)
    before = list(logger.filters)
    telling = TellingExporter(exporter, "http://127.0.0.1:9/v1/traces")
    telling.shutdown()
    assert logger.filters == before
