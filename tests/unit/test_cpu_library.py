"""Compiled code on disk: whole, from nobody else, and made again where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from plugins.cpu import library
from plugins.cpu.library import NoNativeCodeError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(library, "default_cache_dir", lambda: tmp_path / "nonet")
    return tmp_path / "nonet" / "native"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Commands of a compiler that writes a few bytes."""
    commands: list[Sequence[str]] = []

    def compile_(command: Sequence[str]) -> None:
        commands.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"code of some length")

    monkeypatch.setattr(library, "_compile", compile_)
    return commands


def test_it_is_compiled_once(cache: Path, compiled: list[Sequence[str]]) -> None:
    built = library._compiled("portable")
    assert built == library._compiled("portable") and len(compiled) == 1
    assert list(cache.iterdir()) == [built] and cache.stat().st_mode & 0o077 == 0


def test_cxx_may_have_arguments(cache: Path, compiled: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache g++ -g0")
    library._compiled("portable")
    assert list(compiled[0][:4]) == ["ccache", "g++", "-g0", library.FLAGS[0]]


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, 7),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "one bit": lambda path: path.write_bytes(b"C" + path.read_bytes()[1:]),
    "a pipe": _pipe,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_whole_is_compiled_again(damage: str, cache: Path, compiled: list[Sequence[str]]) -> None:
    """Opening it could end the process: code that is mapped and has no end is a bus error."""
    built = library._compiled("portable")
    before = built.read_bytes()
    DAMAGES[damage](built)
    assert library._compiled("portable").read_bytes() == before and len(compiled) == 2


@pytest.mark.parametrize("place", ["the folder", "the cache"])
def test_code_that_others_could_have_written_is_not_run(place: str, cache: Path, compiled: list[Sequence[str]]) -> None:
    library._compiled("portable")
    open_to_all = cache if place == "the folder" else cache.parent
    open_to_all.chmod(0o777)
    with pytest.raises(NoNativeCodeError, match=f"others can write to {open_to_all}, .*NONET_CACHE"):
        library._compiled("portable")


def test_the_cache_may_belong_to_the_users_group(cache: Path, compiled: list[Sequence[str]]) -> None:
    library._compiled("portable")
    cache.parent.chmod(0o770)
    library._compiled("portable")
    cache.chmod(0o770)
    with pytest.raises(NoNativeCodeError, match=f"others can write to {cache}, "):
        library._compiled("portable")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_code_of_another_user_is_not_run(cache: Path, compiled: list[Sequence[str]]) -> None:
    built = library._compiled("portable")
    os.chown(built, 65534, 65534)
    assert library._compiled("portable").stat().st_uid == 0 and len(compiled) == 2
    os.chown(cache, 65534, 65534)
    with pytest.raises(NoNativeCodeError, match="others can write"):
        library._compiled("portable")


def test_what_killed_compilers_left_is_removed(cache: Path, compiled: list[Sequence[str]]) -> None:
    for name, age in (("tmpold", 3600.0), ("tmpnew", 0.0)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    library._compiled("portable")
    assert [path.name for path in cache.glob("tmp*")] == ["tmpnew"]


def test_a_compiler_that_hangs_is_ended_with_all_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "COMPILE_S", 0.5)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(NoNativeCodeError, match="sh does not run: .*timed out"):
        library._compile(["sh", "-c", "sleep 61 & wait"])
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not [one for one in psutil.process_iter() if _command(one) == ["sleep", "61"]]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.Error:
        return []


def test_a_compiler_that_writes_nothing_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(NoNativeCodeError, match="true ends well, and has written nothing"):
        library._compiled("portable")


def test_a_compiler_that_fails_says_why() -> None:
    with pytest.raises(NoNativeCodeError, match="sh fails: .*a byte"):
        library._compile(["sh", "-c", r"printf '\\377 a byte' >&2; exit 1"])
    with pytest.raises(NoNativeCodeError, match="sh fails: no such thing"):
        library._compile(["sh", "-c", "echo no such thing >&2; exit 1"])


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_threads_that_the_system_does_not_give_are_an_error_and_not_the_end() -> None:
    code = (
        "import resource; from core.errors import NonetError; from plugins.cpu.library import available\n"
        "from plugins.cpu.program import _team\n"
        "found = available('portable')\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20),) * 2)\n"
        "try:\n"
        "    found and _team(found, 1000)\n"
        "except NonetError as error:\n"
        "    print(error)\n"
        "print('alive', found is None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("alive True\n") or "lower executor.num_threads" in done.stdout
