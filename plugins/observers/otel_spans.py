"""A record becomes spans. Imports the OpenTelemetry SDK, which is an extra.

Attributes bear the names of OpenTelemetry's semantic conventions for generative AI where there is one, else `nonet.…`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from core.observers import ObserverContext
from core.outputs import RequestRecord, StageSpan
from core.version import nonet_version
from plugins.observers.otel_export import TellingExporter
from plugins.observers.wall_clock import WallClock

if TYPE_CHECKING:
    from plugins.observers.otel import OtelSettings


class SpanWriter:
    """Used by one thread."""

    def __init__(self, settings: OtelSettings, context: ObserverContext):
        self._model = context.model.name
        self._plugins = {
            part.group: _plugin_of(part.provided.component.name, part.wheel) for part in context.description.parts
        }
        self._provider = _provider(settings)
        self._tracer = self._provider.get_tracer("nonet", nonet_version())
        self._propagator = TraceContextTextMapPropagator()

    def write(self, record: RequestRecord) -> None:
        """A root span from the first stage's start to the end, and a child for each stage."""
        if not record.spans:
            return
        clock = WallClock()
        root = self._tracer.start_span(
            f"{record.operation} {self._model}",
            self._parent(record),
            SpanKind.SERVER,
            self._attributes(record),
            start_time=clock.ns(record.spans[0].start),
        )
        if root.is_recording():
            self._write_stages(root, record.spans, clock)
        if record.error is not None:
            root.set_status(Status(StatusCode.ERROR, record.error))
        root.end(clock.ns(max(span.end for span in record.spans)))

    def close(self) -> None:
        """Sends what is queued. Takes `timeout` at most for each batch that the collector does not take."""
        self._provider.shutdown()

    def _write_stages(self, root: Span, spans: tuple[StageSpan, ...], clock: WallClock) -> None:
        inside = set_span_in_context(root, Context())
        for span in spans:
            attributes = {
                "nonet.stage": span.stage,
                "nonet.busy_seconds": span.busy_s,
                **self._plugins.get(span.stage, {}),
            }
            child = self._tracer.start_span(span.stage, inside, attributes=attributes, start_time=clock.ns(span.start))
            child.end(clock.ns(span.end))

    def _parent(self, record: RequestRecord) -> Context:
        """The client's span where it named one, else none: not what happens to be current in this thread."""
        return self._propagator.extract({"traceparent": record.trace_context}, Context())

    def _attributes(self, record: RequestRecord) -> dict[str, AttributeValue]:
        usage, timings = record.usage, record.timings
        found: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": "nonet",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": record.request_id,
            "gen_ai.response.finish_reasons": tuple(map(str, record.finish_reasons)),
            "gen_ai.request.choice.count": len(record.finish_reasons),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.time_to_first_chunk": timings.ttft,
            "nonet.queue_seconds": timings.queue,
            "nonet.time_per_output_token": timings.tpot,
            "nonet.preemptions": record.num_preemptions,
            "nonet.tenant": record.tenant or None,
            "error.type": None if record.error is None else record.error.split(":")[0],
        }
        return {name: value for name, value in found.items() if value is not None}


def _provider(settings: OtelSettings) -> TracerProvider:
    resource = Resource.create({"service.name": settings.service_name, "service.version": nonet_version()})
    sampler = ParentBased(TraceIdRatioBased(settings.sample_ratio))
    # Without the SDK's hook at exit: a collector that is down must not hold the process.
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
    exporter = OTLPSpanExporter(endpoint=settings.endpoint, headers=headers, timeout=settings.timeout)
    processor = BatchSpanProcessor(
        TellingExporter(exporter, settings.endpoint),
        max_queue_size=settings.max_queue_spans,
        schedule_delay_millis=1000 * settings.interval,
        max_export_batch_size=settings.max_batch_spans,
    )
    provider.add_span_processor(processor)
    return provider


def _plugin_of(name: str, wheel: str) -> dict[str, AttributeValue]:
    return {"nonet.component": name, "nonet.wheel": wheel}
