"""What front and compiling process tell each other: bounded, typed, and nothing that hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.grammar.frames import (
    MAX_FRAME_BYTES,
    Compile,
    Compiled,
    CompilerMessage,
    FramePipe,
    FrontMessage,
    PipeError,
    Ready,
)
from core.request import GrammarSpec

SOON = 0.2  # seconds


@pytest.fixture()
def ends() -> Iterator[tuple[FramePipe, FramePipe, list[int]]]:
    """Front and child, and the raw numbers: read and write of the front, of the child."""
    (child_read, front_write), (front_read, child_write) = os.pipe(), os.pipe()
    fds = [front_read, front_write, child_read, child_write]
    yield FramePipe(front_read, front_write, CompilerMessage), FramePipe(child_read, child_write, FrontMessage), fds
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def test_messages_arrive_as_they_were_sent(ends) -> None:
    front, child, _ = ends
    sent = [Compile(spec=GrammarSpec(kind="regex", source="é" * n), backends=["a"]) for n in (1, 100, 5000)]
    for message in sent:
        front.send(message)
    assert [child.receive() for _ in sent] == sent


def test_one_that_is_larger_than_the_pipe_waits_for_its_reader(ends) -> None:
    front, child, _ = ends
    large = Compiled(backend="a", artifact=os.urandom(2**20))
    writer = threading.Thread(target=child.send, args=(large,))
    writer.start()
    assert front.receive(time.monotonic() + 10) == large
    writer.join()


def test_a_reader_and_a_writer_wait_for_no_longer_than_they_may(ends) -> None:
    front, child, _ = ends
    with pytest.raises(TimeoutError):
        front.receive(time.monotonic() + SOON)
    with pytest.raises(TimeoutError):
        child.send(Compiled(backend="a", artifact=bytes(2**20)), time.monotonic() + SOON)


def test_the_end_of_the_other_side_is_told(ends) -> None:
    front, child, (front_read, front_write, child_read, child_write) = ends
    child.send(Ready(memory=1))
    os.close(child_write)
    assert front.receive() == Ready(memory=1)
    assert front.receive() is None
    os.close(child_read)
    with pytest.raises(PipeError):
        front.send(Compile(spec=GrammarSpec(kind="regex"), backends=[]))


def test_too_large_a_frame_is_neither_sent_nor_read(ends) -> None:
    front, child, (_, _, _, child_write) = ends
    with pytest.raises(PipeError, match="a frame holds"):
        child.send(Compiled(backend="a", artifact=bytes(MAX_FRAME_BYTES)))
    os.write(child_write, (MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(PipeError, match="is the limit"):
        front.receive()


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_noise_is_no_message(noise: bytes) -> None:
    read, write = os.pipe()
    other_read, other_write = os.pipe()
    try:
        os.write(write, len(noise).to_bytes(4, "big") + noise)
        pipe = FramePipe(read, other_write, CompilerMessage)
        with pytest.raises(PipeError):
            raise PipeError(str(pipe.receive()))  # a message that noise happens to be is one
    finally:
        for fd in (read, write, other_read, other_write):
            os.close(fd)
