"""GET /metrics: the front's own registry (requests, tokens, times, stages) and what only this frontend sees.

Counting rule of the front's registry (`core.metrics`): each ended request counts once, by the finish reason of each
choice, aborted and failed ones included; token counters count the same requests, so both families agree (bugs C5).
Refused calls never reach it; `nonet_http_requests_total` counts those by status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from core.metrics import Metrics
from core.stages.frontend import FrontHalf

log = logging.getLogger("nonet.http")

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STATUS_VALUES = ("starting", "ok", "frozen", "dead", "draining")


class HttpMetrics:
    """Label values are bounded: `path` is a route of the application, or `other`."""

    def __init__(self, front: FrontHalf, front_metrics: Metrics | None, health_status: Callable[[], str]):
        self._front = front
        self._front_metrics = front_metrics
        self._health_status = health_status
        self._registry = CollectorRegistry()
        labels = ("method", "path", "status")
        self._requests = Counter("nonet_http_requests", "HTTP requests answered", labels, registry=self._registry)
        self._seconds = Histogram(
            "nonet_http_request_seconds",
            "from the request's headers to the end of its answer",
            ("path",),
            buckets=BUCKETS,
            registry=self._registry,
        )

    def observe(self, method: str, path: str, status: int, seconds: float) -> None:
        """Never raises: metrics cannot fail a request (bugs P4)."""
        try:
            self._requests.labels(method, path, str(status)).inc()
            self._seconds.labels(path).observe(max(seconds, 0.0))
        except Exception:
            log.exception("metrics failed")

    def collect(self) -> Iterator[Metric]:
        """Every family once: those of `core.metrics`, of HTTP, and gauges read now."""
        if self._front_metrics is not None:
            yield from self._front_metrics.registry.collect()
        yield from self._registry.collect()
        yield from self._gauges()

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self)  # a registry is whatever has `collect`

    def _gauges(self) -> Iterator[Metric]:
        values = {
            "requests_in_flight": ("sequences registered at the front and not ended", self._front.load().in_flight),
            "engine_step_age_seconds": ("since the engine's step loop last turned", self._front.health().step_age),
        }
        for name, (text, value) in values.items():
            yield GaugeMetricFamily(f"nonet_{name}", text, value)
        yield self._status()
        yield from self._plugins()

    def _plugins(self) -> Iterator[Metric]:
        """Of the components that have failed since the start, as `/plugins` tells of them."""
        labels = ("group", "name")
        failures = CounterMetricFamily(
            "nonet_plugin_failures", "failures of a component since the start", labels=labels
        )
        quarantined = GaugeMetricFamily(
            "nonet_plugin_quarantined", "1 for a component that was switched off after failures", labels=labels
        )
        latest = {(incident.group, incident.name): incident for incident in self._front.incidents()}
        for who, incident in latest.items():
            failures.add_metric(who, incident.failures)
            quarantined.add_metric(who, float(incident.quarantined))
        yield failures
        yield quarantined

    def _status(self) -> Metric:
        family = GaugeMetricFamily("nonet_health", "1 for the present status", labels=("status",))
        status = self._health_status()
        for name in STATUS_VALUES:
            family.add_metric((name,), float(name == status))
        return family
