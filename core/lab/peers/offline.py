"""Engines without a server: a process each, loaded once and asked in turns (`benchmarks/peers/offline.py` is the other side)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from core.errors import NonetError
from core.lab.bench.calls import WorkItem
from core.lab.bench.prompts import Prompts
from core.lab.peers.environ import MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_THREADS, SCRIPTS, environ

WORDS_OF_ERROR = 2000  # characters of what it printed last
STOP_S = 20.0


class OfflinePeer:
    """`with OfflinePeer("vllm", PYTHON, model) as peer`. Raises NonetError with what it printed where it ends."""

    def __init__(self, name: str, python: str, model: Path):
        self._name = name
        self._setting = {
            "model": str(model),
            "num_threads": NUM_THREADS,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
        }
        self._command = [python, str(SCRIPTS / f"offline_{name}.py")]
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> OfflinePeer:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, env=environ(), start_new_session=True
        )
        try:
            self._ask(self._setting)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            with suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_S)
        self._log.close()

    def seconds(self, items: Sequence[WorkItem]) -> float:
        """For all of them, asked at once."""
        job = {"prompts": [i.prompt_token_ids for i in items], "output_lens": [i.output_len for i in items]}
        return float(self._ask(job)["seconds"])

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-WORDS_OF_ERROR:]
            raise NonetError(f"{self._name} ended:\n{said}")
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass(frozen=True, slots=True)
class Stream:
    """tokens per second of one stream, and its first token in seconds."""

    decode: float
    prefill: float
    ttft: float

    @classmethod
    def of(cls, peer: OfflinePeer, draw: Prompts, input_len: int, output_len: int) -> Stream:
        """From the time of one token and that of all: whoever streams nothing tells no more."""
        first = peer.seconds([draw.item(input_len, 1)])
        whole = peer.seconds([draw.item(input_len, output_len)])
        return cls((output_len - 1) / max(whole - first, 1e-9), input_len / first, first)


def llama_bench(program: str, gguf: Path, input_len: int, output_len: int) -> Stream:
    """llama.cpp's own benchmark. Raises NonetError with what it says where it fails."""
    command = [program, "-m", str(gguf), "-t", str(NUM_THREADS), "-o", "json"]
    command += ["-p", str(input_len), "-n", str(output_len), "-r", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ())
    if done.returncode:
        raise NonetError(f"llama-bench ended with {done.returncode}: {done.stderr[-WORDS_OF_ERROR:]}")
    rates = {bool(one["n_gen"]): float(one["avg_ts"]) for one in json.loads(done.stdout)}
    return Stream(rates[True], rates[False], input_len / rates[False])


def own(*words: str) -> dict[str, Any]:
    """The report of `bench` in a process of its own. Raises NonetError with what it says where it fails."""
    done = subprocess.run([sys.executable, "-m", "core", "bench", *words], capture_output=True, text=True)
    if done.returncode:
        raise NonetError(f"bench {' '.join(words)}: {done.stderr.strip()[-WORDS_OF_ERROR:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
