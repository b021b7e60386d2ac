"""Seeded mutation of good request bodies, by value and by byte (idea: zzuf, schemathesis)."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

_USER = {"role": "user", "content": "Tell me something about music."}
_CHAT: dict[str, Any] = {"messages": [_USER], "max_tokens": 4}
_TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4}

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["é", 1]}, "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    "required": ["a"],
    "additionalProperties": False,
}
_TAG: dict[str, Any] = {"structures": [{"begin": "<f>", "schema": _SCHEMA, "end": "</f>"}], "triggers": ["<f"]}

GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", {**_CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**_CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}),
    ("/v1/chat/completions", {**_CHAT, "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 7}),
    ("/v1/chat/completions", {**_CHAT, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05}),
    ("/v1/chat/completions", {**_CHAT, "stop": ["a", "the"], "stop_token_ids": [5], "user": "someone"}),
    ("/v1/chat/completions", {**_CHAT, "chat_template_kwargs": {"thinking": True}, "metadata": {"a": "b"}}),
    ("/v1/chat/completions", {**_CHAT, "continue_final_message": False, "add_generation_prompt": True}),
    (
        "/v1/chat/completions",
        {**_CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
    ),
    ("/v1/chat/completions", {**_CHAT, "response_format": {"type": "structural_tag", **_TAG}}),
    ("/v1/completions", _TEXT),
    ("/v1/completions", {**_TEXT, "structured_outputs": {"regex": "[a-z]{1,8}( ja)?", "disable_any_whitespace": True}}),
    ("/v1/completions", {**_TEXT, "guided_choice": ["yes", "né"], "n": 2, "temperature": 0.9}),
    ("/v1/completions", {**_TEXT, "guided_grammar": 'root ::= "a" root | [0-9]+', "seed": 1}),
    ("/v1/completions", {**_TEXT, "stream": True, "echo": True, "logprobs": 1}),
    ("/v1/completions", {**_TEXT, "prompt": ["Hello", "Once"], "n": 2, "best_of": 2}),
    ("/v1/completions", {**_TEXT, "prompt": [10, 20, 30], "return_token_ids": True}),
    ("/v1/completions", {**_TEXT, "prompt": [[10, 20], [30]], "prompt_logprobs": 1}),
    ("/v1/completions", {**_TEXT, "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1}),
    ("/v1/completions", {**_TEXT, "logit_bias": {"5": 1.5, "7": -100}, "bad_words": ["music"], "min_tokens": 2}),
    ("/v1/completions", {**_TEXT, "allowed_token_ids": [10, 11, 12], "ignore_eos": True, "priority": 0}),
    ("/v1/completions", {**_TEXT, "repetition_detection": {"max_pattern_size": 4, "min_count": 3}}),
    ("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
    ("/tokenize", {"messages": [_USER], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [10, 20, 30]}),
)
_WEIRD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 5e-324, 2**31, 2**63, -(2**63) - 1, 10**30),
    *("", " ", "a", "\x00", "\u202e", "x" * 5000, "NaN", "-1", "1e9", "é" * 300, "{{ 1 }}", "<|im_end|>"),
    *([], [[]], [None], [0] * 500, {}, {"a": 1}, {"": ""}, {"$ref": "#"}, [[[[[[[[]]]]]]]], {"role": "tool"}),
)
_TOKENS = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\ud800", b"null", b"1e999", b"\xff", b"\x00", b"-", b"0")


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body that was good before one to three mutations."""
    path, body = rng.choice(GOOD)
    body = copy.deepcopy(body)
    if rng.random() < 0.7:
        for _ in range(rng.randint(1, 3)):
            _change_value(rng, body)
        return path, json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    data = json.dumps(body).encode()
    for _ in range(rng.randint(1, 3)):
        data = rng.choice(_BYTE_CHANGES)(rng, data)
    return path, data


def _change_value(rng: random.Random, body: dict[str, Any]) -> None:
    """Replace, remove or add one value, at any depth."""
    holder: Any = rng.choice(_holders(body))
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    what = rng.random()
    if not keys or what < 0.15:
        if isinstance(holder, dict):
            other = rng.choice(GOOD)[1]
            name = rng.choice([*other, "no_such_field"])
            holder[name] = copy.deepcopy(rng.choice((*other.values(), *_WEIRD)))
        else:
            holder.append(copy.deepcopy(rng.choice(_WEIRD)))
    elif what < 0.3:
        del holder[rng.choice(keys)]
    else:
        holder[rng.choice(keys)] = copy.deepcopy(rng.choice(_WEIRD))


def _holders(value: Any) -> list[Any]:
    """Every object and array in `value`, itself included."""
    if not isinstance(value, (dict, list)):
        return []
    children = value.values() if isinstance(value, dict) else value
    return [value, *(holder for child in children for holder in _holders(child))]


def _flip(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _drop(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.randint(1, 8) :]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at : at + rng.randint(1, 20)] * rng.randint(2, 50) + data[at:]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(_TOKENS) + data[at:]


_BYTE_CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (_flip, _drop, _repeat, _insert)
