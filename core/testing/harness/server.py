"""The real server as a child process: `python -m core serve …` on 127.0.0.1, its log in a file, its end checked.

Everything that a server leaves behind (processes, socket directories) is found through its private TMPDIR.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType

import psutil

from core.testing.harness.frontend_thread import wait_until

ROOT = Path(__file__).resolve().parents[3]
START_S = 120.0  # a start is a few seconds; a loaded machine gets more
STOP_S = 30.0
TORCH_LAYERS = ("model=native", "attention=torch_sdpa", "quant=none")
_ADDRESS = re.compile(r"^Nonet serving .* on (http://\S+)$", re.MULTILINE)


class RunningServer:
    """`with RunningServer(overrides) as server:` starts it and waits until /health says 200.

    `overrides` go to `serve +preset=chat` with the torch layers, unless they choose a model: so slow that tests meet requests
    which still run. `environ` is added to the environment. At the end it gets SIGTERM, and what
    is left of it is killed; when the block failed, its log is printed.
    """

    def __init__(
        self, overrides: Sequence[str], *, port: int = 0, environ: Mapping[str, str] | None = None, wait: bool = True
    ):
        self._home = Path(tempfile.mkdtemp(prefix="nt-", dir="/tmp"))  # a socket path must be short
        self._sockets = self._home / "tmp"
        self._sockets.mkdir()
        self._log = self._home / "server.log"
        self._environ = {**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {}), "TMPDIR": str(self._sockets)}
        layers = () if any(word.startswith("model=") for word in overrides) else TORCH_LAYERS
        chosen = ["+preset=chat", *layers, f"frontend.port={port}", *overrides]
        self._command = [sys.executable, "-m", "core", "serve", *chosen]
        self._wait = wait
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RunningServer:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if self._wait:
                self.wait_ok()
        except BaseException:
            self._clear(show_log=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.running:
                self.stop()
        except BaseException:
            self._clear(show_log=True)
            raise
        self._clear(show_log=kind is not None)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def pid(self) -> int:
        """Of the front (HTTP) process."""
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def base_url(self) -> str:
        """Without a path. AssertionError until the server listens."""
        address = _ADDRESS.search(self.log())
        assert address, "the server does not listen yet"
        return address[1]

    @property
    def port(self) -> int:
        return int(self.base_url.rpartition(":")[2])

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Every process of this server that lives, orphans included."""
        return [process for process in psutil.process_iter() if _has_environ(process, "TMPDIR", str(self._sockets))]

    def engine_pid(self, seconds: float = START_S) -> int:
        """Waits until there is an engine process."""
        engines: list[int] = []

        def found() -> bool:
            engines[:] = self._children("core.process")
            return bool(engines)

        wait_until(found, seconds)
        return engines[0]

    def compiler_pids(self) -> list[int]:
        """Of the process that compiles grammars, where there is one now."""
        return self._children("core.grammar.compile_process")

    def _children(self, module: str) -> list[int]:
        found: list[int] = []
        for process in self.processes():
            with suppress(psutil.Error):  # gone meanwhile
                if any(f"from {module} import main" in word for word in process.cmdline()):
                    found.append(process.pid)
        return found

    def socket_directories(self) -> list[Path]:
        return list(self._sockets.iterdir())

    def health(self) -> tuple[int, str]:
        """HTTP status and the word in the body; (0, "") while nobody listens."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=10) as answer:
                return answer.status, json.load(answer)["status"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["status"]
        except (AssertionError, OSError):
            return 0, ""

    def wait_health(self, status: int, word: str | None = None, seconds: float = START_S) -> None:
        """AssertionError when the server ends first, or does not say so in time."""

        def said() -> bool:
            assert self.running, f"the server ended with {self.process.returncode}"
            told = self.health()
            return told[0] == status and word in (None, told[1])

        wait_until(said, seconds)

    def wait_ok(self) -> None:
        self.wait_health(200)

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self, seconds: float = STOP_S) -> int:
        """The exit status; AssertionError when it does not end in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end within {seconds:g} s") from None

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = STOP_S) -> int:
        """End it by a signal; returns the exit status. AssertionError where it leaves anything behind."""
        self.send_signal(number)
        status = self.wait_exit(seconds)
        self.assert_gone()
        return status

    def assert_gone(self, seconds: float = 10.0) -> None:
        """No process of this server lives, and no socket directory is left."""
        wait_until(lambda: not self.processes(), seconds)
        assert self.socket_directories() == []

    def _clear(self, *, show_log: bool) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(STOP_S)
        if show_log:
            print(f"--- {' '.join(self._command)}\n{self.log()}--- end of the server's log", file=sys.stderr)
        shutil.rmtree(self._home, ignore_errors=True)


def _has_environ(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(name) == value
    except (psutil.Error, OSError):  # gone, or another user's
        return False


def metric(exposition: str, name: str, **labels: str) -> float:
    """The sum of the samples called `name` with these labels, from Prometheus text; 0.0 without any."""
    total = 0.0
    for line in exposition.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(?P<labels>.*)\}})? (?P<value>\S+)", line)
        if match and all(f'{key}="{word}"' in (match["labels"] or "") for key, word in labels.items()):
            total += float(match["value"])
    return total


def install_plugin(
    folder: Path, name: str, sources: Sequence[Path], files: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Lay a plugin out as an installed distribution `name` 1.0; returns the environment that shows it.

    What a wheel leaves behind: modules (the first holds the hooks), further `files` (path -> text) and a `.dist-info` with
    the entry point and the list of all these, in a folder on the module path.
    """
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    for source in sources:
        shutil.copy(source, folder)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    brought = [*(source.name for source in sources), *files]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in brought), encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[nonet.plugins]\n{name} = {sources[0].stem}\n", encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def memory_bytes(pid: int) -> int:
    """Anonymous memory of a process, in RAM and swapped out: what a leak grows (Linux)."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))
