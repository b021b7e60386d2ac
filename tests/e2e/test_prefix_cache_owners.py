"""The prefix cache of the real server: whose hits are shown to whom, what its numbers add up to, and its reset (bug K3)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from core.testing.harness.http_calls import COMPLETIONS, Outcome, call, connected
from core.testing.harness.server import RunningServer, metric
from core.testing.tiny_models import make_tiny_model

KEYS = {"anna": "key-of-anna-0123456789", "bert": "key-of-bert-0123456789"}
PREFIX = [6 + index * 7 % 300 for index in range(512)]
CACHED, QUERIED = "nonet_prefix_hit_tokens_total", "nonet_prefix_query_tokens_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("owners")
    values = [
        f"model.source={make_tiny_model(folder / 'tiny', max_position_embeddings=1024)}",
        "model.dtype=float32",
        "executor.num_threads=1",
        "cache.num_blocks=2048",
        "frontend.admin=true",
    ]
    keys = ",".join(f"{name} {key}" for name, key in KEYS.items())
    with RunningServer(values, environ={"NONET_API_KEY": keys}) as running:
        yield running


def client_of(server: RunningServer, name: str) -> Any:
    return connected(server, headers={"authorization": f"Bearer {KEYS[name]}"})


def body(salt: str, *tail: int, max_tokens: int = 2, **fields: Any) -> dict[str, Any]:
    prompt = [*PREFIX, *tail]
    salted = {"cache_salt": salt} if salt else {}
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **salted, **fields}


async def cached(client: httpx.AsyncClient, salt: str, *tail: int) -> int:
    answer = await call(client, body(salt, *tail))
    assert answer.complete and answer.usage is not None
    found: int = answer.usage["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_k3_a_neighbour_learns_nothing_and_the_owner_has_the_hit(server: RunningServer) -> None:
    """50 guesses of another tenant, each with a salt of its own, so that it does not hit what it has written itself."""
    async with client_of(server, "anna") as anna, client_of(server, "bert") as bert:
        assert await cached(anna, "s", 7) == 0
        salts = ["s", "", *(f"guess{index}" for index in range(48))]
        assert {await cached(bert, salt, 7) for salt in salts} == {0}
        assert await cached(anna, "t", 7) == 0
        assert await cached(anna, "s", 8) == 512
        assert await cached(bert, "s", 8) == 512, "its own, by now"


async def test_f54_a_prompt_that_is_cached_whole_is_computed_from_its_last_block(server: RunningServer) -> None:
    """512 tokens, 32 blocks: one of them is computed again, for there must be logits. With echo and logprobs all are."""
    async with client_of(server, "anna") as client:
        plain = [await call(client, body("f54", max_tokens=8, return_token_ids=True)) for _ in range(3)]
        assert [one.usage["prompt_tokens_details"]["cached_tokens"] for one in plain if one.usage] == [0, 496, 496]
        assert plain[0].token_ids == plain[1].token_ids == plain[2].token_ids and len(plain[0].token_ids) == 8
        scored = [(await client.post(COMPLETIONS, json=body("f54", echo=True, logprobs=2))).json() for _ in range(2)]
        fresh = (await client.post(COMPLETIONS, json=body("f54-new", echo=True, logprobs=2))).json()
        for answer in scored:
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert answer["choices"][0]["logprobs"]["tokens"] == fresh["choices"][0]["logprobs"]["tokens"]
            got, wanted = (one["choices"][0]["logprobs"]["token_logprobs"][1:] for one in (answer, fresh))
            assert len(got) == 513 and got == pytest.approx(wanted, abs=1e-4)


async def test_f54_a_continued_message_that_is_cached_whole(server: RunningServer) -> None:
    async with client_of(server, "anna") as client:

        def chat(text: str) -> dict[str, Any]:
            turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]
            return {"model": "tiny", "messages": turns, "continue_final_message": True, "add_generation_prompt": False}

        async def length(text: str) -> int:
            count: int = (await client.post("/tokenize", json=chat(text))).json()["count"]
            return count

        text = "a" + " 1" * 20
        while await length(text) % 16:
            text += " 1"
        asked = {**chat(text), "max_tokens": 6, "temperature": 0, "cache_salt": "continued"}
        answers = [(await client.post("/v1/chat/completions", json=asked)).json() for _ in range(2)]
        first, second = (one["usage"] for one in answers)
        assert first["prompt_tokens"] % 16 == 0
        assert (first["prompt_tokens_details"]["cached_tokens"]) == 0
        assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 16 > 0
        assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]


async def test_metrics_are_totals_and_name_nobody(server: RunningServer) -> None:
    async with client_of(server, "anna") as client:

        async def read(name: str) -> float:
            return metric((await client.get("/metrics")).text, name)

        before = await read(QUERIED), await read(CACHED)
        found = [await cached(client, "metrics", 7, 9, index) for index in range(6, 10)]
        scored = await call(client, body("metrics", 7, 9, 6, prompt_logprobs=1))  # computes all, and looks nothing up
        assert scored.complete and found == [0, 512, 512, 512]
        assert await read(QUERIED) - before[0] == 4 * 515
        assert await read(CACHED) - before[1] == 3 * 512
        text = (await client.get("/metrics")).text
    labels = {name for part in re.findall(r"\{(.*)\}", text) for name in re.findall(r'(\w+)="', part)}
    assert labels and not labels & {"tenant", "key", "user", "salt", "request", "request_id"}
    assert not [word for word in (*KEYS, *KEYS.values(), 'metrics"') if f'"{word}' in text]


async def test_a_reset_while_requests_run_forgets_and_disturbs_nobody(server: RunningServer) -> None:
    async with client_of(server, "anna") as client:
        alone = await call(client, body("alone", 7, max_tokens=200, ignore_eos=True, return_token_ids=True))
        assert await cached(client, "reset", 7) == 0
        assert await cached(client, "reset", 8) == 512
        stream = Outcome()
        task = asyncio.create_task(
            call(client, body("reset", 7, max_tokens=200, stream=True, ignore_eos=True, return_token_ids=True), stream)
        )
        while stream.num_objects < 3:
            await asyncio.sleep(0.01)
        answer = await client.post("/reset_prefix_cache")
        assert not task.done(), "the stream was meant to run through the reset"
        assert (answer.status_code, answer.json()) == (200, {"reset": True, "requests_in_flight": 1})
        assert await cached(client, "reset", 9) == 0
        await task
        assert stream.complete and stream.token_ids == alone.token_ids and len(stream.token_ids) == 200
        assert (await client.get(COMPLETIONS)).status_code == 405
