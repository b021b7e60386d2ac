"""The native code: compiled with the system's compiler when it is first needed, kept by source, flags and machine.

No compiler, or one that fails, is told in one line, and everything runs on torch: slower, with the same meaning.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from core.host_cpu import cpu_flags
from core.model.file_cache import default_cache_dir
from plugins.cpu.records import ABI, AheadCounts, ModelRecord, StepRecord

log = logging.getLogger("nonet.cpu")

SOURCES = Path(__file__).parent / "native"
MAIN = "program.cpp"
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
    "-pthread",
)
INSTRUCTIONS: Mapping[str, Sequence[str]] = {
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    "avx512_vnni": ("-march=x86-64-v4", "-mavx512vnni"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "portable": (),
}
"""Best first. What a name needs of the machine: `_NEEDS`."""
_V3 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NEEDS: Mapping[str, frozenset[str]] = {
    "avx512_bf16": _V4 | {"avx512_vnni", "avx512_bf16"},
    "avx512_vnni": _V4 | {"avx512_vnni"},
    "avx512": _V4,
    "avx2": _V3,
    "portable": frozenset(),
}
COMPILE_S = 600


class NoNativeCodeError(Exception):
    """The text says why, in one line."""


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    handle: ctypes.CDLL
    instructions: str


@cache
def load(instructions: str = "auto") -> Library:
    """Raises NoNativeCodeError. `instructions`: a key of `INSTRUCTIONS`, or the best that the machine has."""
    name = best_instructions() if instructions == "auto" else instructions
    if missing := _NEEDS[name] - cpu_features():
        raise NoNativeCodeError(f"instructions={name}: this machine lacks {', '.join(sorted(missing))}")
    return Library(_opened(_compiled(name)), name)


@cache
def available(instructions: str) -> Library | None:
    """None where nothing compiles, which is told once."""
    try:
        return load(instructions)
    except NoNativeCodeError as error:
        log.warning("no native CPU code, so all goes through torch, which is slower: %s", error)
        return None


def best_instructions() -> str:
    found = cpu_features()
    return next(name for name, needs in _NEEDS.items() if needs <= found)


@cache
def cpu_features() -> frozenset[str]:
    """Names as Linux has them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    return cpu_flags()


def sources() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".h", ".cpp")}


def _compiled(name: str) -> Path:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    flags = [*FLAGS, *INSTRUCTIONS[name]]
    key = hashlib.sha256(repr((sources(), flags, platform.machine())).encode()).hexdigest()[:20]
    built = default_cache_dir() / "native" / f"{name}-{key}.so"
    if built.is_file():
        return built
    if compiler is None:
        raise NoNativeCodeError("no C++ compiler (g++ or clang++); install one, or set CXX")
    log.info("compiling native code for %s, once: %s", name, built)
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / built.name
            _compile([compiler, *flags, str(SOURCES / MAIN), "-o", str(made)])
            os.replace(made, built)  # two processes at once make the same
    except OSError as error:
        raise NoNativeCodeError(f"compiled code cannot be kept in {built.parent}: {error}") from None
    return built


def _compile(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeCodeError(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        raise NoNativeCodeError(f"{command[0]} fails: {(done.stderr.strip().splitlines() or ['no message'])[-1][:300]}")


def _opened(path: Path) -> ctypes.CDLL:
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoNativeCodeError(f"{path} cannot be loaded: {error}") from None
    if handle.nonet_abi() != ABI:
        raise NoNativeCodeError(f"{path} has another ABI; remove it")
    handle.nonet_team.restype = ctypes.c_void_p
    handle.nonet_team.argtypes = [ctypes.c_int]
    handle.nonet_new.restype = ctypes.c_void_p
    handle.nonet_new.argtypes = [ctypes.POINTER(ModelRecord)]
    handle.nonet_step.argtypes = [ctypes.c_void_p, ctypes.POINTER(StepRecord)]
    handle.nonet_ceilings.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_double)]
    handle.nonet_counts.argtypes, handle.nonet_counts.restype = [ctypes.c_void_p, ctypes.POINTER(AheadCounts)], None
    for end in (handle.nonet_free, handle.nonet_settle):
        end.argtypes, end.restype = [ctypes.c_void_p], None
    return handle
