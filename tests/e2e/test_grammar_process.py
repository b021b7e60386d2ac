"""The process that compiles grammars beside a real server: there before it is needed, light, and never left behind."""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from core.testing.harness.frontend_thread import wait_until
from core.testing.harness.server import RunningServer, install_plugin, metric

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "gguf" / "tiny-h128-Q4_0.gguf"
VALUES = [f"model.source={TINY}", "cache.num_blocks=32", "grammars=[llguidance]"]
WAIT_S = 60.0

BACKEND = """
from core.hookspecs import API_VERSION, Component, hookimpl
NONET_API = API_VERSION

@hookimpl
def provide_grammars():
    yield Component("moody", "moody_backend:Moody", "does what a pattern says", provides=("regex",))
"""
MOODY = """
import os, time
from pydantic import BaseModel, ConfigDict
from core.stages.grammar import GrammarError

class Moody:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings, context):
        self._vocabulary = context.load_vocabulary

    def compile(self, spec):
        assert self._vocabulary().vocab_size == 512
        if spec.source == "exit":
            os._exit(7)
        if spec.source == "sleep":
            time.sleep(60)
        if spec.source == "raise":
            raise LookupError("a bad day")
        if spec.source != "a+":  # what a backend is tried with
            raise GrammarError("not in the mood")
        return b"any"

    def load(self, artifact):
        return self

    def matcher(self):
        return self

    def fill(self, mask):
        mask[:] = -1
"""


def ask(server: RunningServer, timeout: float = 60, **fields: Any) -> tuple[int, dict[str, Any]]:
    """A completion: status and body."""
    body = {"model": TINY.stem, "prompt": "light", "max_tokens": 8, "temperature": 0, **fields}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def regex(pattern: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": pattern}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(VALUES) as running:
        yield running


def compiler_of(server: RunningServer) -> psutil.Process:
    wait_until(lambda: bool(server.compiler_pids()), WAIT_S)
    return psutil.Process(server.compiler_pids()[0])


def test_it_is_there_before_the_first_grammar_and_has_no_torch(server: RunningServer) -> None:
    compiler = compiler_of(server)
    status, body = ask(server, **regex("[a-c]{3}"))
    assert status == 200 and len(body["choices"][0]["text"]) == 3
    assert server.compiler_pids() == [compiler.pid]
    if sys.platform == "linux":
        for pid, name in ((compiler.pid, "the process that compiles"), (server.pid, "the front")):
            mapped = Path(f"/proc/{pid}/maps").read_text()
            assert "libtorch" not in mapped, name
        assert "llguidance" in Path(f"/proc/{compiler.pid}/maps").read_text()
        assert "llguidance" not in Path(f"/proc/{server.pid}/maps").read_text()


def test_a_grammar_that_is_refused_names_its_field(server: RunningServer) -> None:
    status, body = ask(server, **regex("(?<=x)a"))
    assert status == 400 and body["error"]["code"] == "unsupported_grammar"
    assert "llguidance" in body["error"]["message"] and "regex" in (body["error"]["param"] or "")


def test_what_it_costs_is_in_the_metrics(server: RunningServer) -> None:
    for _ in range(2):
        ask(server, **regex("[d-f]{2}"))
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert metric(text, "nonet_grammar_cache_hits_total") >= 1 and metric(text, "nonet_grammar_cache_misses_total") >= 1
    assert metric(text, "nonet_grammar_compile_seconds_count") >= 1 and metric(text, "nonet_grammar_cache_bytes") > 0


def test_it_is_replaced_when_it_was_killed(server: RunningServer) -> None:
    compiler = compiler_of(server)
    compiler.kill()
    wait_until(lambda: compiler.pid not in server.compiler_pids(), WAIT_S)
    assert ask(server, **regex("[g-i]{4}"))[0] == 200
    assert compiler.pid not in server.compiler_pids()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_the_server(number: signal.Signals) -> None:
    with RunningServer(VALUES) as server:
        compiler = compiler_of(server)
        assert server.stop(number) in (0, 130)
        assert not compiler.is_running()


def test_it_ends_with_a_front_that_is_killed() -> None:
    with RunningServer(VALUES) as server:
        compiler_of(server)
        ask(server, **regex("[a-c]{3}"))
        server.send_signal(signal.SIGKILL)
        server.wait_exit()
        wait_until(lambda: not server.processes(), 20)


def test_a_strangers_backend_costs_its_grammars_and_nothing_else(tmp_path: Path) -> None:
    """One that ends its process, takes too long, raises: each is one answer, and the rest of the server goes on."""
    hooks = tmp_path / "moody.py"
    hooks.write_text(BACKEND, encoding="utf-8")
    environ = install_plugin(tmp_path / "site", "acme-moody", [hooks], {"moody_backend.py": MOODY})
    values = [*VALUES[:2], "grammars=[moody]", "structured_outputs.compile_timeout=1", "plugins.quarantine_after=3"]
    with RunningServer(values, environ=environ) as server:
        status, body = ask(server, **regex("sleep"))
        assert (status, body["error"]["code"]) == (400, "grammar_timeout")
        status, body = ask(server, **regex("exit"))
        assert (status, body["error"]["code"]) == (400, "grammar_crash")
        status, body = ask(server, **regex("moody"))
        assert status == 400 and body["error"]["message"].endswith("moody: not in the mood")
        status, body = ask(server, **regex("raise"))
        assert status == 500 and "grammars=moody (plugin acme-moody, acme-moody 1.0)" in body["error"]["message"]
        assert ask(server)[0] == 200
        status, body = ask(server, **regex("raise"))
        assert status == 500  # the third failure, with the crash
        status, body = ask(server, **regex("a+"))
        assert (status, body["error"]["code"]) == (503, "plugin_quarantined")
        assert ask(server)[0] == 200
        server.stop()
