"""The process that compiles grammars for the front: what a client wrote is parsed here, and nowhere else.

It may take no more than its memory, and its front ends it when it takes too long. It ends with its front: at the end of
standard input, and where the kernel can, with the front's thread. What a backend prints goes to standard error.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import resource
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from core.errors import NonetError, PluginError, Terminated, described, told
from core.grammar.compilation import GrammarBackends
from core.grammar.frames import Boot, Compile, FramePipe, FrontMessage, PipeError, Ready, StartFailed
from core.process import collect_rarely, die_with_parent

logger = logging.getLogger(__name__)


def main() -> None:
    """Entry of the child process; see `core.grammar.compile_child.CompileChild` for the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group; the front decides
    die_with_parent()
    pipe = FramePipe(*_own_pipes(), FrontMessage)
    faulthandler.enable()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s grammars %(levelname)s %(message)s")
    try:
        sys.exit(_serve(pipe))
    except PipeError as error:  # the front is gone
        sys.exit(str(error))


def _own_pipes() -> tuple[int, int]:
    """The pipes under numbers that nobody knows: a plugin may print, and read."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    with suppress(OSError):  # no standard error: nothing to write to either
        os.dup2(2, 1)
    threading.Thread(target=_watch_front, args=(read_fd,), name="watch-front", daemon=True).start()
    return read_fd, write_fd


def _watch_front(read_fd: int) -> None:
    """Leave as soon as the front's end is closed, also while a grammar is compiled."""
    poller = select.poll()
    poller.register(read_fd, select.POLLHUP)
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poller.poll()):
        pass
    os._exit(0)


def _serve(pipe: FramePipe) -> int:
    boot = pipe.receive()
    if not isinstance(boot, Boot):
        return 1
    try:
        limit_memory(boot.memory)
        backends = _built(boot)
    except Terminated:
        raise
    except BaseException as error:  # a plugin may raise anything
        logger.exception("the process that compiles grammars could not start")
        pipe.send(StartFailed(reason=told(error) if isinstance(error, NonetError) else described(error)))
        return 1
    collect_rarely()
    pipe.send(Ready(memory=used_memory()))
    while isinstance(job := pipe.receive(), Compile):
        pipe.send(backends.answer(job, pipe.send, used_memory))
    return 0


def _built(boot: Boot) -> GrammarBackends:
    module, _, function = boot.factory.partition(":")
    backends: GrammarBackends = getattr(importlib.import_module(module), function)(boot.settings)
    if boot.plugins is not None and sorted(boot.plugins) != sorted(backends.plugins):
        raise PluginError(
            "front and the process that compiles grammars differ in plugins; restart the server if packages were changed "
            "while it ran"
        )
    backends.warm_first()
    return backends


def limit_memory(num_bytes: int) -> None:
    """Memory of its own, not of mapped files; a crash writes no core, in which a client's text would be."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if num_bytes and sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def used_memory() -> int:
    """Bytes that count towards the limit; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), 0)
