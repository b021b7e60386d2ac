"""Servers of peers on loopback, for `bench url=…`."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from core.errors import NonetError
from core.lab.peers.environ import MAX_MODEL_LEN, NUM_THREADS, SCRIPTS, environ

START_S = 300.0  # vLLM compiles
STOP_S = 30.0


def vllm_command(python: str, model: Path, port: int, num_seqs: int) -> list[str]:
    serve = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    limits = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(num_seqs)]
    return [
        *serve,
        "--host",
        "127.0.0.1",
        "--dtype",
        "bfloat16",
        *limits,
        "--disable-log-stats",
        "--served-model-name",
        "m",
    ]


def llama_command(program: str, gguf: Path, port: int, num_seqs: int) -> list[str]:
    """Its context is shared out evenly: each sequence gets as much as a long prompt and a stream take together."""
    serve = [program, "-m", str(gguf), "--port", str(port), "--host", "127.0.0.1", "--no-webui"]
    return [*serve, "-np", str(num_seqs), "-c", str(2048 * num_seqs), "-t", str(NUM_THREADS), "-tb", str(NUM_THREADS)]


def openvino_command(python: str, model: Path, port: int, num_seqs: int) -> list[str]:
    """It has no server of its own."""
    return [python, str(SCRIPTS / "server_openvino.py"), str(model), str(port), str(NUM_THREADS), str(num_seqs)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def own_command(words: Sequence[str], port: int) -> list[str]:
    return [sys.executable, "-m", "core", "serve", f"frontend.port={port}", *words]


@contextmanager
def served(name: str, command: Sequence[str], port: int, folder: Path) -> Iterator[str]:
    """The server's address once it is healthy. Raises NonetError with the end of its log where it is not."""
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environ(), cwd=folder, start_new_session=True) as process,
    ):
        try:
            if not _healthy(process, port):
                log.seek(0)
                raise NonetError(f"{name} does not serve:\n{log.read().decode(errors='replace')[-2000:]}")
            yield f"http://127.0.0.1:{port}"
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """By SIGTERM, and by SIGKILL where that takes too long."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _healthy(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    return False
