"""What `doctor` finds among installed plugins: each fault laid out as an install leaves it on disk."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from core.commands import doctor, doctor_installs, plugins
from core.commands.doctor_components import component_check, missing_target
from core.commands.doctor_configs import option_check
from core.commands.doctor_installs import install_check, package_check, plugin_check
from core.config.bounds import MAX_BYTES
from core.config.compose import compose
from core.errors import ConfigError
from core.hookspecs import API_VERSION
from core.plugins import load_plugins

PLUGIN = f"""\
from core.hookspecs import Component, hookimpl
NONET_API = "{API_VERSION}"
@hookimpl
def provide_schedulers():
    yield Component("{{name}}", "{{module}}:Policy", "")
@hookimpl
def provide_config_packages():
    yield "{{module}}"
"""


class Folder:
    """A folder on the module path, as `site-packages` is."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, name: str, text: str = "") -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def install(self, name: str, version: str = "1.0", files: dict[str, str] | None = None, **info: str) -> Path:
        """Lay out distribution `acme-<name>` whose package `acme_<name>` is a plugin called <name>."""
        module = f"acme_{name}"
        # what was compiled from a file of the same size in the same second would be taken for that of the new one
        shutil.rmtree(self.path / module / "__pycache__", ignore_errors=True)
        written = {f"{module}/__init__.py": PLUGIN.format(name=name, module=module), **(files or {})}
        for path, text in written.items():
            self.write(path, text)
        folder = f"{module}-{version}.dist-info"
        self.write(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: {version}\n")
        self.write(f"{folder}/entry_points.txt", f"[nonet.plugins]\n{name} = {module}\n")
        self.write(f"{folder}/RECORD", "".join(f"{path},,\n" for path in (*written, f"{folder}/METADATA")))
        for path, text in info.items():
            self.write(f"{folder}/{path.replace('__', '.')}", text)
        return self.path / module


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = Folder(tmp_path / "site")
    folder.path.mkdir()
    monkeypatch.syspath_prepend(folder.path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


def found(check, *, ok: bool = False) -> list[tuple[str, str, str]]:
    return [(f.level, f.name, f.detail) for f in check(load_plugins()) if ok or f.level != "ok"]


def test_a_whole_install_is_fine(site):
    site.install("one", files={"acme_one/scheduler/one.yaml": "{name: one}"})
    assert found(plugin_check) == found(install_check) == found(option_check) == []
    assert "1 installed plugins, none shadowed" in found(install_check, ok=True)[0][2]


def test_a_target_that_is_not_there_is_found_without_importing_it(site):
    heavy = "raise ImportError('only where a device is')\n\nclass Lottery: ...\n"
    hooks = PLUGIN.format(name="one", module="acme_one")
    for target, problem in (
        ("acme_one.policies.lottery:Lottery", None),
        ("acme_one.policies.lottery:Lotery", "has no Lotery; did you mean Lottery?"),
        ("acme_one.policies.lotery:Lottery", "there is no module acme_one.policies.lotery; did you mean lottery?"),
        ("acme_two:Lottery", "there is no module acme_two"),
    ):
        files = {
            "acme_one/__init__.py": hooks.replace("acme_one:Policy", target),
            "acme_one/policies/__init__.py": heavy,
            "acme_one/policies/lottery.py": heavy,
        }
        site.install("one", files=files)
        sys.modules.pop("acme_one", None)
        details = [detail for level, _, detail in found(component_check) if level == "fail"]
        assert len(details) == (problem is not None), details
        assert problem is None or (problem in details[0] and details[0].startswith("acme-one 1.0: scheduler=one: "))
        assert not [name for name in sys.modules if name.startswith("acme_one.")]


def test_builtin_targets_are_all_there():
    assert [detail for _, _, detail in found(component_check)] == []
    assert missing_target("plugins.frontends.openai_http:OpenAIHttp") is None, "bound by a module's __getattr__"


def test_a_word_that_nobody_provides_is_told(site):
    asks = PLUGIN.format(name="one", module="core.stages.decode").replace(
        '"")', '"", requires=("sampler.logit_processors", "sampler.drafts"), conflicts=("sampler=none",))'
    )
    site.install("one", files={"acme_one/__init__.py": asks.replace(":Policy", ":Plain")})
    ((level, name, detail),) = found(component_check)
    assert (level, name) == ("warn", "one")
    assert "scheduler=one: requires 'sampler.logit_processors', which no installed sampler provides" in detail
    assert "did you mean sampler.logits_processors?" in detail


def test_a_failed_plugin_is_named_with_the_way_out(site):
    site.install("one", files={"acme_one/__init__.py": "raise ImportError('no flash')"})
    assert found(plugin_check) == [
        ("fail", "one", "acme-one 1.0: ImportError: no flash; plugins.disable=[one] goes on without it")
    ]


def test_a_warning_is_told(site):
    site.install("one", files={"acme_one/__init__.py": f"NONET_API = '{API_VERSION}'"})
    assert found(plugin_check) == [("warn", "one", "acme-one 1.0 implements no hook, so it provides nothing")]


def test_a_module_that_is_gone(site):
    """As after an editable install whose folder was moved, or an uninstall that was cut short."""
    package = site.install("one")
    (package / "__init__.py").unlink()
    assert found(install_check) == [
        ("fail", "one", "acme-one: its module acme_one is gone; install it again, or uninstall acme-one")
    ]


def test_a_file_that_is_gone(site):
    package = site.install("one", files={"acme_one/policy.py": "", "acme_one/scheduler/one.yaml": "{name: one}"})
    (package / "policy.py").unlink()
    assert found(install_check) == [("fail", "one", "acme-one: acme_one/policy.py is gone; install it again")]
    (package / "scheduler/one.yaml").unlink()
    assert found(install_check)[0][2].startswith("acme-one: acme_one/policy.py and 1 more are gone")


def test_metadata_that_is_gone(site):
    site.install("one")
    (site.path / "acme_one-1.0.dist-info/METADATA").unlink()
    record = load_plugins().records[-1]
    assert (record.name, record.distribution, record.status) == ("one", "unknown", "loaded")
    assert found(install_check) == [
        (
            "fail",
            "one",
            "its wheel has no metadata: an uninstall was cut short; install it again, or remove what is left",
        )
    ]


def test_a_module_hidden_by_another_folder(site, tmp_path, monkeypatch):
    site.install("one")
    hiding = Folder(tmp_path / "work").write("acme_one/__init__.py", f"NONET_API = '{API_VERSION}'")
    monkeypatch.syspath_prepend(tmp_path / "work")
    ((level, name, detail),) = found(install_check)
    assert (level, name) == ("fail", "one")
    assert detail == f"acme-one: its module acme_one comes from {hiding}, which is not of acme-one; rename that"


def test_an_editable_install_lies_where_it_says(site, tmp_path, monkeypatch):
    source = Folder(tmp_path / "source")
    source.write("acme_one/__init__.py", PLUGIN.format(name="one", module="acme_one"))
    monkeypatch.syspath_prepend(source.path)
    url = {"url": source.path.as_uri(), "dir_info": {"editable": True}}
    package = site.install("one", direct_url__json=json.dumps(url))
    (package / "__init__.py").unlink()
    site.write("acme_one-1.0.dist-info/RECORD", "acme_one-1.0.dist-info/METADATA,,\n")
    assert found(install_check) == []
    elsewhere = {**url, "url": (tmp_path / "moved").as_uri()}
    site.write("acme_one-1.0.dist-info/direct_url.json", json.dumps(elsewhere))
    assert "which is not of acme-one" in found(install_check)[0][2]


def test_a_package_that_two_wheels_ship(site):
    site.install("one")
    site.install("two", files={"acme_one/extra.py": ""})
    assert [finding for finding in found(install_check) if finding[1] == "one"] == [
        ("fail", "one", "acme-one: acme-two ships a package acme_one too; uninstall one of them")
    ]


def test_two_releases_of_one_wheel(site, tmp_path, monkeypatch):
    site.install("one", "1.0")
    site.install("one", "2.0")
    ((level, name, detail),) = found(install_check)
    assert (level, name) == ("fail", "acme-one")
    assert detail.startswith(f"is installed as 1.0 in {site.path} and as 2.0 in {site.path}; uninstall it until none")


def test_a_version_that_the_module_does_not_have(site):
    text = PLUGIN.format(name="one", module="acme_one")
    site.install("one", "1.0", files={"acme_one/__init__.py": f"__version__ = '0.9'\n{text}"})
    site.install(
        "two",
        "1.0",
        files={"acme_two/__init__.py": "__version__ = '1.0.0'\n" + PLUGIN.format(name="two", module="acme_two")},
    )
    site.install(
        "odd", files={"acme_odd/__init__.py": "__version__ = 'main'\n" + PLUGIN.format(name="odd", module="acme_odd")}
    )
    assert found(install_check) == [
        ("warn", "one", "acme-one is 1.0, its module says __version__ = '0.9'; install it again")
    ]


@pytest.mark.parametrize("name", ["core", "plugins", "configs"])
def test_a_wheel_that_ships_a_package_called_as_ours(site, name, monkeypatch):
    site.install("one", files={f"{name}/acme_extra.py": ""})
    monkeypatch.setattr(doctor_installs, "packages_distributions", lambda: {name: ["nonet", "acme-one"]})
    assert [(f.level, f.name, f.detail) for f in package_check() if f.level != "ok"] == [
        ("fail", name, "acme-one ships a package of this name too; uninstall it")
    ]


def test_that_owner_is_found_on_disk(site):
    site.install("one", files={"plugins/acme_extra.py": ""})
    assert "acme-one" in doctor_installs.packages_distributions()["plugins"]


def test_a_folder_of_our_name_that_hides_ours(tmp_path, monkeypatch):
    origin = Folder(tmp_path).write("configs/__init__.py")
    monkeypatch.setattr(
        doctor_installs, "_origin", lambda module: origin if module == "configs" else Path(doctor.__file__).parents[1]
    )
    assert [(f.level, f.detail) for f in package_check() if f.name == "configs"] == [
        ("fail", f"comes from {tmp_path}, not {Path(doctor.__file__).parents[2]}: a folder of that name shadows ours")
    ]


def test_an_option_that_two_packages_give(site):
    site.install("one", files={"acme_one/scheduler/fcfs.yaml": "{name: fcfs}", "acme_one/preset/night.yaml": "{}"})
    site.install("two", files={"acme_two/preset/night.yaml": "{}"})
    assert found(option_check) == [
        ("fail", "scheduler/fcfs", "is in configs and in acme_one, and only the first counts; rename or disable one"),
        ("fail", "preset/night", "is in acme_one and in acme_two, and only the first counts; rename or disable one"),
    ]


@pytest.mark.parametrize(
    ("option", "text", "problem"),
    [
        ("scheduler/one", "{name: onne}", "one.yaml names no scheduler that is installed: 'onne'; did you mean one"),
        ("scheduler/one", "tickets: 10", "one.yaml has no `name: …`, so it selects nothing"),
        ("scheduler/one", "{name: [", "one.yaml cannot be read: "),
        (
            "observers/one",
            "promtheus: {}",
            "one.yaml names no observers that is installed: 'promtheus'; did you mean prom",
        ),
        ("scheduler/one", "# @package _global_\nscheduler: {name: fcfs}", None),
        ("scheduler/one", "defaults: [fcfs]\ntickets: 3", None),
        ("preset/one", "{name: anything}", None),
        ("one", "{name: anything}", None),
    ],
)
def test_an_option_that_selects_nothing(site, option, text, problem):
    site.install("one", files={f"acme_one/{option}.yaml": text})
    findings = found(option_check)
    assert (findings == []) == (problem is None)
    for level, name, detail in findings:
        assert (level, name) == ("fail", option)
        assert detail.startswith("acme_one: ") and problem in detail


TENFOLD = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))
BOMBS = {
    "aliases": f"name: bomb\na0: &a0 [x]\n{TENFOLD}\n",
    "of itself": "name: bomb\na: &a [*a]\n",
    "deep": f"name: bomb\na: {'[' * 200}{']' * 200}\n",
    "large": f"name: bomb\n#{'x' * MAX_BYTES}\n",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_file_that_would_fill_the_memory(site, text):
    site.install("bomb", files={"acme_bomb/scheduler/bomb.yaml": text})
    plugins = load_plugins()
    ((_, option, told),) = found(option_check)
    assert option == "scheduler/bomb"
    assert "for a config" in told
    compose([], plugins)  # what is not selected is not read
    with pytest.raises(ConfigError, match="for a config"):
        compose(["scheduler=bomb"], plugins)


def test_our_own_options_select_what_there_is():
    assert found(option_check) == []


def test_compilers_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX", "CUDA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path / "version")
    assert [(f.level, f.name) for f in doctor.compiler_check()] == [
        ("warn", "C compiler"), ("warn", "C++ compiler"), ("info", "nvcc"),
    ]  # fmt: skip
    (tmp_path / "version").touch()
    assert doctor.compiler_check()[-1].level == "warn"
    for name in ("clang", "nvcc"):
        (tmp_path / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / name).chmod(0o700)
    assert [(f.level, f.name) for f in doctor.compiler_check()] == [
        ("ok", "C compiler"), ("warn", "C++ compiler"), ("ok", "nvcc"),
    ]  # fmt: skip


def test_optional_dependencies_that_are_missing_are_only_told(site, monkeypatch):
    site.write(
        "ours-1.0.dist-info/METADATA",
        "Metadata-Version: 2.1\nName: ours\nVersion: 1.0\nRequires-Dist: pytest\n"
        "Provides-Extra: dev\nProvides-Extra: trace\nProvides-Extra: other\nProvides-Extra: none\n"
        "Requires-Dist: surely-not-installed>=1; extra == 'trace'\nRequires-Dist: pytest; extra == 'trace'\n"
        "Requires-Dist: pytest>=1; extra == 'other'\nRequires-Dist: pytest; python_version < '3' and extra == 'none'\n",
    )
    ours = PathDistribution(site.path / "ours-1.0.dist-info")
    monkeypatch.setattr(doctor, "distribution", lambda name: ours)
    assert [(f.level, f.name, f.detail) for f in doctor.extra_check()] == [
        ("info", "extra trace", "no surely-not-installed; pip install 'nonet[trace]' where you want it"),
        ("ok", "extra other", "pytest"),
        ("ok", "extra none", "nothing to install here"),
    ]


def test_plugins_that_cannot_even_be_listed_are_one_finding(monkeypatch):
    monkeypatch.setenv("NONET_PLUGINS_START_TIMEOUT", "soon")
    (finding,) = doctor.plugin_findings()
    assert finding.level == "fail" and "NONET_PLUGINS_START_TIMEOUT=soon" in finding.detail


def test_the_list_shows_what_is_offered_and_a_word_that_nobody_provides(site, capsys):
    long = "a_scheduler_whose_name_is_longer_than_its_column"
    hooks = PLUGIN.format(name=long, module="core.stages.decode").replace(":Policy", ":Plain")
    words = (
        'Component("'
        + long
        + '", "core.stages.decode:Plain", "turns", provides=("drafts",), requires=("sampler.logprob",))'
    )
    start = hooks.index("Component(", hooks.index("yield"))
    hooks = hooks[:start] + words + hooks[hooks.index("\n", start) :]
    site.install("one", files={"acme_one/__init__.py": hooks})
    assert plugins.run(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"    scheduler={long}  turns" in lines
    assert any(line.strip() == "provides drafts; requires sampler.logprob" for line in lines)
    assert any("warning: " in line and "did you mean sampler.logprobs?" in line for line in lines)
