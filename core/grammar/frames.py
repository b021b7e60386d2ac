"""What front and compiling process tell each other: a length, then one msgpack message, over a pipe each way.

Typed and bounded, as `core.wire`: decoding never runs code that a frame names. A pipe has one reader and one writer.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any

import msgspec

from core.errors import NonetError
from core.request import GrammarSpec

MAX_FRAME_BYTES = 16 * 2**20
MAX_ARTIFACT_BYTES = 2**20  # what a grammar may become: it crosses to the engine with each choice of its requests
OUT_OF_MEMORY = 77  # exit status of a process that could not get more
_LENGTH_BYTES = 4
_CHUNK_BYTES = 1 << 16


class PipeError(NonetError):
    """The other side is gone, or what it sent is no message."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages; the class name is the tag."""


class Boot(Message, frozen=True, tag=True):
    """Front -> compiler, first: what to build, and what it may take."""

    factory: str  # "module:function" that builds the backends; fixed in code, never read from a config
    settings: str  # the root settings as JSON
    plugins: list[str] | None = None  # "name==version" of each that the front has loaded; None: nothing to compare
    memory: int = 0  # bytes; 0: no limit


class Compile(Message, frozen=True, tag=True):
    spec: GrammarSpec
    backends: list[str]  # to try, in this order


class Ready(Message, frozen=True, tag=True):
    memory: int = 0  # bytes in use; 0: unknown


class StartFailed(Message, frozen=True, tag=True):
    reason: str


class Warming(Message, frozen=True, tag=True):
    """A backend is built, or used for the first time: that is no grammar's fault. `Trying` follows."""

    backend: str


class Trying(Message, frozen=True, tag=True):
    """From here on this backend is to blame."""

    backend: str


class Reason(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    backend: str  # "": of the framework's own
    text: str


class Compiled(Message, frozen=True, tag=True):
    backend: str
    artifact: bytes
    faults: list[Reason] = []  # of backends that were tried before
    memory: int = 0


class Refused(Message, frozen=True, tag=True):
    """`reasons`: of backends that do not take the grammar. `faults`: of those that failed."""

    reasons: list[Reason] = []
    faults: list[Reason] = []
    memory: int = 0


FrontMessage = Boot | Compile
CompilerMessage = Ready | StartFailed | Warming | Trying | Compiled | Refused
_encoder = msgspec.msgpack.Encoder()


class FramePipe:
    """One end: what is read, and what is written. A deadline is in monotonic seconds; None: as long as it takes."""

    def __init__(self, read_fd: int, write_fd: int, reads: Any):
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._read_fd, self._write_fd = read_fd, write_fd
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(reads)
        self._held = bytearray()

    def send(self, message: Message, deadline: float | None = None) -> None:
        """Raises PipeError, TimeoutError."""
        body = _encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise PipeError(
                f"a {type(message).__name__} message takes {len(body)} bytes; a frame holds {MAX_FRAME_BYTES}"
            )
        left = memoryview(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
        while left:
            _wait(self._write_fd, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._write_fd, left[:_CHUNK_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise PipeError(f"the pipe is closed: {error.strerror}") from None

    def receive(self, deadline: float | None = None) -> object:
        """The next message; None where the other side has closed the pipe. Raises PipeError, TimeoutError."""
        length = self._take(_LENGTH_BYTES, deadline)
        if length is None:
            return None
        num_bytes = int.from_bytes(length, "big")
        if num_bytes > MAX_FRAME_BYTES:
            raise PipeError(f"a frame of {num_bytes} bytes; {MAX_FRAME_BYTES} is the limit")
        body = self._take(num_bytes, deadline)
        if body is None:
            return None
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise PipeError(f"no message: {error}") from None

    def _take(self, num_bytes: int, deadline: float | None) -> bytes | None:
        while len(self._held) < num_bytes:
            _wait(self._read_fd, select.POLLIN, deadline)
            try:
                chunk = os.read(self._read_fd, _CHUNK_BYTES)
            except BlockingIOError:
                continue
            if not chunk:
                return None
            self._held += chunk
        taken = bytes(self._held[:num_bytes])
        del self._held[:num_bytes]
        return taken


def _wait(fd: int, event: int, deadline: float | None) -> None:
    poller = select.poll()
    poller.register(fd, event)
    while True:
        left = None if deadline is None else (deadline - time.monotonic()) * 1000
        if left is not None and left <= 0:
            raise TimeoutError
        if poller.poll(left):
            return
