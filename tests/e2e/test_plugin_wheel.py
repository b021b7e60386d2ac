"""A stranger's wheel beside ours in a fresh environment: found, configured, run, tested, broken and removed."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from core.testing.harness.site import NOT_SOURCE, ROOT, Site, build_wheels, succeed
from core.testing.tiny_models import make_tiny_model
from plugins.frontends.openai_http.auth import tenant_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEMPLATE = ROOT / "examples/nonet_lottery"


def build_wheel(source: Path, target: Path) -> Path:
    """`source` must be a copy: setuptools leaves files in it."""
    (wheel,) = build_wheels([source], target)
    return wheel


def plugins_of(site: Site) -> dict[str, dict[str, object]]:
    return {row["plugin"]: row for row in json.loads(site.said("plugins", "--json"))}


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="module")
def nonet_wheel(tmp: Path) -> Path:
    """Built from a copy that has the tests too, so that their absence from the wheel is the wheel's own doing."""
    source = tmp / "nonet"
    source.mkdir()
    for name in ("core", "plugins", "configs", "tests", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=NOT_SOURCE)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    return build_wheel(source, tmp / "nonet-wheel")


@pytest.fixture(scope="module")
def template(tmp: Path) -> Path:
    return Path(shutil.copytree(TEMPLATE, tmp / "nonet_lottery", ignore=NOT_SOURCE))


@pytest.fixture(scope="module")
def lottery_wheel(tmp: Path, template: Path) -> Path:
    return build_wheel(template, tmp / "lottery-wheel")


@pytest.fixture(scope="module")
def site(tmp: Path, nonet_wheel: Path, lottery_wheel: Path) -> Site:
    return Site.make(tmp, [nonet_wheel, lottery_wheel])


@pytest.fixture(scope="module")
def model(tmp: Path) -> Path:
    return make_tiny_model(tmp / "tiny")


def test_our_wheel_holds_configs_and_the_typing_marker_and_no_tests(nonet_wheel):
    names = zipfile.ZipFile(nonet_wheel).namelist()
    ours = [str(path.relative_to(ROOT)) for path in ROOT.glob("configs/**/*.yaml")]
    assert ours and set(ours) <= set(names)
    assert "core/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"core", "plugins", "configs"}
    modules = [str(p.relative_to(ROOT)) for top in ("core", "plugins") for p in (ROOT / top).rglob("*.py")]
    assert set(modules) <= set(names), "a folder without __init__.py stays out of the wheel"


def test_their_wheel_holds_their_configs_and_nothing_of_ours(lottery_wheel):
    names = zipfile.ZipFile(lottery_wheel).namelist()
    assert {"nonet_lottery/configs/scheduler/lottery.yaml", "nonet_lottery/configs/preset/lottery.yaml"} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"nonet_lottery"}


def test_both_are_imported_from_the_fresh_environment(site):
    code = "import configs, core, nonet_lottery, plugins; print(*(m.__file__ for m in (configs, core, nonet_lottery, plugins)))"
    for path in succeed([site.python, "-c", code], cwd=site.work).split():
        assert Path(path).is_relative_to(site.venv)


def test_plugins_lists_it_with_wheel_and_version(site):
    row = plugins_of(site)["lottery"]
    assert (row["distribution"], row["version"], row["status"], row["builtin"]) == (
        "nonet-lottery", "0.1.0", "loaded", False,
    )  # fmt: skip
    assert row["components"][0]["target"] == "nonet_lottery.lottery:Lottery"
    assert row["hooks"] == ["provide_config_packages", "provide_observers", "provide_schedulers"]


def test_explain_names_wheel_and_the_file_of_each_value(site):
    lines = site.said("explain", "+preset=lottery", "scheduler.seed=3").splitlines()
    (head,) = [line for line in lines if line.startswith("4 scheduler")]
    assert "lottery" in head and "nonet_lottery.lottery:Lottery" in head and head.endswith("nonet-lottery 0.1.0")
    rows = {
        row["stage"]: row for row in json.loads(site.said("explain", "--json", "+preset=lottery", "scheduler.seed=3"))
    }
    assert rows["scheduler"]["settings"] == {
        "tickets": {"value": 10, "origin": "nonet_lottery.configs:scheduler/lottery.yaml (nonet-lottery 0.1.0)"},
        "tenant_tickets": {
            "value": {"gold": 30},
            "origin": "nonet_lottery.configs:preset/lottery.yaml (nonet-lottery 0.1.0)",
        },
        "seed": {"value": 3, "origin": "override"},
        "priority_factor": {"value": 2.0, "origin": "default of nonet_lottery.lottery:Lottery.Settings"},
        "max_num_scheduled_tokens": {"value": 2048, "origin": "default of nonet_lottery.lottery:Lottery.Settings"},
        "max_num_running_reqs": {"value": 64, "origin": "default of nonet_lottery.lottery:Lottery.Settings"},
        "preemption": {"value": "auto", "origin": "default of nonet_lottery.lottery:Lottery.Settings"},
    }
    assert rows["sampler"]["wheel"] == "nonet"


def test_a_tenant_is_named_as_the_readme_says(site):
    """A tenant's name is a digest, which may begin with a digit."""
    readme = (TEMPLATE / "README.md").read_text("utf-8")
    (named,) = re.findall(r"'(scheduler\.tenant_tickets=\{(\w+): 30\})'", readme)
    assert named[1] == tenant_of(b"key-of-gold") and f'"tenant": "{named[1]}"' in readme
    for argument, tenant in (named, ("scheduler.tenant_tickets={9f86d081884c7d65: 30}", "9f86d081884c7d65")):
        rows = {row["stage"]: row for row in json.loads(site.said("explain", "--json", "scheduler=lottery", argument))}
        assert rows["scheduler"]["settings"]["tenant_tickets"] == {"value": {tenant: 30}, "origin": "override"}


def test_a_request_runs_through_it_and_the_observer_waits_to_be_chosen(site, model):
    request = ("prompt=hello, world", "max_tokens=4", "temperature=0", f"model.source={model}")
    ours = site.said("generate", *request)
    assert site.said("generate", "+preset=lottery", *request) == ours and len(ours) > 1
    assert not list(site.work.glob("*.jsonl")), "an observer ran that nobody has chosen"
    log = site.work / "requests.jsonl"
    chosen = ("observers=[prometheus,lottery_log]", f"observers.lottery_log.path={log}", "process.separate=true")
    assert site.said("generate", "+preset=lottery", *request, *chosen) == ours
    (row,) = map(json.loads, log.read_text("utf-8").splitlines())
    assert (row["finish_reasons"], row["completion_tokens"]) == (["length"], 4)
    assert 0 < row["ttft_s"] <= row["e2e_s"]


def run_tests(site: Site, tests: Path, *options: str) -> str:
    """Run a copy of `tests` without the sources beside it, so that the installed package is what is tested."""
    copy = site.work / f"tests-of-{tests.parent.name}"
    shutil.copytree(tests, copy / "tests", ignore=NOT_SOURCE)
    shutil.copy(tests.parent / "pyproject.toml", copy)
    command = [site.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, copy]
    return succeed(command, cwd=site.work, seconds=600)


def test_its_own_tests_pass_there(site, template):
    assert " passed" in run_tests(site, template / "tests")


def test_a_typo_is_answered_with_near_matches(site):
    assert "unknown config key 'scheduler.tikets'; did you mean tickets" in site.refused(
        "explain", "+preset=lottery", "scheduler.tikets=1"
    )
    assert "did you mean lottery?" in site.refused("explain", "scheduler=lotery")
    assert "did you mean lottery?" in site.refused("explain", "+preset=lotery")
    assert "did you mean lottery_log" in site.refused("explain", "observers=[lotery_log]")
    assert "did you mean lottery" in site.refused("explain", "plugins.disable=[lotery]")
    assert "did you mean path?" in site.refused("explain", "observers=[lottery_log]", "observers.lottery_log.pth=x")
    assert "scheduler.tickets" in site.refused("explain", "scheduler=lottery", "scheduler.tickets=0")


def test_without_the_wheel_the_choice_is_gone(site, lottery_wheel):
    site.uninstall("nonet-lottery")
    try:
        assert "lottery" not in plugins_of(site)
        assert "no scheduler is called 'lottery'; choose one of: " in site.refused("explain", "scheduler=lottery")
        assert "no preset is called 'lottery'" in site.refused("explain", "+preset=lottery")
    finally:
        site.install(lottery_wheel)


BROKEN = {
    "pyproject.toml": """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "nonet-broken"
version = "3.2"
[project.entry-points."nonet.plugins"]
broken = "nonet_broken"
[tool.setuptools]
py-modules = ["nonet_broken"]
""",
    "nonet_broken.py": 'raise ImportError("libfast.so.3: cannot open shared object file")\n',
}


def test_a_broken_stranger_is_named_and_refuses_the_start(site, tmp, model):
    source = tmp / "broken"
    source.mkdir()
    for name, text in BROKEN.items():
        (source / name).write_text(text, encoding="utf-8")
    with site.installed(build_wheel(source, tmp / "broken-wheel"), "nonet-broken"):
        row = plugins_of(site)["broken"]
        assert (row["distribution"], row["version"], row["status"]) == ("nonet-broken", "3.2", "failed")
        assert row["reason"] == "ImportError: libfast.so.3: cannot open shared object file"
        assert "libfast.so.3" in site.said("plugins")
        assert "plugins that failed to load: broken (nonet-broken 3.2)" in site.refused("explain", "sampler=fastest")
        generate = ("generate", "+preset=lottery", "prompt=x", "max_tokens=2", f"model.source={model}")
        assert "broken (nonet-broken 3.2): ImportError: libfast.so.3" in site.refused(*generate)
        assert site.said(*generate, "plugins.on_failure=disable")
        assert site.said(*generate, "plugins.disable=[broken]")
