"""A fresh virtual environment with real wheels in it: Nonet's, built from this checkout, and those of plugins.

Third-party dependencies are seen through a .pth line that names the site-packages of this environment. Such a line is a
plain path: .pth files inside that folder are not read, so an editable Nonet there stays out of sight.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 120.0
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist", ".*_cache")
HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "NONET_PLUGINS_DISABLE", "NONET_PLUGINS_START_TIMEOUT")
ENVIRON = {**{key: value for key, value in os.environ.items() if key not in HIDDEN}, "OMP_NUM_THREADS": "1"}


def succeed(command: Sequence[str | Path], cwd: Path, seconds: float = SECONDS) -> str:
    """Its standard output. AssertionError with both streams where it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=ENVIRON, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheels(sources: Sequence[Path], target: Path) -> list[Path]:
    """One wheel per source folder. Sources must be copies: setuptools leaves files in them."""
    target.mkdir(parents=True, exist_ok=True)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", target)
    before = set(target.glob("*.whl"))
    succeed([*PIP, "wheel", *options, *sources], cwd=target, seconds=600)
    return sorted(set(target.glob("*.whl")) - before)


def build_nonet(folder: Path) -> Path:
    """The wheel of this checkout, built in `folder`."""
    source = folder / "nonet-source"
    source.mkdir(parents=True)
    for name in ("core", "plugins", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=NOT_SOURCE)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    (wheel,) = build_wheels([source], folder / "nonet-wheel")
    return wheel


@dataclass(frozen=True, slots=True)
class Site:
    """A virtual environment, and an empty folder to work in."""

    venv: Path
    work: Path

    @classmethod
    def make(cls, folder: Path, wheels: Sequence[Path]) -> Site:
        site = cls(folder / "venv", folder / "work")
        site.work.mkdir(parents=True)
        succeed([sys.executable, "-m", "venv", "--without-pip", site.venv], cwd=folder)
        (packages,) = site.venv.glob("lib/python*/site-packages")
        parents = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in parents), encoding="utf-8")
        site.install(*wheels)
        return site

    @property
    def python(self) -> Path:
        return self.venv / "bin/python"

    def install(self, *wheels: Path) -> None:
        succeed([*PIP, "--python", self.python, "install", "-q", "--no-deps", "--no-index", *wheels], cwd=self.work)

    def uninstall(self, name: str) -> None:
        succeed([*PIP, "--python", self.python, "uninstall", "-q", "--yes", name], cwd=self.work)

    @contextmanager
    def installed(self, wheel: Path, name: str) -> Iterator[None]:
        self.install(wheel)
        try:
            yield
        finally:
            self.uninstall(name)

    def nonet(self, *arguments: str, text: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `nonet` in the work folder with `text` on standard input."""
        command = [str(self.venv / "bin/nonet"), *arguments]
        return subprocess.run(
            command,
            cwd=self.work,
            env={**ENVIRON, **environ},
            input=text,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def said(self, *arguments: str, text: str = "", **environ: str) -> str:
        done = self.nonet(*arguments, text=text, **environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *arguments: str, **environ: str) -> str:
        """The one line on stderr."""
        done = self.nonet(*arguments, **environ)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        return done.stderr
