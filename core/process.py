"""The engine process: builds the engine, turns its step loop, and never outlives the front.

Signals: SIGINT is ignored (a terminal sends it to the whole group; the front decides), SIGTERM ends the loop after the
step in hand, SIGUSR1 writes the stack of every thread to stderr. Standard input is a pipe whose end means that the
front is gone. When the front does not read, the output queue fills and the loop pauses in `_send`: the engine holds at
most `HIGH_WATER_MARK` frames and steps no further.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import get_args

import msgspec
import zmq

from core.border.early import EARLY, EARLY_IMPORTS
from core.border.step_loop import EngineLoop, StepLoop
from core.errors import ConfigError, NonetError, PluginError, Terminated, described, told
from core.progress import Progress
from core.version import nonet_version
from core.wire import (
    MAX_FRAME_BYTES,
    Boot,
    FrontMessage,
    Heartbeat,
    Hello,
    Loading,
    Ready,
    Reply,
    StartError,
    StartFailed,
    Stopped,
    WireError,
    decode,
    encode,
    output_frames,
)

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 64  # frames, each way
HEARTBEAT_S = 0.1
HELLO_TIMEOUT_S = 30.0
MAX_MESSAGES_PER_TURN = 256
LINGER_MS = 1000
PR_SET_PDEATHSIG = 1  # linux/prctl.h

GC_THRESHOLD = (50_000, 20, 100)  # allocations of a few steps with thousands of requests; Python's own is 700
SWITCH_S = 0.0005  # the longest that a step waits for another thread that runs Python; the interpreter has 5 ms

EngineFactory = Callable[[str, Progress], EngineLoop]


class EngineProcess:
    """One engine process from its boot record to its exit status."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._terminated = False
        self._starting = True
        self._sequence = 1  # of the next output frame
        self._dropped = 0  # frames that were no message
        self._last_beat = 0.0  # monotonic seconds
        self._context = zmq.Context()
        self._socket = self._connect()

    def run(self) -> int:
        """Serve until told to stop; returns the exit status."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            engine = self._start()
            if engine is None:
                return 1
            collect_rarely()
            return self._serve(engine)
        except Terminated:
            return self._stopped("SIGTERM while starting", 0)
        finally:
            self._socket.close(linger=LINGER_MS)
            self._context.term()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._boot.identity.encode())
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.connect(self._boot.address)
        return socket

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._terminated = True
        if self._starting:
            raise Terminated(0)

    def _start(self) -> EngineLoop | None:
        """The engine, announced to the front; or None, with the one reason sent."""
        try:
            hello = self._hello()
            remove_socket_directory(self._boot.address)  # both ends are connected: no stranger can follow
            die_with_parent()
            _refuse_difference("version", [hello.version], [nonet_version()])
            engine = load_factory(self._boot.factory)(hello.settings, self._progress)
            info = engine.info()
            if hello.plugins is not None:
                _refuse_difference("plugins", hello.plugins, info.plugins)
        except Terminated:
            raise
        except BaseException as error:  # a plugin may raise anything
            self._send(encode(start_failed(error)))
            return None
        self._starting = False
        self._send(encode(Ready(info=info)))
        return engine

    def _hello(self) -> Hello:
        self._progress("engine process", 1, 1)
        if self._socket.poll(int(HELLO_TIMEOUT_S * 1000)):
            message = decode(self._socket.recv())
            if isinstance(message, Hello):
                return message
        raise NonetError("the front did not say hello")

    def _progress(self, what: str, done: int, total: int) -> None:
        self._send(encode(Loading(what=what, done=done, total=total)))

    def _serve(self, engine: EngineLoop) -> int:
        loop = StepLoop(engine)
        try:
            while not (loop.done or self._terminated):
                self._turn(loop)
        except BaseException as error:  # a plugin may raise anything
            logger.exception("the step loop failed")
            return self._stopped(described(error), 1)
        engine.close()
        return self._stopped("SIGTERM" if self._terminated else "shutdown", 0)

    def _turn(self, loop: StepLoop) -> None:
        if not loop.has_work:
            self._socket.poll(int(HEARTBEAT_S * 1000))
        for result in loop.turn(self._receive()):
            if isinstance(result, Reply):
                self._send(encode(result))
                continue
            frames = output_frames(result, self._sequence)
            self._sequence += len(frames)
            for frame in frames:
                self._send(frame)
        self._beat(loop.step)

    def _receive(self) -> list[FrontMessage]:
        """What has arrived. A frame that is no message for the engine is dropped and counted."""
        messages: list[FrontMessage] = []
        while len(messages) < MAX_MESSAGES_PER_TURN and self._socket.poll(0):
            try:
                message = decode(self._socket.recv())
            except WireError:
                self._dropped += 1
                continue
            if isinstance(message, FrontMessage):
                messages.append(message)
            else:
                self._dropped += 1
        return messages

    def _beat(self, step: int) -> None:
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_S:
            self._last_beat = now
            self._send(encode(Heartbeat(loop_time=now, step=step, dropped=self._dropped)))

    def _send(self, frame: bytes) -> None:
        """Send one frame; a full queue stops the loop here until the front reads, SIGTERM comes, or the front ends."""
        while True:
            try:
                return self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                if self._terminated:
                    return None
                self._socket.poll(int(HEARTBEAT_S * 1000), zmq.POLLOUT)

    def _stopped(self, reason: str, status: int) -> int:
        self._send(encode(Stopped(reason=reason)))
        return status


def start_failed(error: BaseException) -> StartFailed:
    """One line for the user; what Nonet did not raise on purpose is also logged with its traceback."""
    if not isinstance(error, NonetError):
        logger.error("the engine could not be built", exc_info=error)
    message = told(error) if isinstance(error, NonetError) else described(error)
    kinds: tuple[StartError, ...] = get_args(StartError)
    kind: StartError = next((kind for kind in kinds if kind == type(error).__name__), "EngineDeadError")
    return StartFailed(message=message, error=kind)


def collect_rarely() -> None:
    """What has been made by now stays: the collector need not walk it, nor run several times in a step.

    Measured at 2,000 decodes: a third of the framework's time was the collector's.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


def load_factory(name: str) -> EngineFactory:
    """The function behind "module:function"."""
    module, _, function = name.partition(":")
    factory: EngineFactory = getattr(importlib.import_module(module), function)
    return factory


def _refuse_difference(what: str, front: list[str], engine: list[str]) -> None:
    if sorted(front) == sorted(engine):
        return
    only_front = ", ".join(sorted(set(front) - set(engine))) or "none"
    only_engine = ", ".join(sorted(set(engine) - set(front))) or "none"
    raise PluginError(
        f"front and engine process differ in {what}: only in the front: {only_front}; only in the engine: "
        f"{only_engine}; restart the server if packages were changed while it ran"
    )


def import_early() -> None:
    """What the engine will need, while the front does not yet know which one; it may give up meanwhile, or die."""
    die_with_parent()
    for name in EARLY_IMPORTS:
        with suppress(Exception):  # told, as far as it matters, when the engine is built
            importlib.import_module(name)


def read_boot() -> Boot:
    """The first line of standard input, unbuffered: what follows it belongs to the watch."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 65536:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    if not line and sys.argv[1:] == [EARLY]:  # the front has given up, and said why
        sys.exit(1)
    try:
        return msgspec.json.decode(line, type=Boot)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"no boot record on standard input: {error}; this module is started by `nonet serve`"
        ) from None


def watch_front(address: str) -> None:
    """Leave the process as soon as the front's end of standard input closes, even in the middle of a long step."""
    while os.read(0, 1024):
        pass
    remove_socket_directory(address)
    os._exit(1)


def remove_socket_directory(address: str) -> None:
    """Remove the directory of an `ipc://` address."""
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


def die_with_parent() -> None:
    """Linux: the kernel kills this process with the thread that started it, also while a native call holds the GIL."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def main() -> None:
    """Entry of the child process; see `core.border.child.EngineChild` for the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the front blocked it for the time until here
    sys.setswitchinterval(SWITCH_S)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with suppress(OSError):  # no standard error: nothing to write to either
        os.dup2(2, 1)  # standard output belongs to the front
    if sys.argv[1:] == [EARLY]:
        import_early()
    boot = read_boot()
    threading.Thread(target=watch_front, args=(boot.address,), name="watch-front", daemon=True).start()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    sys.exit(EngineProcess(boot).run())
