"""One script for the official `openai` Python client; `openai_script.mjs` is the same for the npm client.

`run(base_url)` works against any server of a text model: what it asserts does not depend on the weights.
Each function is one step; its name says what is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

QUESTION: list[Any] = [
    {"role": "system", "content": "You answer in English."},
    {"role": "user", "content": "Tell me something about music."},
]
GREEDY: dict[str, Any] = {"messages": QUESTION, "max_tokens": 12, "temperature": 0}


def models(client: OpenAI, model: str) -> None:
    listed = [entry.id for entry in client.models.list()]
    assert model in listed
    assert client.models.retrieve(model).id == model


def chat(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, **GREEDY)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 1 <= answer.usage.completion_tokens <= 12


def chat_stream_equals_whole(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, **GREEDY)
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(model=model, stream=True, stream_options=options, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def chat_choices(client: OpenAI, model: str) -> None:
    arguments = {**GREEDY, "temperature": 1.0, "n": 2, "seed": 7}
    answer = client.chat.completions.create(model=model, **arguments)
    assert [choice.index for choice in answer.choices] == [0, 1]
    again = client.chat.completions.create(model=model, **arguments)
    assert [c.message.content for c in answer.choices] == [c.message.content for c in again.choices]
    assert answer.choices[0].message.content != answer.choices[1].message.content


def chat_logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, logprobs=True, top_logprobs=2, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content and logprobs.refusal is None
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in logprobs.content)


def chat_stop(client: OpenAI, model: str) -> None:
    text = client.chat.completions.create(model=model, **GREEDY).choices[0].message.content
    assert text is not None
    stop = text[len(text) // 2 :][:3]
    answer = client.chat.completions.create(model=model, stop=[stop], **GREEDY)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(stop)]


class Weather(BaseModel):
    city: str = Field(max_length=12)
    warm: bool


def structured(client: OpenAI, model: str) -> None:
    create: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 200, "temperature": 0}
    answer = client.chat.completions.parse(**create, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**create, response_format=Weather) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.content == answer.choices[0].message.content
    chosen = client.completions.create(model=model, prompt="yes or no?", extra_body={"guided_choice": ["yes", "no"]})
    assert chosen.choices[0].text in ("yes", "no")


def completion(client: OpenAI, model: str) -> None:
    prompts = ["Once upon a time", "The capital of France"]
    answer = client.completions.create(model=model, prompt=prompts, max_tokens=8, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    streamed = ["", ""]
    for chunk in client.completions.create(model=model, prompt=prompts, max_tokens=8, temperature=0, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]


def completion_echo(client: OpenAI, model: str) -> None:
    prompt = "Once upon a time"
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(prompt)
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs)
    assert logprobs.token_logprobs[0] is None or logprobs.token_logprobs[0] <= 0


def errors(client: OpenAI, model: str) -> None:
    create = client.chat.completions.create
    hello: list[Any] = [{"role": "user", "content": "Hello"}]
    _raises(openai.NotFoundError, "model", lambda: create(model="no-such-model", messages=hello))
    _raises(openai.BadRequestError, "n", lambda: create(model=model, messages=hello, n=0, stream=True))
    _raises(openai.BadRequestError, "messages", lambda: create(model=model, messages=[]))
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    _raises(openai.BadRequestError, "tools", lambda: create(model=model, messages=hello, tools=[tool]))
    _raises(openai.BadRequestError, "max_tokens", lambda: create(model=model, messages=hello, max_tokens=1 << 30))


def _raises(kind: type[openai.APIStatusError], param: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert error.param == param, error.param
        assert error.code and error.message
    else:
        raise AssertionError(f"{kind.__name__} for {param} was not raised")


STEPS: tuple[Callable[[OpenAI, str], None], ...] = (
    models,
    chat,
    chat_stream_equals_whole,
    chat_choices,
    chat_logprobs,
    chat_stop,
    structured,
    completion,
    completion_echo,
    errors,
)


def run(base_url: str, api_key: str = "none") -> Iterator[str]:
    """Runs all steps against `base_url` (with `/v1`); yields the name of each after it passed."""
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120) as client:
        model = client.models.list().data[0].id
        for step in STEPS:
            step(client, model)
            yield step.__name__


if __name__ == "__main__":
    for name in run(*sys.argv[1:]):
        print("ok", name)
