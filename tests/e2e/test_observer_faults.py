"""The real server with observers that raise, exit and block: no request notices; and observers that cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.testing.harness.frontend_thread import wait_until
from core.testing.harness.http_calls import bounded, call, completion_body, connected, idle_metrics
from core.testing.harness.server import RunningServer, install_plugin, metric
from core.testing.tiny_models import make_tiny_model

HERE = Path(__file__).parent
BAD = ("bad_raises", "bad_exits", "bad_blocks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("observers")
    make_tiny_model(folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def environ(folder: Path) -> dict[str, str]:
    return install_plugin(folder / "site", "acme", [HERE / "bad_observers.py"])


def overrides(folder: Path) -> list[str]:
    return [f"model.source={folder / 'tiny'}", "model.dtype=float32", "executor.num_threads=1", "cache.num_blocks=512"]


async def test_bad_observers_are_switched_off_and_no_request_notices(folder: Path, environ: dict[str, str]) -> None:
    body = completion_body("The engine was described as one engine.", 40)
    trace = folder / "trace.jsonl"
    chosen = [
        f"observers=[{','.join(BAD)},prometheus,jsonl]",
        f"observers.jsonl.path={trace}",
        "plugins.block_timeout=0.4",
    ]
    with RunningServer([*overrides(folder), *chosen], environ=environ) as server:
        async with connected(server) as client:
            alone = await call(client, body)
            outcomes = await bounded([call(client, body) for _ in range(32)], 32)
            assert all(outcome.token_ids == alone.token_ids and outcome.complete for outcome in outcomes)
            wait_until(lambda: server.log().count("is switched off") == len(BAD), 20)
            text = await idle_metrics(client)
        log = server.log()
        for name in BAD:
            assert f"observers={name} (plugin acme, acme 1.0) is switched off" in log
        assert "RuntimeError: no room for this step" in log and "SystemExit: enough" in log
        assert "blocked 0.4 s in one call (plugins.block_timeout=0.4)" in log
        assert metric(text, "nonet_requests_finished_total", finish_reason="length") == 33
        assert 'nonet_observer_dropped_records_total{observer="bad_blocks"} 0.0' in text
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 20, "a blocked observer holds the process"
    assert len([line for line in trace.read_text().splitlines() if '"kind":"request"' in line]) == 33


UNBUILT = "observers=bad_unbuilt (plugin acme, acme 1.0) could not be built: OSError: the ledger's database is gone"
NO_FOLDER = "observers.jsonl.path: cannot write no/such/t.jsonl: No such file or directory"


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (["observers=[bad_unbuilt]"], UNBUILT),
        (["observers=[jsonl]", "observers.jsonl.path=no/such/t.jsonl"], NO_FOLDER),
        (["observers=[jsonl]", "observers.jsonl.pth=x"], "did you mean path?"),
        (["observers=[otel]", "observers.otel.endpoint=collector:4318"], "observers.otel.endpoint"),
        (
            ["observers=[otel]", "observers.otel.max_batch_spans=9000"],
            "max_batch_spans=9000 is over max_queue_spans=8192",
        ),
    ],
    ids=["build", "path", "typo", "endpoint", "batch"],
)
def test_an_observer_that_cannot_be_built_refuses_the_start_by_name(
    folder: Path, environ: dict[str, str], chosen: list[str], told: str
) -> None:
    command = [sys.executable, "-m", "core", "serve", "frontend.port=0", *overrides(folder), *chosen]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=HERE.parents[1], env={**os.environ, **environ}
    )
    assert done.returncode == 1, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
