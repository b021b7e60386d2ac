"""`doctor`: look for what commonly goes wrong on a machine. Exit code 1 when something is broken. Imports no torch."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement

from core.commands.doctor_components import component_check
from core.commands.doctor_configs import option_check
from core.commands.doctor_installs import install_check, package_check, plugin_check
from core.commands.findings import Finding, Level
from core.errors import ConfigError, NonetError
from core.host_cpu import cpu_flags, num_cores
from core.memory import free_host_memory
from core.model.sources import default_cache_dir, list_models
from core.plugins import Plugins, load_plugins
from core.session import inspect_session

NEEDED = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "fastapi",
    "uvicorn",
    "pyzmq",
    "msgspec",
    "hydra-core",
    "llguidance",
)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def run(arguments: Sequence[str]) -> int:
    if arguments:
        raise ConfigError(f"unknown argument {arguments[0]!r}; doctor takes none")
    findings = [finding for check in CHECKS for finding in check()] + plugin_findings()
    for finding in findings:
        print(f"{finding.level:<5} {finding.name:<20} {finding.detail}")
    return int(any(finding.level == "fail" for finding in findings))


def python_check() -> list[Finding]:
    level: Level = "ok" if sys.version_info >= (3, 11) else "fail"
    return [Finding(level, "python", f"{platform.python_version()} at {sys.executable}; 3.11 or newer is needed")]


def dependency_check() -> list[Finding]:
    findings = []
    for name in NEEDED:
        try:
            findings.append(Finding("ok", name, version(name)))
        except PackageNotFoundError:
            findings.append(Finding("fail", name, f"not installed; run `make setup`, or pip install {name}"))
    return findings


def plugin_findings() -> list[Finding]:
    """What concerns plugins, which are loaded once for all of it."""
    try:
        plugins = load_plugins()
    except NonetError as error:
        return [Finding("fail", "plugins", str(error))]
    return [finding for check in PLUGIN_CHECKS for finding in check(plugins)]


def config_check(plugins: Plugins) -> list[Finding]:
    without = f"plugins.disable=[{','.join(plugins.left_out())}]"  # what is slow or broken is not tried again
    try:
        inspect_session(["+preset=chat", without])
    except NonetError as error:
        return [Finding("fail", "preset=chat", str(error))]
    return [Finding("ok", "preset=chat", "composes and every value is legal")]


def machine_check() -> list[Finding]:
    free = free_host_memory()
    level: Level = "ok" if free is not None and free > 2 * 2**30 else "warn"
    memory = "an unknown amount" if free is None else f"{free / 2**30:.1f} GiB"
    return [
        Finding(level, "memory", f"{memory} available; the default model wants about 2"),
        Finding(
            "ok", "cores", f"{num_cores()}; bfloat16 in hardware: {'yes' if 'avx512_bf16' in cpu_flags() else 'no'}"
        ),
    ]


def cache_check() -> list[Finding]:
    folder = default_cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return [Finding("fail", "model cache", f"{folder} cannot be written; set NONET_CACHE to a folder that can")]
    names = (
        ", ".join(model.name for model in list_models(folder)) or "empty; `nonet models pull` fetches the default model"
    )
    return [Finding("ok", "model cache", f"{folder}: {names}")]


def compiler_check() -> list[Finding]:
    """Kernels that are built where they run need these; everything else works without."""
    names = {"C": (os.environ.get("CC", "cc"), "gcc", "clang"), "C++": (os.environ.get("CXX", "c++"), "g++", "clang++")}
    findings = []
    for language, commands in names.items():
        found = next(filter(None, map(shutil.which, commands)), None)
        missing = "none found; kernels that are compiled here need one: install gcc and g++, or set CC and CXX"
        findings.append(Finding("ok" if found else "warn", f"{language} compiler", found or missing))
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/nvcc"
    nvcc = shutil.which("nvcc") or shutil.which(cuda)
    level: Level = "ok" if nvcc else "warn" if NVIDIA_DRIVER.exists() else "info"
    return [*findings, Finding(level, "nvcc", nvcc or "not found; CUDA kernels need the CUDA toolkit, or CUDA_HOME")]


def extra_check() -> list[Finding]:
    """What only some need: the optional dependencies, apart from the developer's own."""
    try:
        ours = distribution("nonet")
    except PackageNotFoundError:
        return []  # a bare checkout
    extras = [name for name in ours.metadata.get_all("Provides-Extra") or [] if name != "dev"]
    return [_extra(name, [Requirement(text) for text in ours.requires or []]) for name in extras]


def _extra(name: str, requirements: Sequence[Requirement]) -> Finding:
    own = [r for r in requirements if r.marker and r.marker.evaluate({"extra": name}) and "extra" in str(r.marker)]
    missing = [requirement.name for requirement in own if not _is_installed(requirement.name)]
    if missing:
        return Finding(
            "info", f"extra {name}", f"no {', '.join(missing)}; pip install 'nonet[{name}]' where you want it"
        )
    return Finding(
        "ok", f"extra {name}", ", ".join(requirement.name for requirement in own) or "nothing to install here"
    )


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    python_check,
    package_check,
    dependency_check,
    machine_check,
    cache_check,
    compiler_check,
    extra_check,
)
PLUGIN_CHECKS: tuple[Callable[[Plugins], list[Finding]], ...] = (
    plugin_check,
    component_check,
    install_check,
    option_check,
    config_check,
)
