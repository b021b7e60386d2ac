"""`doctor`: look for what commonly goes wrong on a machine. Exit code 1 when something is broken. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from core.errors import ConfigError, NonetError
from core.memory import free_host_memory
from core.model.sources import default_cache_dir, list_models
from core.plugins import load_plugins
from core.session import open_session

PACKAGES = ("core", "plugins", "configs")
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn", "pyzmq", "msgspec", "hydra-core")


@dataclass(frozen=True, slots=True)
class Finding:
    """`level` is ok, warn or fail; `detail` says what was seen and, unless ok, the next step."""

    level: str
    name: str
    detail: str


def run(arguments: Sequence[str]) -> int:
    if arguments:
        raise ConfigError(f"unknown argument {arguments[0]!r}; doctor takes none")
    findings = [finding for check in CHECKS for finding in check()]
    for finding in findings:
        print(f"{finding.level:<5} {finding.name:<20} {finding.detail}")
    return int(any(finding.level == "fail" for finding in findings))


def python_check() -> list[Finding]:
    level = "ok" if sys.version_info >= (3, 11) else "fail"
    return [Finding(level, "python", f"{platform.python_version()} at {sys.executable}; 3.11 or newer is needed")]


def package_check() -> list[Finding]:
    """Our three top-level names must come from one place; another wheel, or the working directory, may shadow them."""
    findings = []
    home = Path(__file__).resolve().parents[2]
    owners = packages_distributions()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve().parents[1] if spec and spec.origin else None
        others = sorted({owner for owner in owners.get(name, []) if owner != "nonet"})
        if found != home:
            findings.append(
                Finding("fail", name, f"comes from {found}, not {home}: a folder of that name shadows ours")
            )
        elif others:
            findings.append(
                Finding("fail", name, f"{', '.join(others)} ships a package of this name too; uninstall it")
            )
        else:
            findings.append(Finding("ok", name, str(found)))
    return findings


def dependency_check() -> list[Finding]:
    findings = []
    for name in NEEDED:
        try:
            findings.append(Finding("ok", name, version(name)))
        except PackageNotFoundError:
            findings.append(Finding("fail", name, f"not installed; run `make setup`, or pip install {name}"))
    return findings


def plugin_check() -> list[Finding]:
    try:
        records = load_plugins().records
    except NonetError as error:
        return [Finding("fail", "plugins", str(error))]
    bad = [
        Finding("warn", record.name, f"{record.distribution}: {record.reason}")
        for record in records
        if record.status == "failed"
    ]
    return bad or [Finding("ok", "plugins", f"{len(records)} loaded, none failed")]


def config_check() -> list[Finding]:
    try:
        open_session(["+preset=chat"])
    except NonetError as error:
        return [Finding("fail", "preset=chat", str(error))]
    return [Finding("ok", "preset=chat", "composes and every value is legal")]


def machine_check() -> list[Finding]:
    free = free_host_memory()
    level = "ok" if free is not None and free > 2 * 2**30 else "warn"
    memory = "an unknown amount" if free is None else f"{free / 2**30:.1f} GiB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        Finding(level, "memory", f"{memory} available; the default model wants about 2"),
        Finding("ok", "cores", f"{cores}; bfloat16 in hardware: {'yes' if 'avx512_bf16' in _cpu_flags() else 'no'}"),
    ]


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    return frozenset(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def cache_check() -> list[Finding]:
    folder = default_cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return [Finding("fail", "model cache", f"{folder} cannot be written; set NONET_CACHE to a folder that can")]
    names = (
        ", ".join(model.name for model in list_models(folder)) or "empty; `nonet models pull` fetches the default model"
    )
    return [Finding("ok", "model cache", f"{folder}: {names}")]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    python_check,
    package_check,
    dependency_check,
    plugin_check,
    config_check,
    machine_check,
    cache_check,
)
