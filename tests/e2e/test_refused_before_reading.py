"""What cannot work together is refused at once: before the model file is opened, or before its weights are read."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import core.plugins as loading
from core import assembly
from core.assembly import make_engine
from core.border.early import EARLY
from core.config.compose import compose
from core.errors import ConfigError
from core.hookspecs import API_VERSION, Component, hookimpl
from core.plugins import Plugins, load_plugins
from core.settings import Settings
from core.testing.tokenizers import byte_level_bpe, save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "gguf" / "tiny-h128-Q4_0.gguf"
SETTINGS = "core.model.model_settings:LocalExecutorSettings"  # of a component that is never built
SECONDS = 60  # of a whole process on a busy machine; what it took is printed

WATCH = """
import os, sys
LOG, WATCHED = os.environ["WATCH_LOG"], os.environ["WATCHED"]
EARLY = sys.orig_argv[-1] == "early"

def watch(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and WATCHED in str(arguments[0]):
        note(event, arguments[0])
    elif event == "import" and arguments[0] == "torch" and not EARLY:
        note(event, arguments[0])
    elif event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        note(event, arguments[1][-1] if event == "subprocess.Popen" else "")

def note(event, what):
    fd = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{event} {what}\\n".encode())
    os.close(fd)

sys.addaudithook(watch)
"""


@dataclass(frozen=True)
class Refused:
    """How a command ended, and what it did before: files of the model opened, torch imported, processes started.

    In all its processes, but for the early one (`core.border.early`): that one exists, imports torch, and is told of no model.
    """

    message: str
    took: str
    did: list[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The files of a Hugging Face folder, with one tensor that is no model's."""
    folder = tmp_path / "watched-model"
    folder.mkdir()
    config = {"model_type": "gpt_neox", "vocab_size": 330, "hidden_size": 8, "num_attention_heads": 1, "n_ctx": 64}
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    save_tokenizer(byte_level_bpe(), folder)
    return folder


def refused(tmp_path: Path, *overrides: str) -> Refused:
    """`python -m core serve …` to its end, watched by Python's own audit events from its first line on."""
    site, log = tmp_path / "site", tmp_path / "log"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(WATCH)
    log.unlink(missing_ok=True)
    environ = {
        **os.environ,
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
        "WATCH_LOG": str(log),
        "WATCHED": "watched-model",
    }
    command = [sys.executable, "-m", "core", "serve", "+preset=chat", "frontend.port=0", *overrides]
    started, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path, env=environ)
    seconds, spent = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    took = f"{seconds:.2f} s, {spent.ru_utime + spent.ru_stime - cpu.ru_utime - cpu.ru_stime:.2f} s of a CPU"
    (message,) = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    did = log.read_text().splitlines() if log.exists() else []
    return Refused(message, took, [line for line in did if line != f"subprocess.Popen {EARLY}"])


def test_a_composition_is_refused_before_its_model_is_opened(tmp_path, model):
    found = refused(tmp_path, "~frontend.port", "frontend=chat_cli", "renderer=token_ids", f"model.source={model}")
    print(f"\nrefused in {found.took}")
    assert found.message.startswith("nonet serve: frontend=chat_cli (plugin plugins.frontends, nonet ")
    assert "requires renderer.messages, which renderer=token_ids (plugin core.builtin, nonet " in found.message
    assert "choose renderer=text" in found.message
    assert found.did == []  # no file of the model, no torch, no process but the early one


def test_a_model_is_refused_by_its_header_and_no_engine_is_started(tmp_path, model):
    """The same model and watch, so the empty list of the other test shows what it claims."""
    found = refused(tmp_path, f"model.source={model}")
    print(f"\nrefused in {found.took}")
    assert "model=cpu (plugin plugins.cpu, nonet " in found.message
    assert (
        f"accepts model_type llama, mistral, qwen2, qwen3, gemma2, gemma3_text, and the model {model.name}"
        in found.message
    )
    assert "has gpt_neox; choose model=transformers" in found.message
    assert any(line.startswith("open") and line.endswith("config.json") for line in found.did)
    assert not [line for line in found.did if not line.startswith(("open", "os.listdir", "os.scandir"))]


# In one process, where the engine is made


def made_engine(plugins: Plugins, *overrides: str) -> object:
    settings = Settings.from_config(compose(list(overrides), plugins).values)
    return make_engine(settings, plugins)


def test_an_engine_of_the_same_process_checks_the_model_before_it_is_built(model, monkeypatch):
    def build(*_: object) -> object:
        raise AssertionError("the engine is being built")

    monkeypatch.setattr(assembly, "build_engine", build)
    with pytest.raises(ConfigError, match="has gpt_neox; choose model=transformers"):
        made_engine(load_plugins(["all"]), f"model.source={model}")


def test_what_auto_has_become_is_checked_before_weights_are_read(monkeypatch):
    """The made-up backend has no module: it is refused before it is imported, and that is before the model is built."""
    module: Any = types.ModuleType("acme")
    module.NONET_API = API_VERSION
    flash = Component("flash", "acme.flash:Flash", "made up", SETTINGS, accepts={"device": ("tpu",)})
    module.provide_attentions = hookimpl(lambda: [flash])
    monkeypatch.setattr(loading, "entry_points", lambda group: [AcmePoint(module)])
    with pytest.raises(ConfigError) as caught:
        made_engine(load_plugins(), "attention=flash", f"model.source={TINY}")
    assert "attention=flash (plugin acme, acme-parts 1.2) accepts device tpu, and model.device is " in str(caught.value)
    assert "choose attention=torch_sdpa" in str(caught.value)


class AcmePoint:
    name, value = "acme", "acme.plugin"

    class dist:  # noqa: N801
        metadata, version, requires = {"Name": "acme-parts"}, "1.2", ()

    def __init__(self, plugin: object):
        self._plugin = plugin

    def load(self) -> object:
        return self._plugin
