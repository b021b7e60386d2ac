"""Bad plugins are caught by the checks that they name, through the real command; all of them by `make check-plugins`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

from core.contracts import CONTRACTS
from core.lab.bad_plugins import ROOT, check_seed, check_seeds, seeds
from core.testing.conformance_child import AFTER_EACH
from core.testing.harness.server import install_plugin
from core.testing.plugin import PluginContract
from core.testing.suites import OPTIONAL

SEEDS = {seed.name: seed for seed in seeds()}
HANDFUL = (
    "bad-scheduler-leaksblock",
    "bad-scheduler-changessettings",
    "bad-scheduler-endstheprocess",
    "bad-heavy-import",
    "bad-brings-configs",
)
GOOD = """\
from core.hookspecs import Component, hookimpl
from core.stages.decode import Plain

NONET_API = "1.1"


class Good(Plain):
    pass


@hookimpl
def provide_decodes():
    yield Component("good", "good_decode:Good", "one token per step", provides=("nothing_special",))
"""


def test_there_are_many_and_each_names_a_check_that_exists():
    checks = {name for name in vars(PluginContract) if name.startswith("test_")} | {AFTER_EACH}
    for path in [*(promise.suite for promise in CONTRACTS.values()), *OPTIONAL.values()]:
        module, _, name = path.partition(":")
        checks |= {name for name in dir(getattr(importlib.import_module(module), name)) if name.startswith("test_")}
    assert len(SEEDS) >= 25 and len(SEEDS) == len(seeds()), "two go by one name"
    assert not {seed.name: seed.expected for seed in SEEDS.values() if seed.expected not in checks}


def test_every_group_has_a_bad_plugin():
    assert {seed.source.stem for seed in SEEDS.values()} >= {f"bad_{group}" for group in CONTRACTS}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_handful_is_caught_each_by_the_check_it_names():
    missed = {caught.name: dict(caught.by) for caught in check_seeds([SEEDS[n] for n in HANDFUL]) if not caught.caught}
    assert not missed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_check_that_hangs_ends_and_the_others_are_still_run():
    caught = check_seed(SEEDS["bad-scheduler-hangs"], timeout=5.0)
    assert list(caught.by) == [caught.expected]
    assert "did not end within 5 s, in bad_scheduler.py:" in caught.by[caught.expected]


@pytest.mark.slow
def test_a_good_plugin_passes_and_the_last_line_says_so(tmp_path):
    source = tmp_path / "good_decode.py"
    source.write_text(GOOD, encoding="utf-8")
    site = tmp_path / "site"
    site.mkdir()
    environ = {**os.environ, **install_plugin(site, "good-decode", [source])}
    command = [sys.executable, "-m", "core", "plugins", "check", "good-decode"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("plugin good-decode ") and lines[1].startswith("decode=good ")
    assert lines[-1].startswith("checked 1 component: ") and lines[-1].endswith(" checks, 0 failed")


@pytest.mark.slow
def test_json_names_the_failed_check_and_the_exit_code_is_1(tmp_path):
    source = tmp_path / "bad_one.py"
    source.write_text(GOOD.replace("good_decode", "bad_one").replace("one token per step", ""), encoding="utf-8")
    site = tmp_path / "site"
    site.mkdir()
    environ = {**os.environ, **install_plugin(site, "bad-one", [source])}
    command = [sys.executable, "-m", "core", "plugins", "check", "bad_one", "--json", "--component", "good"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    package, component = json.loads(done.stdout)["components"]
    (failed,) = package["failed"]
    assert failed["check"] == "test_each_component_says_in_a_line_what_it_is" and "summary=''" in failed["reason"]
    assert (component["subject"], component["failed"]) == ("decode=good", [])
