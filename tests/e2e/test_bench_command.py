"""`python -m core bench`, every workload: with a real engine in its process, and against a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from core.lab.bench.workloads import WORKLOADS
from core.testing.harness.server import RunningServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/data/gguf/tiny-h128-Q8_0.gguf"
CONFIG = [f"model.source={MODEL}", "executor.num_threads=1", "cache.num_blocks=256"]
SMALL: dict[str, Sequence[str]] = {
    "single": ("num_requests=2", "input_len=8", "output_len=6"),
    "offline": ("num_requests=4", "max_input_len=40", "max_output_len=40"),
    "closed": ("num_requests=4", "concurrency=2", "input_len=8", "output_len=6"),
    "open": ("num_requests=4", "rate=50", "input_len=8", "output_len=6"),
    "shared_prefix": ("groups=2", "group_size=3", "prefix_len=64", "suffix_len=8", "output_len=3"),
    "long_prefill": ("streams=2", "before=4", "output_len=180", "prompt_len=120", "prompt_output_len=2"),
    "structured": ("streams=2", "rounds=1", "output_len=200"),
}


def bench(*words: str) -> tuple[dict[str, Any], str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "core", "bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(CONFIG) as running:
        yield running


def assert_report(name: str, report: dict[str, Any], said: str) -> None:
    assert report["workload"]["name"] == name and report["machine"]["nonet"]
    assert report["headline"] and all(
        value > 0 for key, value in report["headline"].items() if key != "prefix_hit_share"
    )
    assert report["num_failed"] == 0 and report["num_requests"] > 0
    assert len(said.splitlines()) >= len(report["headline"])


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_in_this_process(name: str) -> None:
    report, said = bench(f"workload={name}", *SMALL[name], *CONFIG)
    assert_report(name, report, said)
    assert report["steps"]["count"] > 0 and 0 < report["headline"]["framework_share"] < 1
    limits = report["roofline"]
    assert limits["decode"]["share"] > 0 and limits["prefill"]["share"] > 0 and 0 < limits["steps_share"]
    assert limits["machine_and_model"]["weight_bytes"] > 0 and limits["text"] in said
    if name == "shared_prefix":
        assert report["headline"]["prefix_hit_share"] == pytest.approx(4 * 64 / (6 * 72))
    if name == "structured":
        assert len(report["ratios"]) == 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_against_a_server(server: RunningServer, name: str) -> None:
    report, said = bench(f"url={server.base_url}", "vocab_size=300", f"workload={name}", *SMALL[name])
    assert_report(name, report, said)
    assert report["url"] == server.base_url and report["prompts"] == "ids" and "steps" not in report
    if name == "closed":
        assert (report["prompt_tokens"], report["output_tokens"]) == (32, 24)
    if name == "shared_prefix":
        assert report["headline"]["prefix_hit_share"] == pytest.approx(4 * 64 / (6 * 72))


def test_rounds_have_a_spread_and_a_second_run_finds_no_prefix(server: RunningServer) -> None:
    words = (f"url={server.base_url}", "vocab_size=300", "workload=shared_prefix", *SMALL["shared_prefix"], "repeat=2")
    for _ in range(2):
        report, said = bench(*words)
        assert report["spread"]["prefix_hit_share"]["max"] == pytest.approx(4 * 64 / (6 * 72))
        assert len(report["rounds"]) == 2 and " to " in said


def test_a_prompt_of_text(server: RunningServer) -> None:
    report, _ = bench(f"url={server.base_url}", "prompts=text", "num_requests=2", "input_len=8", "output_len=3")
    assert report["prompts"] == "text" and report["output_tokens"] == 6


def test_help_names_every_workload_and_nobody_answers(server: RunningServer) -> None:
    command = [sys.executable, "-m", "core", "bench"]
    text = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert all(f"workload={name}" in text for name in WORKLOADS)
    done = subprocess.run([*command, "url=http://127.0.0.1:1"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "") and "is the server up?" in done.stderr


def test_the_smoke_test_of_our_side() -> None:
    command = [sys.executable, "-m", "core.lab.bench_cpu", "--quick", "single", "http8"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("cpu ok in")
