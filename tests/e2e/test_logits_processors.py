"""Logits processors through the whole pipeline on a tiny model: asked for over HTTP, checked, run beside others."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.commands import generate
from core.testing.harness.frontend_thread import wait_until
from core.testing.harness.http_calls import completion_body
from core.testing.harness.served_pipelines import Served, served_tiny
from core.testing.tiny_models import make_tiny_model
from core.testing.tokenizers import byte_level_bpe
from plugins.logits_processors.dry import Dry
from plugins.logits_processors.green_list import GreenList

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VOCAB = byte_level_bpe().vocab_size
ALL = "+logits_processors=[dry,watermark]"
KEY = "logits_processors.watermark.key=secret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("processors") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Served]:
    with served_tiny(folder, ALL, KEY) as server:
        yield server


def prompt(seed: int, count: int = 12) -> list[int]:
    return random.Random(seed).choices(range(6, VOCAB), k=count)


def ids(server: Served, body: dict[str, Any]) -> list[int]:
    found: list[int] = server.good(COMPLETIONS, **body)["choices"][0]["token_ids"]
    return found


def repeats(token_ids: list[int], size: int = 4) -> int:
    """How many n-grams have come before."""
    grams = [tuple(token_ids[at : at + size]) for at in range(len(token_ids) - size + 1)]
    return len(grams) - len(set(grams))


@pytest.mark.parametrize("seed", range(3))
def test_dry_ends_a_loop(tiny: Served, seed: int) -> None:
    """Of eight tokens a greedy random model makes loops."""
    body = completion_body(prompt(seed), 60, allowed_token_ids=list(range(60, 68)))
    dry = {"multiplier": 3.0, "sequence_breakers": []}
    assert repeats(ids(tiny, body)) >= 4
    assert repeats(ids(tiny, {**body, "logits_processors": {"dry": dry}})) == 0
    assert ids(tiny, {**body, "logits_processors": {"dry": {"multiplier": 0}}}) == ids(tiny, body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("least", [0, 1, 5])
def test_min_tokens_is_honoured(tiny: Served, least: int, stream: bool) -> None:
    """The stop token is by far the likeliest at every position."""
    body = completion_body(prompt(1), 20, stop_token_ids=[50], logit_bias={"50": 100}, min_tokens=least)
    if stream:
        choices = [choice for event in tiny.events(COMPLETIONS, **body) for choice in event["choices"]]
        found = [token for choice in choices for token in choice["token_ids"]]
    else:
        found = ids(tiny, body)
    assert len(found) == least + 1 and found.index(50) == least


def test_marked_text_is_found(tiny: Served) -> None:
    green = GreenList("secret")
    asked = {"temperature": 1.0, "seed": 5}
    plain = ids(tiny, completion_body(prompt(2), 200, **asked))
    marked = ids(tiny, completion_body(prompt(2), 200, **asked, logits_processors={"watermark": {}}))
    assert green.detect(marked).z > 5.0 > 3.5 > abs(green.detect(plain).z)


def test_log_probabilities_are_those_before_the_processors(tiny: Served) -> None:
    body = completion_body(prompt(3), 1, logprobs=3)
    plain = tiny.good(COMPLETIONS, **body)["choices"][0]["logprobs"]["top_logprobs"]
    marked = tiny.good(COMPLETIONS, **body, logits_processors={"watermark": {}})["choices"][0]["logprobs"]
    for token, value in plain[0].items():
        assert marked["top_logprobs"][0].get(token, value) == pytest.approx(value, abs=1e-5)


async def test_requests_beside_others_have_the_tokens_of_a_solo_run(tiny: Served) -> None:
    """Those that ask for nothing, and those that ask."""
    asks: list[dict[str, Any]] = [
        {},
        {"logits_processors": {"dry": {}}},
        {"logits_processors": {"watermark": {}}, "min_tokens": 10, "stop_token_ids": list(range(50, 90))},
        {"logits_processors": {"dry": {"multiplier": 3.0}, "watermark": {}}, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 3},
        {"logits_processors": {"dry": {}, "watermark": {}}, "temperature": 1.0, "seed": 3, "n": 2},
    ]
    bodies = [completion_body(prompt(seed), 40, **asks[seed % len(asks)]) for seed in range(18)]

    async def tokens(client: httpx.AsyncClient, body: dict[str, Any]) -> list[list[int]]:
        answer = await client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    async with tiny.client() as client:
        alone = [await tokens(client, body) for body in bodies]
        together = await asyncio.gather(*(tokens(client, body) for body in bodies))
    assert together == alone


REFUSED = [
    ({"dry": {"multiplier": "0.8"}}, "logits_processors.dry.multiplier", "invalid_value"),
    ({"dry": {"multiplier": -1}}, "logits_processors.dry.multiplier", "invalid_value"),
    ({"dry": {"multiplir": 1}}, "logits_processors.dry.multiplir", "unknown_field"),
    ({"dry": {"sequence_breakers": ["\n", 3]}}, "logits_processors.dry.sequence_breakers.1", "invalid_value"),
    ({"dry": {"last_n": 2**70}}, "logits_processors.dry", "invalid_value"),
    ({"dry": {"sequence_breakers": ["x" * 100_000]}}, "logits_processors.dry", "too_large"),
    ({"dri": {}}, "logits_processors.dri", "unknown_field"),
    ({"min_tokens": {}}, "logits_processors.min_tokens", "unsupported"),
    ({"watermark": {"key": "mine"}}, "logits_processors.watermark.key", "unknown_field"),
    ({"dry": 3}, "logits_processors.dry", "invalid_type"),
    (["dry"], "logits_processors", "invalid_type"),
    ({str(i): {} for i in range(17)}, "logits_processors", "invalid_value"),
]


@pytest.mark.parametrize(("value", "param", "code"), REFUSED)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_wrong_parameters_are_refused_by_name(tiny: Served, path: str, value: Any, param: str, code: str) -> None:
    what = {"prompt": "hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    error = tiny.refused(path, **what, max_tokens=2, logits_processors=value)
    assert (error["param"], error["code"]) == (param, code)


def test_near_matches(tiny: Served) -> None:
    refused = lambda **values: tiny.refused(COMPLETIONS, prompt="hello", logits_processors=values)["message"]  # noqa: E731
    assert "did you mean multiplier" in refused(dry={"multiplir": 1})
    assert "did you mean dry" in refused(dri={})
    assert "by the field min_tokens" in refused(min_tokens={})


def test_what_is_not_selected_is_refused_with_the_next_step(folder: Path) -> None:
    with served_tiny(folder, "logits_processors=[]") as server:
        error = server.refused(COMPLETIONS, prompt="hello", logits_processors={"dry": {}})
        assert (error["param"], error["code"]) == ("logits_processors.dry", "unsupported")
        assert "+logits_processors=[dry]" in error["message"]
        error = server.refused(COMPLETIONS, prompt="hello", min_tokens=2)
        assert error["param"] == "min_tokens" and "+logits_processors=[min_tokens]" in error["message"]


def test_the_operator_may_ask_for_all(folder: Path) -> None:
    overrides = (ALL, KEY, "logits_processors.watermark.always=true", "logits_processors.watermark.delta=6")
    with served_tiny(folder, *overrides) as server:
        found = ids(server, completion_body(prompt(2), 120, temperature=1.0, seed=1))
        assert GreenList("secret").detect(found).z > 5.0
        shown = httpx.get(f"{server.url}/plugins").text
        assert "watermark" in shown and "secret" not in shown


def test_a_processor_that_fails_is_switched_off_and_only_those_who_ask_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Dry.apply

    def faulty(self: Dry, logits: Any, rows: Any, states: Any) -> None:
        if any(state.rule.multiplier == 13.0 for state in states):
            raise ValueError("boom")
        sound(self, logits, rows, states)

    monkeypatch.setattr(Dry, "apply", faulty)
    with served_tiny(folder, ALL) as server:
        good = completion_body(prompt(4), 8, logits_processors={"dry": {}})
        wanted = ids(server, good)
        for count in range(3):
            assert ids(server, good) == wanted, count
            bad = completion_body(prompt(5), 8, logits_processors={"dry": {"multiplier": 13}})
            assert server.post(COMPLETIONS, bad).status_code == 500
        wait_until(lambda: "quarantined" in httpx.get(f"{server.url}/health").json())
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()["quarantined"]) == (200, ["logits_processors=dry"])
        refused = server.post(COMPLETIONS, good)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (
            503,
            "plugin_quarantined",
            "logits_processors.dry",
        )
        assert "boom" not in refused.text
        assert len(ids(server, completion_body(prompt(4), 8))) == 8


def test_generate_reads_parameters_from_a_line_and_from_the_command(folder: Path, tmp_path: Path) -> None:
    lines = [
        {"id": "plain", "prompt_token_ids": prompt(6)},
        {"id": "mark", "prompt_token_ids": prompt(6), "logits_processors": {"watermark": {}}},
        {"id": "wrong", "prompt_token_ids": prompt(6), "logits_processors": {"watermark": {"delta": 1}}},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fixed = [
        f"model.source={folder}",
        "model.dtype=float32",
        "cache.num_blocks=64",
        f"input={source}",
        f"output={target}",
    ]
    sampling = ["max_tokens=150", "temperature=1", "seed=2", "ignore_eos=true"]
    with pytest.raises(Exception, match="1 of 3 lines failed"):
        generate.run([*fixed, *sampling, "+logits_processors=[watermark]"])
    plain, marked, wrong = (json.loads(line) for line in target.read_text().splitlines())
    assert "logits_processors.watermark.delta" in wrong["error"]
    found = [GreenList("nonet").detect(answer["choices"][0]["token_ids"]).z for answer in (plain, marked)]
    assert found[1] > 5.0 > 3.5 > abs(found[0])
