"""What a server takes from the start of its process to its first answer, and the memory that it then has."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from core.errors import NonetError
from core.lab.peers.servers import end, free_port, own_command

LIMIT_S = 120.0
TURN_S = 0.02  # between two tries
CALL = json.dumps({"prompt": "Hi", "max_tokens": 1})


@dataclass(frozen=True, slots=True)
class StartUp:
    """`memory_bytes`: of all its processes; pages that several share are counted once (PSS)."""

    first_answer_s: float
    memory_bytes: int


def start_up(words: Sequence[str], folder: Path) -> StartUp:
    """One start of `serve`, to its end. Raises NonetError where it ends or does not answer in two minutes.

    Python keeps what it compiles, as it does by itself; a machine for tests may have that switched off.
    """
    port = free_port()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        with subprocess.Popen(own_command(words, port), stdout=log, stderr=log, env=environ, cwd=folder) as process:
            try:
                while not _answered(port, started + LIMIT_S - time.perf_counter()):
                    if process.poll() is not None or time.perf_counter() - started > LIMIT_S:
                        log.seek(0)
                        raise NonetError(f"the server does not answer:\n{log.read().decode(errors='replace')[-2000:]}")
                    time.sleep(TURN_S)
                return StartUp(time.perf_counter() - started, _memory_bytes(process.pid))
            finally:
                end(process)


def _answered(port: int, timeout_s: float) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=max(timeout_s, TURN_S))
    try:
        connection.request("POST", "/v1/completions", CALL, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except OSError:  # nobody listens yet
        return False
    finally:
        connection.close()


def _memory_bytes(pid: int) -> int:
    front = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in (front, *front.children(recursive=True)))
