"""`plugins new`: what it writes is complete, clean and named right; what it cannot write it refuses in words."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

from core import plugins
from core.assembly import describe
from core.authoring.kinds import KINDS
from core.authoring.scaffold import write_package
from core.cli import main
from core.components import CHAINS, GROUPS, hook_of
from core.config.compose import compose
from core.errors import ConfigError
from core.hookspecs import API_VERSION
from core.settings import Settings


def test_there_is_a_template_for_every_group():
    assert tuple(KINDS) == (*GROUPS, *CHAINS)


@pytest.mark.parametrize("group", KINDS)
def test_a_package_is_complete_and_clean(tmp_path, group):
    package = write_package("acme-turns2", group, tmp_path)
    texts = {path.relative_to(package): path.read_text("utf-8") for path in package.rglob("*") if path.is_file()}
    names = {str(path) for path in texts}
    assert {
        "pyproject.toml",
        "README.md",
        "acme_turns2/plugin.py",
        f"acme_turns2/{group}.py",
        f"acme_turns2/configs/{group}/acme_turns2.yaml",
        "tests/test_contract_acme_turns2.py",
        "tests/test_installed_acme_turns2.py",
    } <= names
    for path, text in texts.items():
        assert not re.search(r"acme.?word|\{\{\w+\}\}", text, re.IGNORECASE), path
        if path.suffix == ".py":
            ast.parse(text)
    project = tomllib.loads(texts[next(path for path in texts if path.name == "pyproject.toml")])["project"]
    assert project["entry-points"]["nonet.plugins"] == {"acme_turns2": "acme_turns2.plugin"}
    hooks = texts[next(path for path in texts if path.name == "plugin.py")]
    assert f'NONET_API = "{API_VERSION}"' in hooks and f"def {hook_of(group)}()" in hooks
    for command in (("check", "."), ("format", "--check", ".")):
        subprocess.run([sys.executable, "-m", "ruff", *command, "-q"], cwd=package, check=True, timeout=60)


@pytest.mark.parametrize("group", KINDS)
def test_the_command_of_the_readme_can_be_pasted_and_composes(tmp_path, monkeypatch, group):
    module = f"acme_pasted_{group}"
    package = write_package(module.replace("_", "-"), group, tmp_path)
    (line,) = re.findall(r"^nonet serve (.*)$", (package / "README.md").read_text("utf-8"), re.MULTILINE)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [Point(module)])
    found = plugins.load_plugins()
    described = describe(Settings.from_config(compose(shlex.split(line), found).values), found)
    chosen = [part.provided.component.name for part in described.parts if part.group == group]
    assert module in chosen
    assert group != "grammars" or chosen[0] == module, "the first that takes a grammar compiles it"


class Point:
    """The entry point of a package that lies on the path and is not installed."""

    def __init__(self, module):
        self.name, self.value = module, f"{module}.plugin"
        self.dist = SimpleNamespace(metadata={"Name": module}, version="0.1.0")

    def load(self):
        return importlib.import_module(self.value)


@pytest.mark.parametrize(
    "name", ["Acme", "acme_turns", "1acme", "acme-", "-x", "core", "plugins", "a/b", "../x", "acme turns"]
)
def test_a_bad_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="no name for a package"):
        write_package(name, "scheduler", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["json", "torch", "prometheus-client", "class"])
def test_a_name_that_would_hide_a_module_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="is a module already"):
        write_package(name, "scheduler", tmp_path)


def test_what_exists_is_not_written_over(tmp_path):
    write_package("acme", "scheduler", tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        write_package("acme", "sampler", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["acme"], "usage: plugins new NAME --stage STAGE"),
        (["--stage", "scheduler"], "usage"),
        (["acme", "other", "--stage", "scheduler"], "usage"),
        (["acme", "--stage", "schedular"], "did you mean scheduler"),
        (["acme", "--stage=samplr"], "did you mean sampler"),
        (["acme", "--stge", "scheduler"], "unknown argument '--stge'"),
        (["acme", "--stage", "scheduler", "--dir"], "usage"),
        (["acme", "--stage", "scheduler", "--dir", "/proc/nowhere"], "nowhere"),
    ],
)
def test_the_command_says_what_is_wrong(capsys, arguments, said):
    assert main(["plugins", "new", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("word", ["new", "check", "matrix", "faults"])
def test_each_tool_says_how_it_is_used(capsys, word):
    assert main(["plugins", word, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: plugins {word} ")


@pytest.mark.parametrize(("word", "group"), [("observer", "observers"), ("logits_processor", "logits_processors")])
def test_one_of_a_chain_may_be_asked_for_in_the_singular(tmp_path, capsys, word, group):
    assert main(["plugins", "new", "acme", "--stage", word, "--dir", str(tmp_path)]) == 0
    assert (tmp_path / f"acme/acme/{group}.py").is_file()
    assert "pip install -e" in capsys.readouterr().out
