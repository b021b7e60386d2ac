"""`observers: otel` with the real server and a real OTLP/HTTP collector: what arrives, and a collector that is not there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from core.components import STAGES
from core.testing.harness.frontend_thread import wait_until
from core.testing.harness.server import RunningServer, metric
from core.testing.tiny_models import make_tiny_model

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = "The engine was described as one engine. " * 8


@dataclass
class Collector:
    """Decodes what is posted to it. `status`: what it answers."""

    status: int = 200
    spans: list[Span] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces"
        self.headers.append(headers)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(resource.resource.attributes))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def traces(self) -> dict[str, list[Span]]:
        """By the request's id; the root first."""
        by_trace: dict[bytes, list[Span]] = {}
        for span in self.spans:
            by_trace.setdefault(span.trace_id, []).append(span)
        found = {}
        for spans in by_trace.values():
            roots = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
            for root in roots:
                children = [span for span in spans if span.parent_span_id == root.span_id]
                found[attributes(root.attributes)["gen_ai.response.id"]] = [root, *children]
        return found


@contextmanager
def collecting(collector: Collector) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.status == 200:
                collector.take(self.path, {key.lower(): value for key, value in self.headers.items()}, body)
            self.send_response(collector.status)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in pairs}


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    return getattr(value, kind or "string_value")


def covered(spans: list[Span], start: int, end: int) -> float:
    """Share of [start, end] in the union of the spans."""
    total, reached = 0, start
    for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
        total += max(min(span.end_time_unix_nano, end) - max(span.start_time_unix_nano, reached), 0)
        reached = max(reached, span.end_time_unix_nano)
    return total / (end - start)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    tiny = make_tiny_model(tmp_path_factory.mktemp("otel") / "tiny")
    return [f"model.source={tiny}", "model.dtype=float32", "executor.num_threads=1", "cache.num_blocks=256"]


def body(max_tokens: int, **values: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **values}


@dataclass
class Sent:
    """Calls to a server with a collector, by request id where it matters. Times in seconds since the epoch."""

    walls: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # whole, three choices, streamed: sent, answered
    chatted: str = ""
    aborted: str = ""
    plugins: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""


def test_each_request_of_a_real_server_is_a_trace_of_nine_stages(overrides: list[str]) -> None:
    with collecting(Collector()) as collector:
        sent = send_all(overrides, collector)
        traces = collector.traces()
    assert len(traces) == 6, "a refused request is no trace"
    check_headers(collector, sent)
    for request_id, (root, *children) in traces.items():
        check_tree(root, children, request_id)
    for request_id, wall in sent.walls.items():
        root, *children = traces[request_id]
        assert covered(children, root.start_time_unix_nano, root.end_time_unix_nano) >= 0.95
        assert covered(children, int(wall[0] * 1e9), int(wall[1] * 1e9)) >= 0.9, "the client waited no longer than that"
    check_roots(traces, sent)


def send_all(overrides: list[str], collector: Collector) -> Sent:
    """Six calls that are traces, and one that is refused; ends once the collector has them."""
    values = [
        "observers=[prometheus,otel]",
        f"observers.otel.endpoint={collector.url}",
        "observers.otel.headers={x-collector-key: key-of-the-collector}",
        "observers.otel.service_name=tests",
        "observers.otel.interval=0.1",
    ]
    sent = Sent()
    with RunningServer([*overrides, *values]) as server, httpx.Client(base_url=server.base_url, timeout=60) as client:
        client.post("/v1/completions", json=body(2))  # what runs for the first time is slow
        sent.walls = dict(
            timed_call(client, values, headers)
            for values, headers in (
                (body(200), {"traceparent": f"00-{TRACE}-{PARENT}-01"}),
                (body(80, n=3, temperature=1), {"traceparent": "00-nonsense-01"}),
                (body(200, stream=True), {}),
            )
        )
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        sent.chatted = client.post("/v1/chat/completions", json=chat).json()["id"]
        with client.stream("POST", "/v1/completions", json=body(400, stream=True)) as left:
            sent.aborted = json.loads(next(left.iter_lines()).removeprefix("data: "))["id"]
        assert client.post("/v1/completions", json=body(10**6)).status_code == 400
        sent.plugins = client.get("/plugins").json()["plugins"]
        wait_until(lambda: len(collector.traces()) >= 6, 20)
        sent.log = server.log()
    return sent


def timed_call(
    client: httpx.Client, values: dict[str, Any], headers: dict[str, str]
) -> tuple[str, tuple[float, float]]:
    """Its request id, and when it was sent and answered."""
    started = time.time()
    answer = client.post("/v1/completions", json=values, headers=headers)
    ended = time.time()
    return json.loads(answer.text.removeprefix("data: ").split("\n")[0])["id"], (started, ended)


def check_headers(collector: Collector, sent: Sent) -> None:
    """The collector's key reaches the collector, and nobody else."""
    (settings,) = [row["settings"] for row in sent.plugins if row["name"] == "otel"]
    assert all("key-of-the-collector" not in told for told in (json.dumps(sent.plugins), sent.log))
    assert settings["service_name"] == "tests"
    assert all(headers["x-collector-key"] == "key-of-the-collector" for headers in collector.headers)
    assert all(resource["service.name"] == "tests" for resource in collector.resources)


def check_tree(root: Span, children: list[Span], request_id: str) -> None:
    """One child per stage, inside the root, labelled by the plugin that plays the stage."""
    assert sorted(span.name for span in children) == sorted(STAGES), request_id
    for span in children:
        assert span.trace_id == root.trace_id
        assert (
            root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
        )
        labels = attributes(span.attributes)
        assert labels["nonet.stage"] == span.name
        assert labels["nonet.wheel"].startswith("nonet ")
        assert 0 <= labels["nonet.busy_seconds"] <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 + 1e-6
    names = {span.name: attributes(span.attributes)["nonet.component"] for span in children}
    assert (names["frontend"], names["scheduler"], names["sampler"]) == ("openai_http", "fcfs", "standard")


def check_roots(traces: dict[str, list[Span]], sent: Sent) -> None:
    whole, choices, _ = (traces[request_id][0] for request_id in sent.walls)
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert not choices.parent_span_id, "what is no traceparent is none"
    found = attributes(whole.attributes)
    assert (found["gen_ai.operation.name"], found["gen_ai.usage.output_tokens"]) == ("text_completion", 200)
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert whole.name == f"text_completion {found['gen_ai.request.model']}"
    assert attributes(choices.attributes)["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert attributes(traces[sent.chatted][0].attributes)["gen_ai.operation.name"] == "chat"
    assert attributes(traces[sent.aborted][0].attributes)["gen_ai.response.finish_reasons"] == ["abort"]
    assert all(root.status.code != Status.STATUS_CODE_ERROR for root, *_ in traces.values())


@pytest.mark.parametrize("collector", ["down", "failing", "silent"])
def test_a_collector_that_takes_nothing_costs_no_request_and_no_exit(overrides: list[str], collector: str) -> None:
    with collecting(Collector(status=503 if collector == "failing" else 200)) as there, silent_port() as silent:
        url = {
            "down": "http://127.0.0.1:9/v1/traces",
            "failing": there.url,
            "silent": f"http://127.0.0.1:{silent}/v1/traces",
        }
        values = [
            "observers=[prometheus,otel]",
            f"observers.otel.endpoint={url[collector]}",
            "observers.otel.interval=0.05",
        ]
        values += ["observers.otel.max_queue_spans=30", "observers.otel.max_batch_spans=10"]
        with (
            RunningServer([*overrides, *values]) as server,
            httpx.Client(base_url=server.base_url, timeout=60) as client,
        ):
            for _ in range(30):
                assert client.post("/v1/completions", json=body(2)).status_code == 200
            text = client.get("/metrics").text
            assert metric(text, "nonet_requests_finished_total", finish_reason="length") == 30
            assert metric(text, "nonet_observer_dropped_records_total", observer="otel") == 0
            assert "switched off" not in server.log()
            started = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - started < 15


@contextmanager
def silent_port() -> Iterator[int]:
    """Takes connections and never answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


WITHOUT = """
import sys
sys.modules["{module}"] = None  # as where it is not installed
from core.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("module", "lacking"),
    [
        ("opentelemetry.sdk", "the OpenTelemetry SDK"),
        ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "the OTLP/HTTP exporter"),
    ],
)
def test_without_the_sdk_the_start_is_refused_and_says_what_to_install(
    overrides: list[str], module: str, lacking: str
) -> None:
    command = [
        sys.executable,
        "-c",
        WITHOUT.format(module=module),
        "serve",
        "frontend.port=0",
        "observers=[prometheus,otel]",
        *overrides,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 1, done.stderr
    assert f"observers=otel: {lacking} is not installed" in done.stderr
    assert "pip install opentelemetry-exporter-otlp-proto-http" in done.stderr and "nonet[" not in done.stderr
    assert "Traceback" not in done.stderr
