"""The terminal chat over a scripted front."""

from __future__ import annotations

import asyncio
import os
import select
import termios

import pytest

from core.pipeline import PipelineDescription
from core.stages.frontend import FrontendContext
from core.testing.fake_front import FakeFront, Script
from plugins.frontends.chat_cli import ChatCli, quiet_keyboard


@pytest.fixture
def front() -> FakeFront:
    return FakeFront(Script("hello world"))


@pytest.fixture
def chat(front: FakeFront) -> ChatCli:
    return ChatCli(ChatCli.Settings(), FrontendContext(front, PipelineDescription(())))


async def test_a_reply_is_printed_and_kept(chat: ChatCli, front: FakeFront, capsys: pytest.CaptureFixture[str]) -> None:
    await chat._reply_to("hi")
    await chat._reply_to("and?")
    assert capsys.readouterr().out == "hello world\n" * 2
    roles = [message["role"] for message in front.requests[-1].prompt.messages]
    assert roles == ["user", "assistant", "user"]


async def test_ctrl_c_before_the_first_step_stops_the_reply_alone(
    chat: ChatCli, front: FakeFront, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes before the task of the reply has run at all, in the first reply and in a later one."""
    loop = asyncio.get_running_loop()
    for spoken in ("hi", "again"):
        with monkeypatch.context() as patched:
            patched.setattr(loop, "add_signal_handler", lambda number, cancel: cancel())
            await chat._reply_to(spoken)
        assert capsys.readouterr().out == " [stopped]\n"
        assert chat._messages[-1] == {"role": "assistant", "content": ""}
        await chat._reply_to("go on")
        assert capsys.readouterr().out == "hello world\n"
    assert not front.open


def test_set_without_a_value_shows_it(chat: ChatCli, capsys: pytest.CaptureFixture[str]) -> None:
    chat._set("")
    assert capsys.readouterr().out.startswith("usage: /set FIELD VALUE")
    chat._set("temperature")
    assert capsys.readouterr().out == "temperature = 0.2   (/set temperature VALUE changes it)\n"
    for given, value in {"stop END": "END", "stop": "END   (/set stop VALUE changes it)", "stop null": "()"}.items():
        chat._set(given)
        assert capsys.readouterr().out == f"stop = {value}\n"


def test_show_lists_what_can_be_set(chat: ChatCli, capsys: pytest.CaptureFixture[str]) -> None:
    chat._show("")
    shown = [line.split(" = ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"temperature", "top_p", "stop", "system"} <= set(shown) and not {"n", "logprobs"} & set(shown)


async def test_keys_typed_while_a_reply_streams_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal: not echoed meanwhile, gone afterwards, and echo is on again, even where the reply fails."""
    outer, inner = os.openpty()
    try:
        with open(inner, closefd=False) as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            with pytest.raises(ZeroDivisionError), quiet_keyboard():
                assert not termios.tcgetattr(inner)[3] & termios.ECHO
                assert termios.tcgetattr(inner)[3] & termios.ISIG
                os.write(outer, b"typed ahead\n")
                assert select.select([inner], [], [], 10)[0]
                raise ZeroDivisionError
            assert termios.tcgetattr(inner)[3] & termios.ECHO
            assert not select.select([inner], [], [], 0)[0]
    finally:
        os.close(outer)
        os.close(inner)
