"""An exporter whose losses are told once in a while, whatever the SDK would log of each batch. Imports the SDK."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger("nonet.observers")

WARNING_INTERVAL_S = 60.0


class Reason(logging.Filter):
    """Keeps back what a logger says, and remembers the first of it: later lines only tell of retries that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        self.text = self.text or record.getMessage()
        return False


class TellingExporter(SpanExporter):
    """Used by one thread, the SDK's. A collector that is down costs the log one line per minute."""

    def __init__(self, exporter: SpanExporter, endpoint: str, clock: Callable[[], float] = time.monotonic):
        self._exporter = exporter
        self._where = _without_user(endpoint)
        self._clock = clock
        self._logger = logging.getLogger(type(exporter).__module__)
        self._reason = Reason()
        self._logger.addFilter(self._reason)
        self._num_lost = 0  # spans
        self._told_at: float | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._reason.text = ""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._num_lost += len(spans)
            self._tell()
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        self._logger.removeFilter(self._reason)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _tell(self) -> None:
        now = self._clock()
        if self._told_at is None or now - self._told_at >= WARNING_INTERVAL_S:
            self._told_at = now
            text = "observers=otel: the collector at %s does not take spans, %d are lost so far: %s"
            log.warning(text, self._where, self._num_lost, self._reason.text or "it gave no reason")


def _without_user(url: str) -> str:
    """Neither name nor password, which a URL may hold."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
