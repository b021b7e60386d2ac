"""Faults that users reported of other servers, each with the request of the report: sections A to H on a tiny model.

HTTP frontend, front, engine and model are all real and in this process. See docs/reported_faults.md for the whole list.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from core.testing.harness.frontend_thread import wait_until
from core.testing.harness.http_calls import call, completion_body
from core.testing.harness.served_pipelines import Served, served_tiny
from core.testing.harness.server import metric
from core.testing.tiny_models import make_tiny_model
from core.testing.tokenizers import byte_level_bpe

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 512  # of the tiny model
USER = {"role": "user", "content": "hello world, and hello engine: one and again"}
TOKENIZER = byte_level_bpe()


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(6, TOKENIZER.vocab_size), k=count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("reported") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Served]:
    with served_tiny(folder, "prefill.chunk_size=16") as server:
        yield server


def ids_of(choice: dict[str, Any]) -> list[int]:
    found: list[int] = choice["token_ids"]
    return found


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


# --- A: text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 5}], ids=["text", "logprobs"])
def test_a2_lone_bytes(tiny: Served, max_tokens: int, extra: dict[str, int]) -> None:
    lone = [i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) in (b"\xf0", b"\x9f")]
    assert len(lone) == 2
    body = completion_body("hello", max_tokens, allowed_token_ids=lone, **extra)
    whole = tiny.good(COMPLETIONS, **body)["choices"][0]
    assert set(ids_of(whole)) <= set(lone) and len(ids_of(whole)) == max_tokens
    assert set(whole["text"]) == {"\ufffd"} and whole["finish_reason"] == "length"
    chunks = [choice for event in tiny.events(COMPLETIONS, **body) for choice in event["choices"]]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["finish_reason"] == "length"


# --- C, D: usage and errors ------------------------------------------------------------------------------


def test_c5_aborted_requests_are_in_both_families(tiny: Served) -> None:
    def metrics() -> str:
        return httpx.get(f"{tiny.url}/metrics").text

    before = metrics()
    body = completion_body(random_ids(20, 1), 400, stream=True)
    for _ in range(5):
        with httpx.stream("POST", f"{tiny.url}{COMPLETIONS}", json=body) as answer:
            next(answer.iter_bytes(64))

    def grown(name: str, **labels: str) -> float:
        return metric(metrics(), name, **labels) - metric(before, name, **labels)

    wait_until(lambda: grown("nonet_requests_finished_total", finish_reason="abort") == 5)
    assert grown("nonet_requests_finished_total") == grown("nonet_request_latency_seconds_count") == 5
    assert grown("nonet_prompt_tokens_total") == 5 * 20
    assert 5 <= grown("nonet_generation_tokens_total") < 5 * 400


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_d3_d4_the_python_client_raises_for_a_long_prompt(tiny: Served, kind: str) -> None:
    long = "hello world " * CONTEXT
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.BadRequestError, match="context") as caught:
            if kind == "chat":
                sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": long}], stream=True)
            else:
                sdk.completions.create(model="tiny", prompt=long, stream=True)
    assert caught.value.code == "context_length_exceeded"


@STREAMS
def test_d4_one_token_too_many(tiny: Served, stream: bool) -> None:
    error = tiny.refused(COMPLETIONS, prompt=random_ids(CONTEXT + 1), stream=stream)
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "prompt",
        "context_length_exceeded",
    )


def test_d5_a_prompt_of_many_chunks(tiny: Served) -> None:
    """30 chunks of 16 tokens; the server's other limits stand in test_openai_http_stream.py."""
    chunks = tiny.events(COMPLETIONS, **completion_body(random_ids(480, 2), 10), stream_options={"include_usage": True})
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (480, 10)
    assert [c["finish_reason"] for event in chunks for c in event["choices"] if c["finish_reason"]] == ["length"]


# --- E: logprobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("edits", [{"top_k": 1}, {"min_p": 1}, {"allowed_token_ids": [77]}], ids=str)
@STREAMS
def test_e3_numbers_are_finite(tiny: Served, edits: dict[str, Any], stream: bool) -> None:
    body = {"prompt": "hello world", "echo": True, "logprobs": 1, "temperature": 1, "max_tokens": 4, **edits}
    if stream:
        choices = [choice for event in tiny.events(COMPLETIONS, **body) for choice in event["choices"]]
    else:
        choices = tiny.good(COMPLETIONS, **body)["choices"]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    numbers = [number for part in parts for number in part["token_logprobs"]]
    tops = [top for part in parts for top in part["top_logprobs"]]
    assert numbers[0] is None and tops[0] is None
    assert all(math.isfinite(number) and number <= 0 for number in numbers[1:])
    assert all(math.isfinite(number) for top in tops[1:] for number in top.values())
    assert len(numbers) == len(tops) == len(TOKENIZER.encode("hello world")) + 4


def test_e4_twenty_alternatives_of_byte_tokens(tiny: Served) -> None:
    parts = [i for i in range(6, TOKENIZER.vocab_size) if not TOKENIZER.token_bytes(i).isascii()]
    body = {"messages": [USER], "max_tokens": 8, "logprobs": True, "allowed_token_ids": parts, "return_token_ids": True}
    choice = tiny.good(CHAT, **body, top_logprobs=20)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [bytes(token["bytes"]) for token in content] == [TOKENIZER.token_bytes(i) for i in ids_of(choice)]
    for token in content:
        assert len(token["top_logprobs"]) == 20
        assert all(bytes(top["bytes"]) and top["token"].encode() for top in token["top_logprobs"])
    assert tiny.refused(CHAT, **body, top_logprobs=21)["param"] == "top_logprobs"
    assert tiny.refused(COMPLETIONS, prompt="hello", logprobs=21)["param"] == "logprobs"


# --- F: seeds --------------------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = {"temperature": 1.2, "ignore_eos": True, "return_token_ids": True}


async def sampled_ids(tiny: Served, bodies: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    async with tiny.client() as client:
        outcomes = await asyncio.gather(*(call(client, body) for body in bodies))
    assert all(outcome.complete for outcome in outcomes), outcomes
    return [tuple(outcome.token_ids) for outcome in outcomes]


async def test_f2_without_a_seed_no_start_is_like_another(tiny: Served, folder: Path) -> None:
    bodies = [{**SAMPLED, "prompt": "hello world", "max_tokens": 8}] * 20
    first = await sampled_ids(tiny, bodies)
    with served_tiny(folder) as again:
        second = await sampled_ids(again, bodies)
    assert len(set(first)) > 10 and len(set(second)) > 10
    assert not set(first) & set(second)


async def test_f3_equal_prompts_draw_other_numbers(tiny: Served) -> None:
    body = {**SAMPLED, "prompt": "hello world", "max_tokens": 12}
    assert len(set(await sampled_ids(tiny, [body] * 4))) == 4
    seeded = [[ids_of(c) for c in tiny.good(COMPLETIONS, **body, n=4, seed=5)["choices"]] for _ in range(2)]
    assert seeded[0] == seeded[1] and len({tuple(ids) for ids in seeded[0]}) == 4
    assert len({tuple(ids_of(c)) for c in tiny.good(COMPLETIONS, **body, n=4)["choices"]}) == 4


async def test_f4_a_seed_decides_alone_and_under_load(tiny: Served) -> None:
    body = {**SAMPLED, "prompt": "hello world", "max_tokens": 16, "seed": 7}
    found = set()
    for _ in range(10):
        found |= set(await sampled_ids(tiny, [body]))
    others = [{**SAMPLED, "prompt": random_ids(10 + 7 * i, i), "max_tokens": 24} for i in range(8)]
    for _ in range(3):
        found |= set((await sampled_ids(tiny, [*others[:4], body, *others[4:]]))[4:5])
    assert len(found) == 1


# --- G: token ids and words ------------------------------------------------------------------------------

BAD_PARAMETERS: list[tuple[str, list[Any]]] = [
    ("logit_bias", [{"191222": -100}, {"-1": 5}, {"abc": 1}, {"5": "nan"}, {"5": 1e9}]),
    ("stop_token_ids", [[TOKENIZER.vocab_size + 10], [-1], [2**31]]),
    ("prompt", [[TOKENIZER.vocab_size], [-1], [2**31], [2**63], [1.0], [True], [[]]]),
    ("bad_words", [[" "], ["\t"], ["\u0007"], [""]]),
]


async def test_g1_g2_g3_g5_bad_values_leave_others_alone(tiny: Served) -> None:
    """A greedy neighbour runs all the while; its ids are those of a quiet server."""
    neighbour = completion_body(random_ids(30, 3), 300)
    async with tiny.client() as client:
        quiet = await call(client, neighbour)
        running = [asyncio.ensure_future(call(client, neighbour)) for _ in range(2)]
        for name, values in BAD_PARAMETERS:
            for value in values:
                body = {"prompt": "hello", "max_tokens": 20, "min_tokens": 5, name: value}
                outcome = await call(client, body)
                assert outcome.status == 400 and outcome.errors[0]["param"].startswith(name), (name, value, outcome)
        assert all(one.token_ids == quiet.token_ids for one in await asyncio.gather(*running))


def described() -> tuple[dict[str, float], int]:
    """A bias towards tokens that write "described" in five ways, and the token that is " described"."""
    forms = [TOKENIZER.encode(text, add_special_tokens=False) for text in (" described", "described", " describe")]
    assert [len(form) for form in forms] == [1, 3, 1], "the forms of the report differ in length"
    return {str(token_id): 25.0 for form in forms for token_id in form}, forms[0][0]


def says_described(choice: dict[str, Any]) -> bool:
    """As a word: inside a longer one ("describedes") it is not barred."""
    return re.search(r"described(?![a-z])", choice["text"]) is not None


@pytest.mark.parametrize("word", ["described", " described"])
def test_g4_neither_form_of_a_bad_word_appears(tiny: Served, word: str) -> None:
    bias, _ = described()
    body = {"prompt": "the engine was", "max_tokens": 60, "logit_bias": bias, "temperature": 1, "n": 8, "seed": 1}
    assert all(says_described(choice) for choice in tiny.good(COMPLETIONS, **body)["choices"])
    assert not any(map(says_described, tiny.good(COMPLETIONS, **body, bad_words=[word])["choices"]))


def test_g7_limits_hold_for_each_choice(tiny: Served) -> None:
    bias, word = described()
    body = {"prompt": "the engine was", "max_tokens": 60, "temperature": 1, "n": 3, "seed": 2, "return_token_ids": True}
    plain = tiny.good(COMPLETIONS, **body, logit_bias=bias)["choices"]
    assert all(map(says_described, plain))
    barred = tiny.good(COMPLETIONS, **body, logit_bias=bias, bad_words=["described"])["choices"]
    assert not any(map(says_described, barred))
    assert any(word in ids_of(choice) for choice in plain)
    biased = tiny.good(COMPLETIONS, **body, logit_bias={**bias, str(word): -100})["choices"]
    assert not any(word in ids_of(choice) for choice in biased)
    stops = list(range(60, 310))
    for least in (0, 9):
        choices = tiny.good(COMPLETIONS, **body, stop_token_ids=stops, min_tokens=least)["choices"]
        lengths = [len(ids_of(choice)) for choice in choices]
        assert min(lengths) >= least and (least or max(lengths) < 9), lengths
        assert len({tuple(ids_of(choice)) for choice in choices}) == 3


# --- H: limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_others", [0, 1, 8])
async def test_h1_too_long_is_one_error_whatever_the_load(tiny: Served, num_others: int) -> None:
    async with tiny.client() as client:
        others = [asyncio.ensure_future(call(client, completion_body([9, i], 200))) for i in range(num_others)]
        for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
            for stream in (False, True):
                outcome = await call(client, completion_body(random_ids(length), 1, stream=stream))
                assert (outcome.status, outcome.code) == (400, "context_length_exceeded")
        assert all(other.complete for other in await asyncio.gather(*others))


def test_h2_the_field_and_the_numbers(tiny: Served) -> None:
    prompt = random_ids(CONTEXT - 10)
    error = tiny.refused(COMPLETIONS, prompt=prompt, max_tokens=11)
    assert error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("max_tokens=11", "502", "512"))
    assert tiny.refused(COMPLETIONS, prompt=random_ids(CONTEXT), max_tokens=1)["param"] == "prompt"
    assert tiny.refused(COMPLETIONS, prompt=prompt, max_tokens=0)["param"] == "max_tokens"
    assert len(ids_of(tiny.good(COMPLETIONS, **completion_body(prompt, 10))["choices"][0])) == 10
    both = {"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4}
    assert tiny.refused(CHAT, **both)["param"] == "max_completion_tokens"
    newer = tiny.refused(CHAT, messages=[USER], max_completion_tokens=CONTEXT)
    assert newer["param"] == "max_completion_tokens" and f"={CONTEXT}" in newer["message"]


def test_h3_without_max_tokens_the_rest_of_the_context(tiny: Served) -> None:
    prompt = random_ids(CONTEXT - 20, 4)
    for extra in ({}, {"max_tokens": None}):
        answer = tiny.good(COMPLETIONS, prompt=prompt, temperature=0, ignore_eos=True, **extra)
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (20, "length")
    for value in (-1, 2**31, 2**63, "5", 1.5):
        assert tiny.refused(COMPLETIONS, prompt=prompt, max_tokens=value)["param"] == "max_tokens"


def test_h4_empty_prompts(tiny: Served) -> None:
    """Without BOS there is nothing to continue. With BOS: tests/unit/test_renderer_text.py."""
    assert TOKENIZER.encode("") == []
    prompts: list[Any] = ["", [""], [], [[]], ["hello", ""]]
    for prompt in prompts:
        assert tiny.refused(COMPLETIONS, prompt=prompt)["param"].startswith("prompt")
    assert tiny.refused(CHAT, messages=[])["param"] == "messages"
    assert tiny.good(CHAT, messages=[{"role": "user", "content": ""}], max_tokens=2)["usage"]["prompt_tokens"] > 0
