"""The front process needs no torch: it resolves, describes, renders and detokenizes. It stays small and starts fast."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from core.testing.harness.server import RunningServer

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "gguf" / "tiny-h128-Q4_0.gguf"
HEAVY = ("torch", "transformers", "numpy")

READ_GGUF = f"""
from pathlib import Path
from core.model.describe import read_spec
from core.model.sources import default_cache_dir, resolve
from core.model.tokenizer import load_tokenizer
spec = read_spec(resolve({str(TINY)!r}, cache_dir=default_cache_dir(), progress=print))
tokenizer = load_tokenizer(spec.files)
assert tokenizer.decode(tokenizer.encode("light"))
"""
FRONT_MODULES = """
import importlib, pkgutil
import core.stages, plugins.frontends.openai_http
names = ["core.front.front", "core.client", "core.session", "core.commands.serve", "plugins.frontends.chat_cli"]
for package in (core.stages, plugins.frontends.openai_http):
    names += [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
assert len(names) > 30, names
for name in names:
    importlib.import_module(name)
"""
BUILT_FRONT = f"""
from core.assembly import build_front, read_model
from core.session import open_session
session = open_session(["+preset=chat", {f"model.source={TINY}"!r}])
spec = read_model(session.settings)
pipeline = build_front(session.description, session.settings, session.plugins, spec, lambda: 1000)
assert pipeline.model.vocab_size == 512
"""


@pytest.mark.parametrize("code", [READ_GGUF, FRONT_MODULES, BUILT_FRONT], ids=["gguf", "modules", "pipeline"])
def test_nothing_of_the_front_imports_torch(code: str) -> None:
    code += f"\nimport sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_that_has_answered_has_torch_in_its_engine_process_alone() -> None:
    with RunningServer([f"model.source={TINY}", "cache.num_blocks=32"]) as server:
        body = {"model": TINY.stem, "prompt": "light", "max_tokens": 4, "temperature": 0, "logprobs": 2}
        request = urllib.request.Request(
            f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
        front, engine = mapped_files(server.pid), mapped_files(server.engine_pid())
    assert any("libtorch" in name for name in engine)  # or the next line would show nothing
    assert not [name for name in front if "libtorch" in name or "/numpy/" in name]


def mapped_files(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/" in line}
