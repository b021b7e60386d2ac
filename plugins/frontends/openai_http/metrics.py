"""GET /metrics: the front's own registry (requests, tokens, times, stages) and what only this frontend sees.

Counting rule of the front's registry (`core.metrics`): each ended request counts once, by the finish reason of each
choice, aborted and failed ones included; token counters count the same requests, so both families agree (bugs C5).
Refused calls never reach it; `nonet_http_requests_total` counts those by status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from core.stages.frontend import FrontHalf

log = logging.getLogger("nonet.http")

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STATUS_VALUES = ("starting", "ok", "frozen", "dead", "draining")


class HttpMetrics:
    """Label values are bounded: `path` is a route of the application, or `other`."""

    def __init__(self, front: FrontHalf, front_metrics: object | None, health_status: Callable[[], str]):
        self._front = front
        registry = getattr(front_metrics, "registry", front_metrics)
        self._front_registry = registry if isinstance(registry, CollectorRegistry) else None
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
        """Each family once; the front's registry wins over the gauges read here."""
        seen: set[str] = set()
        for families in (self._front_families(), self._registry.collect(), self._gauges()):
            for family in families:
                if family.name not in seen:
                    seen.add(family.name)
                    yield family

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self)  # a registry is whatever has `collect`

    def _front_families(self) -> Iterable[Metric]:
        return () if self._front_registry is None else self._front_registry.collect()

    def _gauges(self) -> Iterator[Metric]:
        stats, load, health = self._front.stats(), self._front.load(), self._front.health()
        # With nothing registered at the front nothing runs, whatever the last step's numbers were (bugs P3).
        busy = load.in_flight > 0
        values = {
            "kv_blocks_free": stats.kv_blocks_free,
            "kv_blocks_total": stats.kv_blocks_total,
            "requests_running": stats.running if busy else 0,
            "requests_waiting": stats.waiting if busy else 0,
            "requests_in_flight": load.in_flight,
            "engine_step_age_seconds": health.step_age,
        }
        for name, value in values.items():
            yield GaugeMetricFamily(f"nonet_{name}", name.replace("_", " "), value)
        yield self._status()
        yield self._step_seconds()

    def _status(self) -> Metric:
        family = GaugeMetricFamily("nonet_health", "1 for the present status", labels=("status",))
        status = self._health_status()
        for name in STATUS_VALUES:
            family.add_metric((name,), float(name == status))
        return family

    def _step_seconds(self) -> Metric:
        stats = self._front.stats()
        family = GaugeMetricFamily("nonet_step_seconds", "the last step's time, by stage", labels=("stage",))
        seconds = {
            "scheduler": stats.schedule_s,
            "model": stats.build_s + stats.forward_s,
            "sampler": stats.sample_s,
            "completion": stats.output_s,
        }
        for stage, value in seconds.items():
            family.add_metric((stage,), value)
        return family
