"""The official clients, Python and npm, against the real server: one script each, two models."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from core.model.spec import ModelFiles
from core.testing.harness.server import RunningServer
from core.testing.tiny_models import make_tiny_model

HERE = Path(__file__).parent
NODE_SCRIPT = HERE / "openai_script.mjs"


def openai_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("openai_script", HERE / "openai_script.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = openai_script()
STEPS = [step.__name__ for step in SCRIPT.STEPS]


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tiny = make_tiny_model(tmp_path_factory.mktemp("clients") / "tiny")
    with RunningServer(
        [f"model.source={tiny}", "model.dtype=float32", "executor.num_threads=1", "cache.num_blocks=256"]
    ) as server:
        yield server


@pytest.fixture(scope="module")
def chat_server(smollm2: ModelFiles) -> Iterator[RunningServer]:
    """What `make serve` starts, on one thread: several wait for each other for long where the machine is busy."""
    with RunningServer(["model=cpu", "executor.num_threads=1"]) as server:
        yield server


@pytest.fixture(scope="module")
def node() -> str:
    """Skips where node or its packages are missing; where CI is set, node without its packages is a failure."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed")
    if not (HERE / "node_modules" / "openai").is_dir():
        message = "the npm client is not installed: run `npm install --no-package-lock` in tests/e2e"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def run_node(node: str, server: RunningServer) -> list[str]:
    """The steps that passed; AssertionError with what node wrote when one failed."""
    command = [node, str(NODE_SCRIPT), f"{server.base_url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.removeprefix("ok ") for line in done.stdout.splitlines()]


@pytest.mark.model
@pytest.mark.slow
def test_the_readmes_first_question_is_answered(chat_server: RunningServer) -> None:
    """The default model has 135 million weights of 4 bits, and knows few capitals: the question is one whose answer it has."""
    readme = (HERE.parents[1] / "README.md").read_text(encoding="utf-8")
    body = re.search(r"chat/completions .*?-d '(\{.*?\})'", readme, re.DOTALL)
    assert body is not None
    url, kind = f"{chat_server.base_url}/v1/chat/completions", {"content-type": "application/json"}
    answer = httpx.post(url, content=body[1], headers=kind, timeout=60).json()
    assert "Tokyo" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_python_client(tiny_server: RunningServer) -> None:
    assert list(SCRIPT.run(f"{tiny_server.base_url}/v1")) == STEPS


def test_npm_client(tiny_server: RunningServer, node: str) -> None:
    assert run_node(node, tiny_server) == STEPS


@pytest.mark.model
@pytest.mark.slow
def test_python_client_with_the_default_model(chat_server: RunningServer) -> None:
    assert list(SCRIPT.run(f"{chat_server.base_url}/v1")) == STEPS


@pytest.mark.model
@pytest.mark.slow
def test_npm_client_with_the_default_model(chat_server: RunningServer, node: str) -> None:
    assert run_node(node, chat_server) == STEPS
