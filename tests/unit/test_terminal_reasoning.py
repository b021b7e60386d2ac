"""Reasoning in `chat` and `generate`: split as the server does, dimmed on a terminal, left out elsewhere, and counted."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from core.outputs import CompletionOutput
from core.pipeline import PipelineDescription
from core.request import FinishReason
from core.stages.frontend import FrontendContext
from core.stages.reasoning_parser import SplitText
from core.testing.fake_front import FakeFront, Script
from core.testing.tokenizers import byte_level_bpe
from plugins.frontends import sampling_fields
from plugins.frontends.chat_cli import ChatCli
from plugins.frontends.offline import Offline
from plugins.frontends.reasoning import DIM, UNDIM, ReasoningOfChoice, printed
from plugins.reasoning_parsers.think import Think

THOUGHT = "<think>\nHm, why?\n</think>\n\nBecause."


@pytest.fixture
def front() -> FakeFront:
    return FakeFront(Script(THOUGHT), splitter=Think(Think.Settings(), None))


def context(front: FakeFront) -> FrontendContext:
    return FrontendContext(front, PipelineDescription(()))


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Where standard output goes from now on."""
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", shown)
    return shown


async def test_a_chat_keeps_the_content_alone(front: FakeFront, capsys: pytest.CaptureFixture[str]) -> None:
    chat = ChatCli(ChatCli.Settings(), context(front))
    await chat._reply_to("hi")
    assert capsys.readouterr().out == "Because.\n"
    assert chat._messages[-1] == {"role": "assistant", "content": "Because."}


async def test_a_terminal_shows_it_dimmed(front: FakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    chat = ChatCli(ChatCli.Settings(), context(front))
    await chat._reply_to("hi")
    assert shown.getvalue() == f"{DIM}Hm, why?{UNDIM}\n\nBecause.\n"
    front.script = Script("Because.")
    await chat._reply_to("again")
    assert shown.getvalue().endswith(f"{UNDIM}\n\nBecause.\nBecause.\n")
    assert [message["content"] for message in chat._messages] == ["hi", "Because.", "again", "Because."]


def test_a_terminal_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    with pytest.raises(asyncio.CancelledError), printed() as answer:
        answer.add(SplitText("Hm."))
        raise asyncio.CancelledError
    assert shown.getvalue() == f"{DIM}Hm.{UNDIM}"


@pytest.mark.parametrize("n", [1, 2])
async def test_generate_prints_the_answer_of_a_chat(
    front: FakeFront, capsys: pytest.CaptureFixture[str], n: int
) -> None:
    for chat, text in ((True, "Because."), (False, THOUGHT)):
        await Offline(Offline.Settings(prompt="Why?", chat=chat, max_tokens=100, n=n), context(front)).run()
        assert capsys.readouterr().out == f"{text}\n" * n


async def rows(tmp_path: Path, front: FakeFront, lines: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    await Offline(Offline.Settings(input=source, output=target, max_tokens=100, **settings), context(front)).run()
    return [json.loads(line) for line in target.read_text().splitlines()]


async def test_lines_of_a_file_have_it_apart(front: FakeFront, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Why?"}]
    chat, text = await rows(tmp_path, front, [{"messages": messages, "n": 2}, {"prompt": "Why?"}])
    assert [(choice["reasoning"], choice["text"]) for choice in chat["choices"]] == [("Hm, why?", "Because.")] * 2
    content = len(front.tokenizer.encode("Because.", add_special_tokens=False))
    assert chat["usage"]["completion_tokens"] - chat["usage"]["reasoning_tokens"] == 2 * content
    assert text["choices"][0]["text"] == THOUGHT and "reasoning" not in text["choices"][0]
    assert "reasoning_tokens" not in text["usage"]


async def test_markers_that_are_special_tokens_are_read(front: FakeFront, tmp_path: Path) -> None:
    front.script = Script("<|im_start|>Hm.<|im_end|>Yes.")
    front.splitter = Think(Think.Settings(begin="<|im_start|>", end="<|im_end|>"), None)
    (row,) = await rows(tmp_path, front, [{"prompt": "Why?"}], chat=True)
    assert (row["choices"][0]["reasoning"], row["choices"][0]["text"]) == ("Hm.", "Yes.")
    chat = ChatCli(ChatCli.Settings(), context(front))
    await chat._reply_to("hi")
    assert chat._messages[-1]["content"] == "Yes."


async def test_a_grammar_is_read_once_per_line(
    front: FakeFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, read = [0], sampling_fields.grammar_of

    def counted(asking: Any) -> Any:
        found = read(asking)
        num_read[0] += found is not None
        return found

    monkeypatch.setattr(sampling_fields, "grammar_of", counted)
    own = {"prompt": "x", "structured_outputs": {"regex": "a"}}
    await rows(tmp_path, front, [own] * 3 + [{"prompt": "x"}] * 3, structured_outputs={"regex": "b"})
    assert num_read == [1 + 3], "the command line's once, and each line's own once"
    grammars = [(request.params.grammar.source, request.grammar_param) for request in front.requests]
    assert sorted(grammars) == [("a", "structured_outputs.regex")] * 3 + [("b", "structured_outputs.regex")] * 3


def counted(pieces: list[tuple[str, int]], **settings: Any) -> int:
    tokenizer = byte_level_bpe()
    one = ReasoningOfChoice(Think(Think.Settings(**settings), None), tokenizer)
    for at, (text, num_tokens) in enumerate(pieces):
        ended = FinishReason.STOP if at == len(pieces) - 1 else None
        one.take(CompletionOutput(0, text, tuple(range(num_tokens)), finish_reason=ended), [])
    return one.num_tokens


def test_a_delta_of_both_is_shared_out() -> None:
    assert counted([("<think>", 1), ("1234</think>abcd", 8), ("efgh", 5)]) == 1 + 4
    assert counted([("<think>1234567890</think>ab", 12), ("", 1)]) == 10
    assert counted([("1234", 4), ("", 1)], opened=True) == 5


def test_what_is_counted_does_not_exceed_what_came() -> None:
    rng, text = random.Random(1), "<think>Let me see.</think> It is <think>warm</think>."
    for _ in range(100):
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, 7)
            pieces.append((text[at : at + size], rng.randint(0, 3)))
            at += size
        total = sum(num_tokens for _, num_tokens in pieces)
        assert 0 <= counted(pieces) <= total
        assert counted([("It is warm", total)]) == 0
