"""The terminal chat over a scripted front."""

from __future__ import annotations

import asyncio

import pytest

from core.pipeline import PipelineDescription
from core.stages.frontend import FrontendContext
from core.testing.fake_front import FakeFront, Script
from plugins.frontends.chat_cli import ChatCli


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
