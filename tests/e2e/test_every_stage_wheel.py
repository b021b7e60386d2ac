"""For every stage and part: a package written by `plugins new`, built as a wheel of its own, replaces it in a fresh
environment, and a real request runs through it. Nothing of this checkout is imported there."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from core.authoring.kinds import KINDS
from core.authoring.scaffold import write_package
from core.components import CHAINS
from core.hookspecs import API_VERSION
from core.testing.harness.frontend_thread import wait_until
from core.testing.harness.site import ENVIRON, NOT_SOURCE, Site, build_nonet, build_wheels, succeed
from core.testing.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

GROUPS = tuple(KINDS)


def name_of(group: str) -> str:
    return f"acme-{group.replace('_', '-')}"


def module_of(group: str) -> str:
    return name_of(group).replace("-", "_")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    return {group: write_package(name_of(group), group, folder) for group in GROUPS}


@pytest.fixture(scope="module")
def site(tmp_path_factory, packages):
    folder = tmp_path_factory.mktemp("site")
    copies = [shutil.copytree(path, folder / "sources" / path.name, ignore=NOT_SOURCE) for path in packages.values()]
    wheels = build_wheels(copies, folder / "wheels")
    assert len(wheels) == len(GROUPS)
    return Site.make(folder, [build_nonet(folder), *wheels])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def ours(site, model):
    """What the built-in pipeline answers."""
    return generated(site, model)


def selected(group: str) -> str:
    return f"{group}.{module_of(group)}={{}}" if group in CHAINS else f"{group}={module_of(group)}"


def selecting(group: str) -> tuple[str, ...]:
    """With what must be selected beside it."""
    return (*KINDS[group].beside, selected(group))


def generated(site: Site, model, *overrides: str) -> str:
    options = ("max_tokens=12", "temperature=0", f"model.source={model}", "model.dtype=float32")
    return site.said("generate", "prompt=hello, hello, hello", *options, *overrides)


def test_a_predictor_beside_a_scheduler_that_never_asks_is_refused(site):
    refused = site.refused("explain", selected("predictor"))
    assert "requires scheduler.predictor" in refused and "choose scheduler=srtf" in refused


def test_all_of_them_are_found(site):
    rows = {row["plugin"]: row for row in json.loads(site.said("plugins", "list", "--json"))}
    for group in GROUPS:
        row = rows[module_of(group)]
        assert (row["distribution"], row["status"], row["api"]) == (name_of(group), "loaded", API_VERSION)
        assert [component["group"] for component in row["components"]] == [group]


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in ("frontend", "tool_parser")])
def test_a_real_request_runs_through_it(site, model, ours, group):
    """The templates change nothing by default but what is measured, so the tokens are ours; int8 weights round."""
    rows = json.loads(site.said("explain", "--json", *selecting(group)))
    row = next(row for row in rows if row["stage"] == group and row["name"] == module_of(group))
    assert row["wheel"] == name_of(group)
    theirs = generated(site, model, *selecting(group))
    if group == "quant":
        assert len(theirs) > 1
    else:
        assert theirs == ours


def answers_of(url, *lines):
    address = urlsplit(url)
    with (
        socket.create_connection((address.hostname, address.port), timeout=60) as client,
        client.makefile("rw") as file,
    ):
        for line in lines:
            file.write(json.dumps(line) + "\n")
        file.flush()
        return [json.loads(file.readline()) for _ in lines]


def test_their_frontend_serves(site, model, ours):
    overrides = (selected("frontend"), "frontend.port=0", f"model.source={model}", "model.dtype=float32")
    with started(site, *overrides, said=r"^acme_frontend on (tcp://\S+)$") as url:
        first, second = answers_of(url, {"prompt": "hello, hello, hello", "max_tokens": 12}, {"prompt": ""})
    assert first["text"].rstrip("\n") == ours.rstrip("\n")
    assert second.keys() in ({"text", "finish_reason"}, {"error"})


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_their_tool_parser_reads_a_served_chat(site, model):
    (site.work / "template.jinja").write_text(TEMPLATE)
    overrides = (
        selected("tool_parser"),
        "frontend.port=0",
        f"model.source={model}",
        "renderer.chat_template=template.jinja",
    )
    messages = [{"role": "user", "content": "hello, hello"}]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 8, "temperature": 0}
    with served(site, *overrides) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        rows = {row["stage"]: row for row in httpx.get(f"{url}/plugins", timeout=60).json()["plugins"]}
        assert (rows["tool_parser"]["wheel"], rows["tool_parser"]["version"]) == (name_of("tool_parser"), "0.1.0")


@contextmanager
def served(site, *overrides):
    with started(site, *overrides, said=r"^Nonet serving .* on (http://\S+)$") as url:
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200, 120)
        yield url


@contextmanager
def started(site, *overrides, said):
    """`nonet serve` until the end of the block; gives the address that it says."""
    log = site.work / "server.log"
    with log.open("w") as file:
        command = [site.venv / "bin/nonet", "serve", *overrides]
        process = subprocess.Popen(command, cwd=site.work, env=ENVIRON, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: process.poll() is not None or re.search(said, log.read_text(), re.MULTILINE), 120)
        found = re.search(said, log.read_text(), re.MULTILINE)
        assert found, log.read_text()
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(60) in (0, -15, 143), log.read_text()


def test_all_of_them_at_once(site, model):
    """But the predictor, whom a scheduler of theirs does not ask."""
    others = ("frontend", "tool_parser", "quant", "predictor")
    chosen = [selected(group) for group in GROUPS if group not in others]
    assert len(generated(site, model, *chosen)) > 1


@pytest.mark.parametrize("group", GROUPS)
def test_it_passes_its_own_tests_there(site, packages, group):
    copy = site.work / "tests" / name_of(group)
    shutil.copytree(packages[group] / "tests", copy / "tests", ignore=NOT_SOURCE)
    shutil.copy(packages[group] / "pyproject.toml", copy)
    options = ("-q", "-p", "no:cacheprovider")
    assert " passed" in succeed([site.python, "-m", "pytest", *options, copy], cwd=site.work, seconds=600)
