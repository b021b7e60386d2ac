"""Clients that ask for structured output, with the default model: openai, instructor, LangChain. Rows L1, L2."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import instructor
import openai
import pytest
from jsonschema import Draft202012Validator
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from core.model.spec import ModelFiles
from core.testing.harness.server import RunningServer

TEMPLATE = Path(__file__).parents[2] / "examples/templates/chatml_tools.jinja"
pytestmark = [pytest.mark.model, pytest.mark.slow]


class Book(BaseModel):
    """What a book is."""

    model_config = ConfigDict(extra="forbid")
    author: str = Field(max_length=30)
    year: int = Field(ge=1000, le=2100)
    kind: Literal["novel", "poem"]


class Library(BaseModel):
    books: list[Book] = Field(min_length=1, max_length=2)


BOOK = "Emma is a novel by Jane Austen of 1815. Describe the book."
QUESTION: list[Any] = [{"role": "user", "content": BOOK}]


@pytest.fixture(scope="module")
def chat_server(smollm2: ModelFiles) -> Iterator[str]:
    """The base URL for clients."""
    options = ["executor.num_threads=1", "tool_parser=hermes", f"renderer.chat_template={TEMPLATE}"]
    with RunningServer(options) as server:
        yield f"{server.base_url}/v1"


@pytest.fixture(scope="module")
def sdk(chat_server: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=chat_server, api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.fixture(scope="module")
def name(sdk: OpenAI) -> str:
    return next(iter(sdk.models.list())).id


def test_openai_parses(sdk: OpenAI, name: str) -> None:
    for model in (Book, Library):
        answer = sdk.chat.completions.parse(
            model=name, messages=QUESTION, response_format=model, temperature=0, max_tokens=200
        )
        assert isinstance(answer.choices[0].message.parsed, model)
        assert answer.choices[0].finish_reason == "stop"


def test_openai_streams_what_it_parses(sdk: OpenAI, name: str) -> None:
    with sdk.chat.completions.stream(
        model=name, messages=QUESTION, response_format=Book, temperature=0, max_tokens=200
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert isinstance(final.parsed, Book) and "".join(deltas) == final.content


def test_openai_raises_for_what_is_cut(sdk: OpenAI, name: str) -> None:  # L2
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(model=name, messages=QUESTION, response_format=Book, temperature=0, max_tokens=4)


def test_openai_pydantic_tools(sdk: OpenAI, name: str) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Book, name="save_book")]
    options: dict[str, Any] = {"messages": QUESTION, "tools": tools, "temperature": 0, "max_tokens": 200}
    chosen: Any = {"type": "function", "function": {"name": "save_book"}}
    answer = sdk.chat.completions.parse(model=name, tool_choice=chosen, **options)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Book)
    assert answer.choices[0].finish_reason == "tool_calls"
    with sdk.chat.completions.stream(
        model=name, tool_choice="required", parallel_tool_calls=False, **options
    ) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(streamed.function.parsed_arguments, Book)


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_instructor(sdk: OpenAI, name: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(sdk, mode=mode)
    options: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 200, "max_retries": 0}
    assert isinstance(client.chat.completions.create(model=name, response_model=Book, **options), Book)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat_server: str, name: str, method: Any) -> None:
    chat = langchain(chat_server, name)
    book = chat.with_structured_output(Book, method=method).invoke(BOOK)
    assert isinstance(book, Book)
    strict = chat.with_structured_output(Book, method=method, strict=True).invoke(BOOK)
    assert isinstance(strict, Book)


def test_langchain_tools(chat_server: str, name: str) -> None:
    @langchain_tool
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    chat = langchain(chat_server, name)
    for choice in ("multiply", "required", "any"):
        answer = chat.bind_tools([multiply], tool_choice=choice, parallel_tool_calls=False).invoke("What is 3 times 4?")
        (call,) = answer.tool_calls
        assert call["name"] == "multiply" and set(call["args"]) == {"a", "b"}
        assert isinstance(multiply.invoke(call["args"]), int)


def langchain(base_url: str, name: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=name,
        base_url=base_url,
        api_key=SecretStr("none"),
        temperature=0,
        max_retries=0,
        max_completion_tokens=200,
    )


EXAMPLE = 'Answer in JSON. For example: {\\n    "title":   "Emma",\\n\\n    "by": "Austen"\\n}'


def test_l1_no_answer_ends_in_white_space(sdk: OpenAI, name: str) -> None:
    """Examples in the prompt with much white space: the model pads, and the grammar bounds it."""
    schema = {"properties": {key: {"type": "string", "maxLength": 20} for key in ("title", "by", "of")}}
    closed = {**schema, "type": "object", "required": ["title", "by", "of"], "additionalProperties": False}
    formatted: Any = {"type": "json_schema", "json_schema": {"name": "book", "schema": closed}}
    for index in range(6):
        messages: Any = [
            {"role": "system", "content": EXAMPLE},
            {"role": "user", "content": f"Describe book {index}."},
        ]
        answer = sdk.chat.completions.create(
            model=name, messages=messages, response_format=formatted, temperature=0, max_tokens=512
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop" and choice.message.content is not None
        assert Draft202012Validator(closed).is_valid(json.loads(choice.message.content))
        assert not re.search(r"\s{41}", choice.message.content)
