"""Seeded bad plugins: each breaks one promise, is installed as a wheel would be, and must be caught by the check it names."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.components import CHAINS, GROUPS, hook_of
from core.hookspecs import API_VERSION
from core.testing.harness.server import install_plugin

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "bad_plugins"
CHECK_TIMEOUT_S = 20.0  # of one check
RUN_TIMEOUT_S = 600.0
HOOKS = """\
from core.hookspecs import Component, hookimpl

NONET_API = "{api}"


@hookimpl
def {hook}():
    yield Component("{component}", "{module}:{cls}", "{cls}", provides={provides!r})
"""


@dataclass(frozen=True, slots=True)
class Seed:
    """One bad plugin. `expected` is the check that must fail."""

    name: str  # of the distribution and the plugin
    expected: str
    source: Path
    hooks: str = ""  # text of the module with the hooks; "": the source has them
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Caught:
    """What became of a seed. `by`: every check that failed, with its reason."""

    name: str
    expected: str
    by: Mapping[str, str]

    @property
    def caught(self) -> bool:
        return self.expected in self.by


def seeds(folder: Path = FOLDER) -> list[Seed]:
    """In order of files. Read from the source: nothing is imported."""
    components = [seed for path in sorted(folder.glob("bad_*.py")) for seed in _components(path)]
    return [*components, *(_package(path) for path in sorted(folder.glob("package_*.py")))]


def _components(path: Path) -> Iterator[Seed]:
    """Classes of bad_<group>.py that say by which check they are caught. `provides` of a class stands for the module's."""
    group, tree = path.stem.removeprefix("bad_"), ast.parse(path.read_text(encoding="utf-8"))
    assert group in (*GROUPS, *CHAINS), f"{path.name}: there is no group {group!r}"
    provides = tuple(_literals(tree.body).get("provides", ()))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and "caught_by" in (words := _literals(node.body)):
            name = f"bad-{group.replace('_', '-')}-{node.name.lower()}"
            hooks = HOOKS.format(
                api=API_VERSION,
                hook=hook_of(group),
                component=name.replace("-", "_"),
                module=path.stem,
                cls=node.name,
                provides=tuple(words.get("provides", provides)),
            )
            yield Seed(name, words["caught_by"], path, hooks)


def _package(path: Path) -> Seed:
    words = _literals(ast.parse(path.read_text(encoding="utf-8")).body)
    name = f"bad-{path.stem.removeprefix('package_').replace('_', '-')}"
    return Seed(name, words["CAUGHT_BY"], path, files=words.get("FILES", {}))


def _literals(body: Sequence[ast.stmt]) -> dict[str, Any]:
    """`name = literal` statements."""
    found = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def check_seed(seed: Seed, timeout: float = CHECK_TIMEOUT_S) -> Caught:
    """Install it in a folder of its own, and run the command that its author would."""
    with tempfile.TemporaryDirectory(prefix="nonet-bad-") as name:
        folder, sources = Path(name), [seed.source]
        if seed.hooks:
            hooks = folder / f"{seed.name.replace('-', '_')}_hooks.py"
            hooks.write_text(seed.hooks, encoding="utf-8")
            sources.insert(0, hooks)
        site = folder / "site"
        site.mkdir()
        environ = {**os.environ, **install_plugin(site, seed.name, sources, seed.files), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [
            sys.executable,
            "-m",
            "core",
            "plugins",
            "check",
            seed.name,
            "--json",
            "--timeout",
            str(timeout),
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    if done.returncode not in (0, 1):
        return Caught(seed.name, seed.expected, {"": done.stderr.strip()[-300:]})
    components = json.loads(done.stdout)["components"]
    failed = {entry["check"]: entry["reason"] for one in components for entry in one["failed"]}
    assert (done.returncode == 1) == bool(failed), (
        f"{seed.name}: exit code {done.returncode} with {len(failed)} failed checks"
    )
    return Caught(seed.name, seed.expected, failed)


def check_seeds(chosen: Sequence[Seed], workers: int = 2) -> Iterator[Caught]:
    """As they end, in order."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(check_seed, chosen)
