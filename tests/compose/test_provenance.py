"""Provenance: the file (with the wheel that ships it), the override or the class behind each value and each choice."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import core.plugins as loading
from core.commands import explain
from core.errors import ConfigError
from core.hookspecs import API_VERSION, Component, hookimpl
from core.session import open_session
from core.version import nonet_version

OURS = f"(nonet {nonet_version()})"
ENGINE = f"configs/engine.yaml {OURS}"
NIGHT = "(acme-night 2.1)"
FILES = {
    "acme_night/__init__.py": "",
    "acme_night/configs/__init__.py": "",
    "acme_night/configs/scheduler/night.yaml": "name: night\nmax_num_running_reqs: 5\n",
    "acme_night/configs/preset/night.yaml": (
        "# @package _global_\ndefaults:\n  - override /scheduler: night\n  - override /observers: [jsonl, prometheus]\n"
        "observers:\n  jsonl: {path: night.jsonl}\n"
    ),
    "acme_night/scheduler.py": (
        "from plugins.schedulers.fcfs import Fcfs\n"
        "class Night(Fcfs):\n    class Settings(Fcfs.Settings):\n        tenants: dict[str, int] = {}\n"
    ),
}


class Point:
    """An entry point of a wheel that is not installed."""

    name, value = "night", "acme_night.plugin"

    def __init__(self, plugin: object):
        self._plugin = plugin
        self.dist = types.SimpleNamespace(metadata={"Name": "acme-night"}, version="2.1", requires=[])

    def load(self) -> object:
        return self._plugin


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin with a scheduler, its option file, a preset, and a component that has no file at all."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "acme_night"]:
        monkeypatch.delitem(sys.modules, name)
    plugin = types.ModuleType("acme_night.plugin")
    components = [Component(name, "acme_night.scheduler:Night", "by night") for name in ("night", "bare")]
    plugin.NONET_API = API_VERSION
    plugin.provide_schedulers = hookimpl(lambda: components, specname="provide_schedulers")
    plugin.provide_config_packages = hookimpl(lambda: ["acme_night.configs"], specname="provide_config_packages")
    monkeypatch.setattr(loading, "entry_points", lambda group: [Point(plugin)])


def rows(words: list[str]) -> dict[str, dict[str, Any]]:
    """Rows of `explain --json`, by stage; members of chains by their config path."""
    session = open_session(words)
    found = explain.rows(session)
    paths = [part.path for part in session.description.parts] + list(explain.sections(session))
    return dict(zip(paths, json.loads(json.dumps(found)), strict=True))


def origins(row: dict[str, Any]) -> dict[str, str]:
    """Of what is set; defaults left out."""
    found = {key: value["origin"] for key, value in row["settings"].items()}
    return {key: origin for key, origin in found.items() if not origin.startswith("default of ")}


def test_files_of_a_wheel_are_named_with_the_wheel(night):
    found = rows(["+preset=night", "scheduler.max_num_scheduled_tokens=64"])
    assert origins(found["scheduler"]) == {
        "max_num_running_reqs": f"acme_night.configs:scheduler/night.yaml {NIGHT}",
        "max_num_scheduled_tokens": "override",
    }
    assert found["scheduler"]["chosen_by"] == f"acme_night.configs:preset/night.yaml {NIGHT}"
    assert (found["scheduler"]["wheel"], found["scheduler"]["version"]) == ("acme-night", "2.1")
    assert found["scheduler"]["settings"]["tenants"]["origin"] == "default of acme_night.scheduler:Night.Settings"


def test_members_of_a_chain_have_origins_of_their_own(night):
    found = rows(["+preset=night", "observers.jsonl.steps=true"])
    assert [path for path in found if path.startswith("observers.")] == ["observers.jsonl", "observers.prometheus"]
    assert origins(found["observers.jsonl"]) == {
        "path": f"acme_night.configs:preset/night.yaml {NIGHT}",
        "steps": "override",
    }
    assert found["observers.jsonl"]["chosen_by"] == f"acme_night.configs:preset/night.yaml {NIGHT}"
    assert found["observers.prometheus"]["chosen_by"] == f"acme_night.configs:preset/night.yaml {NIGHT}"


@pytest.mark.parametrize(
    ("words", "path", "chosen_by"),
    [
        ([], "scheduler", ENGINE),
        ([], "observers.prometheus", ENGINE),
        (["scheduler=fcfs"], "scheduler", "override"),
        (["scheduler.name=night"], "scheduler", "override"),
        (["scheduler=bare"], "scheduler", "override"),
        (["+preset=night", "scheduler=fcfs"], "scheduler", "override"),
        (["observers=[otel]"], "observers.otel", "override"),
        (["+observers=otel"], "observers.otel", "override"),
        (["+observers=otel"], "observers.prometheus", ENGINE),
        (["observers.otel={}"], "observers.otel", "override"),
        (["observers.otel={}"], "observers.prometheus", ENGINE),
        (["observers=[prometheus]"], "observers.prometheus", "override"),
    ],
)
def test_who_chose(night, words, path, chosen_by):
    assert rows(words)[path]["chosen_by"] == chosen_by


def test_a_folder_of_ones_own_is_named_as_it_was_typed(night, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "mine/preset/late.yaml": "# @package _global_\ndefaults:\n  - /observers/otel\n  - override /scheduler: small\n",
        "mine/scheduler/small.yaml": "name: fcfs\nmax_num_running_reqs: 2\n",
        "mine/observers/audit.yaml": "jsonl: {path: audit.jsonl}\n",
        "mine/preset/named.yaml": "# @package _global_\nscheduler: {name: night}\nobservers: {jsonl: {steps: true}}\n",
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    late = rows(["config_dir=mine", "+preset=late"])
    assert origins(late["scheduler"]) == {"max_num_running_reqs": "mine/scheduler/small.yaml (config_dir)"}
    assert late["scheduler"]["chosen_by"] == "mine/preset/late.yaml (config_dir) (scheduler=small)"
    assert late["observers.otel"]["chosen_by"] == "mine/preset/late.yaml (config_dir)"
    audit = rows(["config_dir=mine/", "observers=[audit]"])
    assert origins(audit["observers.jsonl"]) == {"path": "mine/observers/audit.yaml (config_dir)"}
    assert audit["observers.jsonl"]["chosen_by"] == "override"
    named = rows(["config_dir=mine", "+preset=named"])
    assert named["scheduler"]["name"] == "night"
    assert named["scheduler"]["chosen_by"] == "mine/preset/named.yaml (config_dir)"
    assert named["observers.jsonl"]["chosen_by"] == "mine/preset/named.yaml (config_dir)"


def test_keys_of_one_mapping_may_come_from_several_places(night, tmp_path):
    (tmp_path / "preset").mkdir()
    text = "# @package _global_\nfrontend: {limits: {headers: 50, connections: 9}}\nscheduler: {tenants: {gold: 1}}\n"
    (tmp_path / "preset/mine.yaml").write_text(text, encoding="utf-8")
    mine = f"{tmp_path}/preset/mine.yaml (config_dir)"
    words = [f"config_dir={tmp_path}", "scheduler=night", "+preset=mine", "frontend.limits={connections: 7}"]
    found = rows([*words, "scheduler.tenants.silver=2"])
    limits = found["frontend"]["settings"]["limits"]
    assert (limits["value"]["connections"], limits["value"]["headers"]) == (7, 50)
    assert limits["origin"] == f"{mine}, override"
    assert (limits["inside"]["connections"], limits["inside"]["headers"]) == ("override", mine)
    assert limits["inside"]["body_bytes"] == "default"
    tenants = found["scheduler"]["settings"]["tenants"]
    assert tenants["inside"] == {"gold": mine, "silver": "override"}
    assert "inside" not in rows(words[:3])["scheduler"]["settings"]["tenants"]


def test_a_value_that_is_taken_out_has_its_default_again(night):
    found = rows(["scheduler=night", "~scheduler.max_num_running_reqs", "process.max_restarts=4", "plugins.disable=[]"])
    assert origins(found["scheduler"]) == {}
    assert origins(found["process"]) == {"max_restarts": "override"}
    assert origins(found["plugins"]) == {"disable": "override"}


def test_the_page_for_people(night, capsys):
    assert explain.run(["+preset=night", "logits_processors=[]", "observers.jsonl.steps=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("4 scheduler"))
    assert lines[at].endswith("acme-night 2.1")
    name, reqs = lines[at + 1], lines[at + 2]
    assert name.split() == ["name", "=", "'night'", "acme_night.configs:preset/night.yaml", "(acme-night", "2.1)"]
    assert reqs.split()[:4] == ["max_num_running_reqs", "=", "5", "acme_night.configs:scheduler/night.yaml"]
    heads = [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert {"tool_parser", "logits_processors", "observers", "process", "plugins"} <= set(heads)
    (none,) = [line for line in lines if line.startswith("  logits_processors")]
    assert none.split() == ["logits_processors", "none", "override"]
    assert explain.run(["observers=[]"]) == 0
    assert any(line.split() == ["observers", "none", "override"] for line in capsys.readouterr().out.splitlines())


def test_what_a_preset_sets_for_another_component_is_refused_with_the_file(night, tmp_path):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset/gold.yaml").write_text("# @package _global_\nscheduler: {tenants: {gold: 1}}\n", "utf-8")
    words = [f"config_dir={tmp_path}", "+preset=gold"]
    assert rows([*words, "scheduler=night"])["scheduler"]["settings"]["tenants"]["value"] == {"gold": 1}
    with pytest.raises(ConfigError, match=r"unknown config key 'scheduler.tenants'; .*preset/gold.yaml \(config_dir\)"):
        open_session([*words, "scheduler=fcfs"])


@pytest.mark.parametrize(
    ("words", "request_fields", "expected"),
    [
        (["scheduler.block_size=32"], {}, "; there is cache.block_size"),
        (["scheduler.blck_size=32"], {}, "; there is cache.block_size"),
        (["frontend=offline"], {"schedulr": "fcfs"}, "; there is scheduler"),  # `generate schedulr=fcfs`
        (["frontend=offline"], {"observrs": "[]"}, "; there is observers"),
    ],
)
def test_a_key_of_another_group_is_shown_where_it_is(words, request_fields, expected):
    with pytest.raises(ConfigError, match="unknown config key") as caught:
        open_session(words, request_fields)
    assert str(caught.value).endswith(expected)


def test_a_key_that_is_near_in_its_own_place_is_enough():
    with pytest.raises(ConfigError) as caught:
        open_session(["frontend.limts.connections=3"])
    assert str(caught.value) == "unknown config key 'frontend.limts'; did you mean limits?"


def test_flags_of_explain_are_checked():
    with pytest.raises(ConfigError, match="no flag --josn; did you mean --json"):
        explain.run(["--josn"])


def test_a_start_traces_nothing(monkeypatch):
    """Only `explain` and errors want to know; composing for them costs nobody else."""
    import core.config.compose

    monkeypatch.setattr(core.config.compose, "trace", lambda *arguments: pytest.fail("traced"))
    open_session(["+preset=chat", "scheduler.max_num_running_reqs=3"])


def test_explaining_and_refusing_import_no_torch():
    code = (
        "import sys; from core.cli import main; codes = [main(['explain', '--json', '+preset=chat', '+observers=jsonl']),"
        "main(['serve', 'port=8123']), main(['serve', 'frontend.limits.conections=3']), main(['serve', 'scheduler=fcsf'])];"
        "assert codes == [0, 1, 1, 1], codes; heavy = {'torch', 'transformers', 'fastapi'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "did you mean frontend.port?" in done.stderr and "did you mean fcfs" in done.stderr
