"""The native code: compiled with the system's compiler when it is first needed, kept by source, flags and machine.

No compiler, or one that fails, is told in one line, and everything runs on torch: slower, with the same meaning.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
COMPILE_S = 300  # takes 15 to 60 s; an engine has `process.start_timeout`, 600 s, to start
DIGEST_BYTES = 32


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
    compiler = (
        shlex.split(os.environ.get("CXX", "")) or list(filter(None, map(shutil.which, ("g++", "clang++", "c++"))))[:1]
    )
    flags = [*FLAGS, *INSTRUCTIONS[name]]
    key = hashlib.sha256(repr((sources(), flags, platform.machine())).encode()).hexdigest()[:20]
    built = default_cache_dir() / "native" / f"{name}-{key}.so"
    try:
        built.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_strangers(built.parent)
        if _is_whole(built):
            return built
        if not compiler:
            raise NoNativeCodeError("no C++ compiler (g++ or clang++); install one, or set CXX")
        log.info("compiling native code for %s, once: %s", name, built)
        _remove_stale(built.parent)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / built.name
            _compile([*compiler, *flags, str(SOURCES / MAIN), "-o", str(made)])
            if not made.is_file():
                raise NoNativeCodeError(f"{compiler[0]} ends well, and has written nothing")
            with made.open("ab") as file:
                file.write(hashlib.sha256(made.read_bytes()).digest())
            os.replace(made, built)  # two processes at once make the same
    except OSError as error:
        raise NoNativeCodeError(f"compiled code cannot be kept in {built.parent}: {error}") from None
    return built


def _refuse_strangers(folder: Path) -> None:
    """Code from a folder that somebody else can write to would be run. Raises NoNativeCodeError, OSError."""
    for place in (folder, folder.parent):
        found = place.stat()
        # the cache folder is made by whoever needs it first, and many systems give each user a group, which may write
        own_group = place != folder and found.st_gid == os.getgid()
        theirs = stat.S_IWOTH if own_group else stat.S_IWOTH | stat.S_IWGRP
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & theirs:
            raise NoNativeCodeError(
                f"others can write to {place}, and code from there is not run; `chown` it or `chmod go-w` it, or set NONET_CACHE "
                "to a folder of your own"
            )


def _is_whole(built: Path) -> bool:
    """Whether it ends with the digest of what is before: a disk may have been full, or the power gone."""
    try:
        found = built.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.getuid(), 0):
            return False
        content = built.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _remove_stale(folder: Path) -> None:
    """What killed compilers have left behind."""
    for place in folder.glob("tmp*"):
        with suppress(OSError):
            if place.stat().st_mtime < time.time() - 2 * COMPILE_S:
                shutil.rmtree(place)


def _compile(command: Sequence[str]) -> None:
    """In a process group of its own, since a compiler is several processes."""
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                stderr = process.communicate(timeout=COMPILE_S)[1].decode(errors="replace")
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeCodeError(f"{command[0]} does not run: {error}") from None
    if process.returncode:
        raise NoNativeCodeError(f"{command[0]} fails: {(stderr.strip().splitlines() or ['no message'])[-1][:300]}")


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
