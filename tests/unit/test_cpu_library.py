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

from core.testing.harness.frontend_thread import wait_until
from plugins.cpu import library
from plugins.cpu.library import NoNativeCodeError
from plugins.cpu.records import ABI

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(library, "default_cache_dir", lambda: tmp_path / "nonet")
    return tmp_path / "nonet" / "native"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Commands of a compiler that writes a few bytes, which are taken for code."""
    commands: list[Sequence[str]] = []

    def compile_(command: Sequence[str]) -> None:
        commands.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"code of some length")

    monkeypatch.setattr(library, "_compile", compile_)
    monkeypatch.setattr(library, "_loaded", lambda place: Code())
    return commands


class Code:
    """What a loader takes them for."""

    def nonet_abi(self) -> int:
        return ABI


def kept(cache: Path) -> Path:
    """The file that there is after `_kept`."""
    library._kept("portable")
    [built] = cache.glob("portable-*.so")
    return built


def test_it_is_compiled_once(cache: Path, compiled: list[Sequence[str]]) -> None:
    built = kept(cache)
    assert built == kept(cache) and len(compiled) == 1
    assert list(cache.iterdir()) == [built] and (cache.stat().st_mode | built.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize(
    ("vendor", "features", "best"),
    [
        ("AuthenticAMD", library._NEEDS["avx512_bf16"], "avx512_bf16"),
        ("GenuineIntel", library._NEEDS["avx512_bf16"], "avx512_vnni"),
        ("GenuineIntel", library._NEEDS["avx2"] | {"avx512f"}, "avx2"),
        ("", frozenset(), "portable"),
    ],
)
def test_the_best_are_those_that_compute_fastest(
    vendor: str, features: frozenset[str], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "cpu_features", lambda: features)
    monkeypatch.setattr(library, "cpu_info", lambda key: vendor)
    assert library.best_instructions() == best


def test_cxx_may_have_arguments(cache: Path, compiled: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache g++ -g0")
    library._kept("portable")
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
    "a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".other"))),
    "writable by others": lambda path: path.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_whole_is_compiled_again(damage: str, cache: Path, compiled: list[Sequence[str]]) -> None:
    """Opening it could end the process: code that is mapped and has no end is a bus error."""
    built = kept(cache)
    before = built.read_bytes()
    DAMAGES[damage](built)
    assert kept(cache).read_bytes() == before and len(compiled) == 2


@pytest.mark.parametrize("place", ["the folder", "the cache", "above"])
def test_code_that_others_could_have_written_is_not_run(place: str, cache: Path, compiled: list[Sequence[str]]) -> None:
    library._kept("portable")
    open_to_all = {"the folder": cache, "the cache": cache.parent, "above": cache.parents[1]}[place]
    open_to_all.chmod(0o777)
    with pytest.raises(NoNativeCodeError, match=f"others can write to {open_to_all}, .*NONET_CACHE"):
        library._kept("portable")
    open_to_all.chmod(
        0o1777
    )  # as /tmp is: nobody puts another folder in the place of ours, and our own is no such place
    if place == "the folder":
        with pytest.raises(NoNativeCodeError, match="others can write"):
            library._kept("portable")
    else:
        library._kept("portable")


def test_a_cache_behind_a_link_is_the_folder_that_it_leads_to(
    tmp_path: Path, compiled: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is checked, and the link not looked at again."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "nonet")
    monkeypatch.setattr(library, "default_cache_dir", lambda: tmp_path / "link")
    with pytest.raises(NoNativeCodeError, match=f"others can write to {tmp_path / 'open'}, "):
        library._kept("portable")


def test_what_cannot_be_loaded_is_not_kept(
    cache: Path, compiled: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = kept(cache)
    loads = iter([OSError("file too short"), None, OSError("file too short"), OSError("file too short")])

    def load(place: str) -> Code:
        if (error := next(loads)) is not None:
            raise error
        return Code()

    monkeypatch.setattr(library, "_loaded", load)
    monkeypatch.setenv("CXX", "g++")
    assert kept(cache) == built and len(compiled) == 2  # compiled again
    before = built.stat().st_ino
    with pytest.raises(NoNativeCodeError, match=r"what g\+\+ has written cannot be loaded: file too short; set CXX"):
        library._kept("portable")
    assert built.stat().st_ino == before and list(cache.iterdir()) == [built]


def test_code_of_another_abi_keeps_the_name_that_it_was_loaded_by(
    cache: Path, compiled: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's loader would give it once more to whoever asks by that name, which has the descriptor's number."""
    kept(cache)
    names: list[str] = []

    def load(place: str) -> Code:
        names.append(place)
        code = Code()
        if len(names) == 1:
            code.nonet_abi = lambda: ABI - 1  # type: ignore[method-assign]
        return code

    monkeypatch.setattr(library, "_loaded", load)
    kept(cache)
    assert len(set(names)) == len(names) == 2 and len(compiled) == 2


def test_the_cache_may_belong_to_the_users_group(cache: Path, compiled: list[Sequence[str]]) -> None:
    """Where the group has the user's number: others are not in it."""
    library._kept("portable")
    cache.parent.chmod(0o770)
    if os.getgid() == os.getuid():
        library._kept("portable")
    cache.chmod(0o770)
    with pytest.raises(NoNativeCodeError, match="others can write to "):
        library._kept("portable")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_code_of_another_user_is_not_run(cache: Path, compiled: list[Sequence[str]]) -> None:
    built = kept(cache)
    os.chown(built, 65534, 65534)
    assert kept(cache).stat().st_uid == 0 and len(compiled) == 2
    for place in (cache, cache.parent, cache.parents[1]):
        os.chown(place, 65534, 65534)
        with pytest.raises(NoNativeCodeError, match=f"others can write to {place}, "):
            library._kept("portable")
        os.chown(place, 0, 0)


def test_what_killed_compilers_left_is_removed(cache: Path, compiled: list[Sequence[str]]) -> None:
    for name, age in (("tmpold", 3600.0), ("tmpnew", 0.0)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    library._kept("portable")
    assert [path.name for path in cache.glob("tmp*")] == ["tmpnew"]


HANGS = ["sh", "-c", "echo $$ > {0}/first; sleep 60 & echo $! > {0}/second; wait"]


def hanging(folder: Path) -> list[str]:
    """A compiler of two processes, which say who they are."""
    return [word.format(folder) for word in HANGS]


def assert_ended(folder: Path) -> None:
    pids = [int((folder / name).read_text()) for name in ("first", "second")]
    wait_until(lambda: not any(map(_runs, pids)), 10)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_compiler_that_hangs_is_ended_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "COMPILE_S", 1.0)
    with pytest.raises(NoNativeCodeError, match="sh does not run: .*timed out"):
        library._compile(hanging(tmp_path))
    assert_ended(tmp_path)


def test_a_compiler_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """As the engine is, when the start is given up."""
    code = f"from plugins.cpu import library; library._compile({hanging(tmp_path)})"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        wait_until(lambda: (tmp_path / "second").exists() and bool((tmp_path / "second").read_text()), 60)
        process.kill()
    assert_ended(tmp_path)


def test_a_cxx_that_cannot_be_split_is_named(
    cache: Path, compiled: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(NoNativeCodeError, match='CXX=g\\+\\+ ": No closing quotation'):
        library._kept("portable")
    monkeypatch.delenv("CXX")
    library._kept("portable")
    monkeypatch.setenv("CXX", 'g++ "')
    library._kept("portable")  # there is nothing to compile


def test_a_compiler_that_writes_nothing_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(NoNativeCodeError, match="true ends well, and has written nothing"):
        library._kept("portable")


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
