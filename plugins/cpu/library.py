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

from core.host_cpu import cpu_flags, cpu_info
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
WATCHED = 'exec 3<&0; (read -r line <&3; kill -KILL 0) >/dev/null 2>&1 & exec "$@" </dev/null 3<&-'
"""Runs a command beside one that waits for the end of our pipe, which comes with the end of this process, however it ends."""


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
    return Library(_kept(name), name)


@cache
def available(instructions: str) -> Library | None:
    """None where nothing compiles, which is told once."""
    try:
        return load(instructions)
    except NoNativeCodeError as error:
        log.warning("no native CPU code, so all goes through torch, which is slower: %s", error)
        return None


def best_instructions() -> str:
    """Intel's cores multiply bfloat16 at about half their rate of float32, and AMD's at twice: `benchmarks/README.md`."""
    found = cpu_features()
    slow = {"avx512_bf16"} if cpu_info("vendor_id") == "GenuineIntel" else set()
    return next(name for name, needs in _NEEDS.items() if needs <= found and name not in slow)


@cache
def cpu_features() -> frozenset[str]:
    """Names as Linux has them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    return cpu_flags()


def sources() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".h", ".cpp")}


def _kept(name: str) -> ctypes.CDLL:
    """What an earlier start has compiled, or this one does."""
    flags = [*FLAGS, *INSTRUCTIONS[name]]
    key = hashlib.sha256(repr((sources(), flags, platform.machine())).encode()).hexdigest()[:20]
    folder = default_cache_dir().resolve() / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_strangers(folder)
        built = folder / f"{name}-{key}.so"
        with suppress(NoNativeCodeError):  # not whole, or of another system's libraries: made again
            return _opened(built)
        return _made(built, flags)
    except OSError as error:
        raise NoNativeCodeError(f"compiled code cannot be kept in {folder}: {error}") from None


def _made(built: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Takes its place only where it can be opened."""
    command = [*_compiler(), *flags, str(SOURCES / MAIN), "-o"]
    log.info("compiling native code, once: %s", built)
    _remove_stale(built.parent)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        _compile([*command, str(made)])
        if not made.is_file():
            raise NoNativeCodeError(f"{command[0]} ends well, and has written nothing")
        made.chmod(0o700)
        with made.open("ab") as file:
            file.write(hashlib.sha256(made.read_bytes()).digest())
        try:
            handle = _opened(made)
        except NoNativeCodeError as error:
            raise NoNativeCodeError(f"what {command[0]} has written {error}; set CXX to another compiler") from None
        os.replace(made, built)  # two processes at once make the same
    return handle


def _compiler() -> Sequence[str]:
    """`CXX` with its arguments, or the first that there is."""
    named = os.environ.get("CXX", "")
    try:
        found = shlex.split(named) or list(filter(None, map(shutil.which, ("g++", "clang++", "c++"))))[:1]
    except ValueError as error:
        raise NoNativeCodeError(f"CXX={named}: {error}") from None
    if not found:
        raise NoNativeCodeError("no C++ compiler (g++ or clang++); install one, or set CXX")
    return found


def _refuse_strangers(folder: Path) -> None:
    """Code from a folder that somebody else can write to, or can put another in the place of, would be run.

    Raises NoNativeCodeError, OSError.
    """
    user = os.getuid()
    for place in (folder, *folder.parents):
        found = place.stat()
        # many systems give each user a group of the same number, and let it write
        own_group = place != folder and found.st_gid == os.getgid() == user
        theirs = stat.S_IWOTH if own_group else stat.S_IWOTH | stat.S_IWGRP
        kept_apart = found.st_mode & stat.S_ISVTX and place != folder  # as in /tmp: each renames what is his own
        if found.st_uid not in (user, 0) or (found.st_mode & theirs and not kept_apart):
            raise NoNativeCodeError(
                f"others can write to {place}, and code from there is not run; `chown` it or `chmod go-w` it, or set NONET_CACHE "
                "to a folder of your own"
            )


def _remove_stale(folder: Path) -> None:
    """What killed compilers have left behind."""
    for place in folder.glob("tmp*"):
        with suppress(OSError):
            if place.stat().st_mtime < time.time() - 2 * COMPILE_S:
                shutil.rmtree(place)


def _compile(command: Sequence[str]) -> None:
    """In a process group of its own, since a compiler is several processes; all of them end with this process."""
    alive, ours = os.pipe()
    try:
        with subprocess.Popen(
            ["sh", "-c", WATCHED, "sh", *command],
            stdin=alive,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                stderr = process.communicate(timeout=COMPILE_S)[1].decode(errors="replace")
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeCodeError(f"{command[0]} does not run: {error}") from None
    finally:
        os.close(alive)
        os.close(ours)
    if process.returncode:
        raise NoNativeCodeError(f"{command[0]} fails: {(stderr.strip().splitlines() or ['no message'])[-1][:300]}")


def _opened(path: Path) -> ctypes.CDLL:
    """What is checked is what is run: both go by one descriptor, whatever becomes of the name. It stays open, since the
    system's loader takes one name for one library. Raises NoNativeCodeError where it is not to be run."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NoNativeCodeError(f"cannot be opened: {error}") from None
    try:
        _check(file)
        place = f"/proc/self/fd/{file}"
        handle = _loaded(place if os.path.exists(place) else str(path))
    except (OSError, NoNativeCodeError) as error:
        os.close(file)
        raise NoNativeCodeError(f"cannot be loaded: {error}") from None
    if handle.nonet_abi() != ABI:
        raise NoNativeCodeError("has another ABI")
    return handle


def _check(file: int) -> None:
    """It is ours alone, and ends with the digest of what is before: a disk may have been full, or the power gone."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise NoNativeCodeError("it is not a file that its user alone can write to")
    with os.fdopen(os.dup(file), "rb") as whole:
        content = whole.read()
    if hashlib.sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
        raise NoNativeCodeError("it is not whole")


def _loaded(place: str) -> ctypes.CDLL:
    """With the types of its functions. Raises OSError."""
    handle = ctypes.CDLL(place)
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
