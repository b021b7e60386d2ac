"""The front's end of one engine process: the child, its socket, and what it costs to be rid of both."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from core.border.early import EarlyProcess, start_process
from core.process import HIGH_WATER_MARK, remove_socket_directory
from core.wire import MAX_FRAME_BYTES, AnyMessage, Boot, decode

MAX_SOCKET_PATH = 100  # bytes; sun_path holds 104 on macOS and 108 on Linux


class EngineChild:
    """One life of the engine process. Used by one thread; only `kill` may be called from any.

    The socket is a ROUTER in a fresh 0700 directory. It listens to the one peer that knows the random routing id and
    drops the frames of all others; the child removes the directory as soon as it has connected. A process that was begun
    `early` becomes the child.
    """

    def __init__(self, factory: str, early: EarlyProcess | None = None) -> None:
        self.dropped = 0  # frames of strangers, and frames that were no message
        self._identity = secrets.token_hex(16)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._address = f"ipc://{_socket_directory() / 'engine'}"
        try:
            self._bind()
            self._process = self._spawn(factory, early)
        except BaseException:
            self._close_socket()
            raise

    def _bind(self) -> None:
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or missing peer is an error, not a silent loss
        self._socket.bind(self._address)
        os.chmod(self._address.removeprefix("ipc://"), 0o600)

    def _spawn(self, factory: str, early: EarlyProcess | None) -> subprocess.Popen[bytes]:
        process = (early.take() if early is not None else None) or start_process()
        boot = Boot(address=self._address, identity=self._identity, factory=factory)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # a child that died already is noticed by its exit status
            process.stdin.write(msgspec.json.encode(boot) + b"\n")
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def wait(self, wake_fd: int, timeout_s: float, *, reading: bool) -> None:
        """Sleep until `wake_fd` is readable, a frame has come (only when `reading`), or the time is over."""
        poller = zmq.Poller()
        poller.register(wake_fd, zmq.POLLIN)
        if reading:
            poller.register(self._socket, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))

    def receive(self) -> AnyMessage | None:
        """The next message of the child, or None when there is none now. Raises WireError for a frame of the child's
        that is no message; a stranger's frames are dropped and counted."""
        while True:
            try:
                sender, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
                if sender == self._identity.encode() and len(parts) == 1:
                    return decode(parts[0])
            except zmq.Again:
                return None
            self.dropped += 1

    def send(self, frame: bytes) -> bool:
        """False when the child's queue is full. A frame to a child that is gone is lost: its death is noticed apart."""
        try:
            self._socket.send_multipart((self._identity.encode(), frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return True

    def kill(self) -> None:
        self._process.kill()

    def close(self, grace_s: float) -> None:
        """Give the child `grace_s` seconds to end by itself, kill it if it has not, and remove every trace."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._close_socket()

    def _close_socket(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        remove_socket_directory(self._address)


def _socket_directory() -> Path:
    """A fresh directory of mode 0700 whose path is short enough for a socket in it."""
    directory = Path(tempfile.mkdtemp(prefix="nonet-"))
    if len(os.fsencode(directory)) <= MAX_SOCKET_PATH - len("/engine"):
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="nonet-", dir="/tmp"))
