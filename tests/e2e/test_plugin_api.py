"""Which strangers' wheels start, in a fresh environment: one of an older API runs, every other is named in one line with
plugin, wheel, reason and the way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from core.hookspecs import API_VERSION
from core.testing.harness.site import NOT_SOURCE, Site, build_nonet, build_wheels
from core.testing.tiny_models import make_tiny_model
from core.version import nonet_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOURCES = Path(__file__).resolve().parents[1] / "data/plugin_wheels"
TOO_NEW = {
    "next_minor": (
        "acme-next-minor 3.0",
        f"is written for plugin API 1.9, this Nonet has {API_VERSION}; "
        f"install a release of acme-next-minor for API {API_VERSION}, or a newer Nonet",
    ),
    "next_major": (
        "acme-next-major 4.0",
        f"is written for plugin API 2.0, this Nonet has {API_VERSION}; "
        "install a release of acme-next-major for API 1, or a newer Nonet",
    ),
    "ahead": ("acme-ahead 5.0", "ImportError: cannot import name 'Tournament' from 'core.scheduling.policy'"),
}
BAD = {
    "base_exception": "Panic: out of luck",
    "builtin_name": f"its scheduler=fcfs is also provided by plugins.schedulers (nonet {nonet_version()}); rename it",
    "exits": "SystemExit: this machine is not supported",
    "import_error": "ImportError: libfast.so.3: cannot open shared object file: no such file",
    "interrupts": "KeyboardInterrupt",
    "no_api": f"does not say which plugin API it is written for; its module needs the line NONET_API = '{API_VERSION}'",
    "no_colon": "scheduler=no_colon: target='acme_bad.no_colon.X' is not written as \"package.module:Class\"",
    "no_component": "provide_schedulers must yield core.hookspecs.Component, not tuple",
    "no_module": "ModuleNotFoundError: No module named 'acme_bad.no_module'",
    "no_name": "provide_schedulers yields a component without a name ('')",
    "raises": "RuntimeError: no licence found",
    "slow": "did not load within 8 s; give it longer with plugins.start_timeout=…",
    "unknown_hook": "implements an unknown hook 'provide_scheduler'; did you mean "
    "provide_schedulers, provide_samplers, provide_caches?",
}
USABLE = ("heavy", "loose_settings")
STRANGERS = (*TOO_NEW, *BAD, *USABLE, "twin", "acme-namesake")
"""All but `turns` of acme-turns and `own` of acme-own, which are of API 1.0. The plugin of acme-namesake is called `turns` too,
so its wheel is what is named."""

PROMPT = ("generate", "prompt=hello, world", "max_tokens=4", "temperature=0", "plugins.start_timeout=8")


def only(*kept: str) -> str:
    """The override that leaves out all strangers but acme-turns, acme-own and these."""
    return f"plugins.disable=[{','.join(name for name in STRANGERS if name not in kept)}]"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    """All of them in one environment, for it takes long to make: `plugins.disable` says who takes part."""
    folder = tmp_path_factory.mktemp("site")
    copies = [
        Path(shutil.copytree(source, folder / "sources" / source.name, ignore=NOT_SOURCE))
        for source in sorted(SOURCES.iterdir())
    ]
    return Site.make(folder, [build_nonet(folder), *build_wheels(copies, folder / "wheels")])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_plugin_for_an_older_minor_api_runs_a_request(site, model):
    explained = json.loads(site.said("explain", "--json", "scheduler=turns", only()))
    (row,) = [row for row in explained if row.get("stage") == "scheduler"]
    assert (row["class"], row["wheel"], row["version"]) == ("acme_turns.turns:Turns", "acme-turns", "1.4")
    assert row["settings"]["max_num_running_reqs"]["value"] == 3
    request = (*PROMPT, f"model.source={model}", only(), "process.separate=true")
    theirs = site.said(*request, "scheduler=turns")
    assert theirs == site.said(*request) and len(theirs) > 1


def test_a_cache_and_a_scheduler_of_an_older_api_that_inherit_nothing_run_requests(site, model, tmp_path):
    """Four at once over a pool of 16 blocks, where plans, prefixes and preemption are theirs; then one alone."""
    prompts = tmp_path / "prompts.jsonl"
    words = "one two three four five six seven eight nine ten eleven twelve"
    lines = [{"prompt": f"{words} {index}", "max_tokens": 24, "temperature": 0} for index in range(4)]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    request = ("generate", f"input={prompts}", f"model.source={model}", only(), "process.separate=true")
    theirs = site.said(*request, "scheduler=own", "cache=own", "cache.num_blocks=16")
    assert theirs == site.said(*request) and len(theirs.splitlines()) == 4
    alone = site.said(*PROMPT, f"model.source={model}", only(), "scheduler=own", "cache=own")
    assert alone == site.said(*PROMPT, f"model.source={model}", only())


def listed(site: Site, **environ: str) -> list[dict[str, object]]:
    return json.loads(site.said("plugins", "list", "--json", NONET_PLUGINS_START_TIMEOUT="8", **environ))


def test_plugins_lists_each_with_its_reason(site):
    rows = {(row["plugin"], row["distribution"]): row for row in listed(site)}
    for name, (wheel, reason) in TOO_NEW.items():
        row = rows[name, wheel.split()[0]]
        assert (row["status"], row["components"]) == ("failed", []) and row["reason"].startswith(reason)
    for name, reason in BAD.items():
        row = rows[name, "acme-bad"]
        assert (row["status"], row["version"], row["components"]) == ("failed", "6.6", [])
        assert row["reason"].startswith(reason) and row["reason"].isprintable()
    assert rows["heavy", "acme-bad"]["warnings"] == [
        "imports torch when it is listed; import it in the modules that its targets name"
    ]
    assert rows["loose_settings", "acme-bad"]["status"] == "loaded"
    for wheel, other in (("acme-turns", "acme-namesake 2.1"), ("acme-namesake", "acme-turns 1.4")):
        assert rows["turns", wheel]["reason"].startswith(f"the plugin name 'turns' is also that of {other}; ")


def test_what_an_older_plugin_provides_is_listed_as_ours_is(site):
    rows = listed(site, NONET_PLUGINS_DISABLE=",".join(STRANGERS))
    (row,) = [row for row in rows if row["distribution"] == "acme-turns"]
    assert (row["api"], row["builtin"], row["warnings"], row["status"]) == ("1.0", False, [], "loaded")
    (component,) = row["components"]
    assert component == {
        "group": "scheduler",
        "name": "turns",
        "target": "acme_turns.turns:Turns",
        "summary": "the newest waiting request first",
        "settings": "acme_turns.turns:Turns.Settings",
        "provides": [],
        "requires": [],
        "conflicts": [],
        "accepts": {},
        "params": None,
    }


def refusal(name: str, wheel: str, reason: str) -> str:
    return (
        f"nonet generate: installed plugins cannot be used: {name} ({wheel}): {reason}; go on without: "
        f"plugins.disable=[{name}] or plugins.on_failure=disable\n"
    )


@pytest.mark.parametrize("name", ["next_minor", "next_major"])
def test_a_plugin_for_a_newer_api_refuses_the_start_in_one_line(site, name):
    assert site.refused(*PROMPT, only(name)) == refusal(name, *TOO_NEW[name])


def test_what_its_wheel_asks_for_explains_a_failed_import(site):
    said = site.refused(*PROMPT, only("ahead"))
    assert " ahead (acme-ahead 5.0): ImportError: cannot import name 'Tournament' from 'core.scheduling.policy'" in said
    assert f"; acme-ahead asks for nonet>=7.1, and {nonet_version()} is installed; " in said


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plugin_refuses_the_start_in_one_line(site, name):
    assert site.refused(*PROMPT, only(name)) == refusal(name, "acme-bad 6.6", BAD[name])


def test_a_name_that_two_wheels_claim_refuses_the_start(site):
    assert "twin (acme-twin 0.2): its scheduler=turns is also provided by turns (acme-turns 1.4); " in site.refused(
        *PROMPT, only("twin")
    )
    said = site.refused(*PROMPT, only("acme-namesake"))
    assert "turns (acme-turns 1.4): the plugin name 'turns' is also that of acme-namesake 2.1; " in said
    assert "plugins.disable=[acme-namesake,acme-turns]" in said


def test_with_on_failure_disable_both_processes_go_on_without_them(site, model):
    """Also without the slow one, which the engine process does not wait for again."""
    request = (*PROMPT, f"model.source={model}", "process.separate=true")
    done = site.nonet(
        *request, "plugins.on_failure=disable", "plugins.disable=[heavy,acme-namesake,twin]", "scheduler=turns"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == site.said(*request, only())
    for name, wheel in (*((n, w) for n, (w, _) in TOO_NEW.items()), *((n, "acme-bad 6.6") for n in BAD)):
        assert done.stderr.count(f"plugin {name} ({wheel}) is left out: ") == 1


def test_what_starts_nothing_works_beside_them_and_names_what_config_selects(site):
    said = site.refused("explain", "scheduler=minor", only("next_minor"))
    assert "no scheduler is called 'minor'" in said and "next_minor (acme-next-minor 3.0): is written for" in said
    assert "acme_turns.turns:Turns" in site.said("explain", "scheduler=turns", only(*TOO_NEW))
    assert site.nonet("models", "list").returncode == 0
    doctor = site.nonet("doctor", NONET_PLUGINS_START_TIMEOUT="8")
    assert doctor.returncode == 1
    for name, reason in {**BAD, **{name: reason for name, (_, reason) in TOO_NEW.items()}}.items():
        (line,) = [
            line
            for line in doctor.stdout.splitlines()
            if line.startswith("fail") and f" {name} " in line and reason in line
        ]
        assert f"plugins.disable=[{name}]" in line


def test_loose_settings_are_named_when_they_are_selected(site, model):
    assert site.said("explain", only("loose_settings"))
    assert (
        "scheduler=loose (plugin loose_settings, acme-bad 6.6): acme_bad.loose:Loose.Settings must be frozen and refuse "
        "unknown keys"
    ) in site.refused("explain", "scheduler=loose", only("loose_settings"))


def test_disabling_what_is_not_installed_is_refused_with_near_matches(site):
    assert "no plugin or distribution is called 'acme-turn'; did you mean acme-turns, " in site.refused(
        "explain", "plugins.disable=[acme-turn]"
    )
