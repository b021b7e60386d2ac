"""A folder, and processes at work in it, that do not outlive this process, however it ends: by SIGKILL as well.

A process of its own waits for the end of ours. It knows no plugin, so that none can hold it up.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

DONE = "done"
ATTEMPTS = 50
INTERVAL_S = 0.1


class Sweeper:
    """Told of what to sweep while we live; the end of its input, without the word that all is done, is our end."""

    def __init__(self, folder: str):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).absolute()), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def kill_with_us(self, group: int) -> None:
        """A process group, by the id of its leader. Until the last one named ends, it is the one to kill."""
        self._tell(str(group))

    def close(self) -> None:
        self._tell(DONE)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed it
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()


@contextmanager
def swept_folder(prefix: str) -> Iterator[tuple[str, Sweeper]]:
    """A temporary folder with its sweeper."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        sweeper = Sweeper(folder)
        try:
            yield folder, sweeper
        finally:
            sweeper.close()


def sweep(folder: str, words: IO[str]) -> None:
    """What the process does."""
    told = [word.strip() for word in words]
    if told[-1:] == [DONE]:
        return
    for group in told[-1:]:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(int(group), signal.SIGKILL)
    for _ in range(ATTEMPTS):  # whoever was killed may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    sweep(sys.argv[1], sys.stdin)
