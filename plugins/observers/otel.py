"""`observers: otel`. OpenTelemetry: one trace per ended request, sent to a collector over OTLP/HTTP.

Light: the SDK is imported only where the observer is built.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, SecretStr, model_validator

from core.errors import PluginError
from core.observers import ObserverContext
from core.outputs import RequestRecord, StepStats


class OtelSettings(BaseModel):
    """Times in seconds. What is not here is read from the SDK's own OTEL_… environment variables."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    endpoint: str = Field(default="http://127.0.0.1:4318/v1/traces", pattern="^https?://", description="of a collector")
    headers: Mapping[str, SecretStr] = Field(default={}, description="sent with each export, such as a key")
    service_name: str = "nonet"
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of requests that are traced; a client's traceparent decides for its own",
    )
    max_queue_spans: PositiveInt = Field(default=8192, description="beyond it spans are dropped")
    max_batch_spans: PositiveInt = Field(default=512, description="spans in one export")
    interval: float = Field(default=1.0, gt=0, description="between exports")
    timeout: float = Field(default=5.0, gt=0, description="for one export, with its retries")

    @model_validator(mode="after")
    def _batch_in_queue(self) -> OtelSettings:
        if self.max_batch_spans > self.max_queue_spans:
            raise ValueError(f"max_batch_spans={self.max_batch_spans} is over max_queue_spans={self.max_queue_spans}")
        return self


def _lacking(error: ModuleNotFoundError) -> str:
    """The OTLP exporter is a distribution of its own, and may be what is missing beside the SDK."""
    missing = error.name or "opentelemetry"
    part = "the OTLP/HTTP exporter" if ".exporter" in missing else "the OpenTelemetry SDK"
    return f"{part} is not installed (no module {missing})"


class OpenTelemetry:
    """Spans leave through a bounded queue and a thread of the SDK's: a collector that is down or slow loses spans, no more.

    Raises PluginError where the SDK is not installed.
    """

    Settings = OtelSettings

    def __init__(self, settings: OtelSettings, context: ObserverContext):
        try:
            from plugins.observers.otel_spans import SpanWriter
        except ModuleNotFoundError as error:
            raise PluginError(
                f"observers=otel: {_lacking(error)}; pip install opentelemetry-exporter-otlp-proto-http, which brings the SDK"
            ) from error
        self._writer = SpanWriter(settings, context)

    def step_finished(self, stats: StepStats) -> None:
        """A trace is of requests."""

    def request_finished(self, record: RequestRecord) -> None:
        self._writer.write(record)

    def close(self) -> None:
        self._writer.close()
