"""A plugin of the engine fails one request over HTTP: the client is told which, and the log says whose request it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from core.testing.harness.http_calls import completion_body
from core.testing.harness.served_pipelines import Served, served_tiny
from core.testing.tiny_models import make_tiny_model
from plugins.logits_processors.dry import Dry
from plugins.samplers.standard import Standard as Sampler
from plugins.schedulers.fcfs import Fcfs

COMPLETIONS = "/v1/completions"
VICTIM = 666  # a seed
SECRET = "what the plugin says"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_tiny_model(tmp_path_factory.mktemp("names") / "tiny")
    with served_tiny(folder, "+logits_processors=[dry]", "plugins.quarantine_after=1000") as server:
        yield server


def fail_victim(monkeypatch: pytest.MonkeyPatch, cls: type, method: str, seeds: Any) -> None:
    """`cls.method` raises when the victim is among what it is shown; `seeds` tells of its arguments."""
    real = getattr(cls, method)

    def broken(self: Any, *args: Any) -> Any:
        if VICTIM in seeds(*args):
            raise OSError(SECRET)
        return real(self, *args)

    monkeypatch.setattr(cls, method, broken)


FAULTS = {
    "scheduler=fcfs": (Fcfs, "add", lambda request: [request.params.seed]),
    "sampler=standard": (Sampler, "sample", lambda _, metadata: [row.params.seed for row in metadata.rows]),
    "logits_processors=dry": (Dry, "apply", lambda _, rows, states: [row.params.seed for row in rows]),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("who", FAULTS)
def test_client_and_log_hear_which_plugin_failed_whose_request(
    tiny: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, who: str, stream: bool
) -> None:
    fail_victim(monkeypatch, *FAULTS[who])
    body = completion_body("The engine was described", 4, logits_processors={"dry": {}}, stream=stream)
    asked = {"json": {**body, "seed": VICTIM}, "headers": {"x-request-id": "mine-7"}}
    with caplog.at_level(logging.ERROR, "nonet.http"):
        answer = httpx.post(tiny.url + COMPLETIONS, **asked, timeout=60)
    assert answer.status_code == 500, "it fails before its first token"
    error = answer.json()["error"]
    assert error["code"] == "generation_failed"
    assert error["message"].startswith(f"The plugin {who} (plugin plugins.")
    assert error["message"].endswith(") failed while it ran this request.") and SECRET not in error["message"]
    (line,) = (record.getMessage() for record in caplog.records if record.name == "nonet.http")
    assert line.startswith("request mine-7 (cmpl-") and f"{who} (plugin plugins." in line and SECRET in line
    assert tiny.good(COMPLETIONS, **completion_body("The engine was described", 4))["choices"]
