"""The process that compiles grammars, with backends that do what must not harm anybody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from core.errors import EngineDeadError, OverloadedError
from core.grammar.compile_child import COMMAND, CompilerStartError, Lost
from core.grammar.compile_worker import Answer
from core.grammar.compiler import GrammarCompiler
from core.grammar.frames import MAX_ARTIFACT_BYTES, Compiled, Refused
from core.request import GrammarSpec
from core.testing.harness.fake_grammars import FAKES, fake_setup
from core.testing.harness.frontend_thread import wait_until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it")


@pytest.fixture(scope="module")
def quick() -> Iterator[GrammarCompiler]:
    """Gives a grammar half a second."""
    yield from _running(compile_timeout=0.5)


@pytest.fixture()
def own() -> Iterator[GrammarCompiler]:
    yield from _running(compile_timeout=1.0, max_queued=4)


def _running(**limits: object) -> Iterator[GrammarCompiler]:
    compiler = fake_setup(**limits).compiler
    yield compiler
    compiler.close()


def submit(compiler: GrammarCompiler, text: str) -> Future[Answer]:
    return compiler.submit(GrammarSpec(kind="regex", source=text), FAKES)


def ask(compiler: GrammarCompiler, text: str) -> Answer:
    return submit(compiler, text).result(WAIT_S)


def pid_of(compiler: GrammarCompiler) -> int:
    answer = ask(compiler, "pid")
    assert isinstance(answer, Compiled)
    return int(answer.artifact)


def texts(reasons: list) -> list[tuple[str, str]]:
    return [(reason.backend, reason.text) for reason in reasons]


def test_the_first_backend_that_takes_it_compiles_it(quick: GrammarCompiler) -> None:
    first = ask(quick, "anything | something")
    assert isinstance(first, Compiled) and (first.backend, first.artifact) == ("first", b"anything | something")
    second = ask(quick, "refuse not this | something")
    assert isinstance(second, Compiled) and second.backend == "second" and second.faults == []


def test_what_all_refuse_comes_with_all_reasons(quick: GrammarCompiler) -> None:
    answer = ask(quick, "refuse not this | refuse nor\tthat\x1b")
    assert isinstance(answer, Refused)
    assert texts(answer.reasons) == [("first", "not this"), ("second", "nor that?")] and answer.faults == []


def test_one_that_raises_is_named_and_the_next_one_asked(quick: GrammarCompiler) -> None:
    answer = ask(quick, "raise boom | something")
    assert isinstance(answer, Compiled) and answer.backend == "second"
    assert texts(answer.faults) == [("first", "ZeroDivisionError: boom")]
    answer = ask(quick, "raise boom")
    assert isinstance(answer, Refused) and [name for name, _ in texts(answer.faults)] == ["first", "second"]


@pytest.mark.parametrize(
    ("deed", "text"),
    [("nothing", "no text matches it"), (f"make {MAX_ARTIFACT_BYTES + 1}", f"and {MAX_ARTIFACT_BYTES} is the limit")],
)
def test_what_nobody_could_use_is_refused_here(quick: GrammarCompiler, deed: str, text: str) -> None:
    answer = ask(quick, deed)
    assert isinstance(answer, Refused) and all(text in reason.text for reason in answer.reasons) and answer.reasons


def test_what_a_backend_prints_does_not_harm_the_pipe(quick: GrammarCompiler) -> None:
    assert isinstance(ask(quick, "say \x00\x00\x00\x05hello"), Compiled)


@pytest.mark.parametrize("deed", ["sleep 60", "hold 60", pytest.param("crash SIGSTOP", marks=LINUX)])
def test_one_that_takes_too_long_is_ended(quick: GrammarCompiler, deed: str) -> None:
    """Also in native code that lets no other thread run, and where it is stopped."""
    before = pid_of(quick)
    answer = ask(quick, f"refuse no | {deed}")
    assert isinstance(answer, Lost) and (answer.backend, answer.how) == ("second", "slow")
    assert pid_of(quick) != before and not psutil.pid_exists(before)


@pytest.mark.parametrize("deed", ["exit 3", "exit 0", "crash SIGSEGV", "crash SIGABRT", "crash SIGKILL"])
def test_a_crash_costs_that_grammar_and_no_other(quick: GrammarCompiler, deed: str) -> None:
    lost, other = submit(quick, deed), submit(quick, "ok")
    answer = lost.result(WAIT_S)
    assert isinstance(answer, Lost) and (answer.backend, answer.how) == ("first", "crash")
    assert isinstance(other.result(WAIT_S), Compiled)


@LINUX
def test_memory_is_bounded_and_one_that_grew_is_replaced_in_time() -> None:
    (compiler,) = [fake_setup(compile_memory="512MiB", compile_timeout=20).compiler]
    try:
        answer = ask(compiler, "eat 1000")
        assert isinstance(answer, Lost) and answer.how == "memory"
        before = pid_of(compiler)
        assert isinstance(ask(compiler, "eat 20"), Compiled) and pid_of(compiler) == before
        assert isinstance(
            ask(compiler, "eat 250"), Compiled
        )  # less than the limit, and more than half of what was left
        assert pid_of(compiler) != before
    finally:
        compiler.close()


def test_the_queue_is_bounded_and_what_nobody_wants_any_more_leaves_it(own: GrammarCompiler) -> None:
    running = submit(own, "sleep 0.8")
    wait_until(running.running, WAIT_S)
    waiting = [submit(own, "ok") for _ in range(4)]
    with pytest.raises(OverloadedError, match="4 grammars wait"):
        submit(own, "ok")
    assert waiting[1].cancel()
    last = submit(own, "ok")
    assert all(isinstance(future.result(WAIT_S), Compiled) for future in (running, waiting[0], waiting[2], last))


def test_a_process_that_died_while_it_had_nothing_to_do_is_replaced(own: GrammarCompiler) -> None:
    os.kill(pid_of(own), signal.SIGKILL)
    assert isinstance(ask(own, "ok"), Compiled)


def test_a_slow_grammar_holds_up_nobody_else() -> None:
    """Nor does the process that is started after a loss; the second one ends when nobody needs it any more."""
    compiler = fake_setup(max_workers=2, idle_s=0.5, compile_timeout=30).compiler
    try:
        first = pid_of(compiler)
        assert compiler.pids == [first]
        slow = submit(compiler, "sleep 25")
        second = pid_of(compiler)
        assert second != first and not slow.done()
        assert [pid_of(compiler) for _ in range(3)] == [second] * 3
        wait_until(lambda: compiler.pids == [first], WAIT_S)
        third = submit(compiler, "crash SIGKILL")
        assert isinstance(third.result(WAIT_S), Lost) and not slow.done()
    finally:
        compiler.close()
    assert compiler.pids == []


@pytest.mark.parametrize("when", ["the first", "the second"])
def test_a_thread_that_cannot_be_started_stops_no_other(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fake_setup(max_workers=2).compiler
    running = submit(compiler, "sleep 0.6") if when == "the second" else None
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        if running is None:
            compiler.start()
            with pytest.raises(CompilerStartError, match="no thread"):
                submit(compiler, "lost")
        else:
            wait_until(running.running, WAIT_S)
            waiting = submit(compiler, "ok")
            assert isinstance(waiting.result(WAIT_S), Compiled) and isinstance(running.result(), Compiled)
    try:
        assert isinstance(ask(compiler, "ok"), Compiled) and 1 <= len(compiler.pids) <= 2
    finally:
        compiler.close()


def no_thread(thread: threading.Thread) -> NoReturn:
    raise RuntimeError("can't start new thread")


def test_many_at_once_are_all_answered() -> None:
    compiler = fake_setup(max_workers=2, max_queued=1000).compiler
    try:
        waiting = [submit(compiler, f"{number} " * (number % 50 + 1)) for number in range(300)]
        answers = [future.result(WAIT_S) for future in waiting]
        assert all(isinstance(answer, Compiled) for answer in answers)
        assert [a.artifact.split()[0] for a in answers] == [str(number).encode() for number in range(300)]
        assert len(compiler.pids) <= 2
    finally:
        compiler.close()


def test_nothing_runs_before_it_is_needed_and_nothing_afterwards() -> None:
    compiler = fake_setup().compiler
    assert compiler.pids == []
    compiler.start()
    wait_until(lambda: bool(compiler.pids), WAIT_S)
    running, waiting = submit(compiler, "hold 60"), submit(compiler, "ok")
    wait_until(running.running, WAIT_S)
    pids = compiler.pids
    compiler.close()
    for future in (running, waiting):
        with pytest.raises(EngineDeadError, match="shutting down"):
            future.result(WAIT_S)
    assert pids and not any(map(psutil.pid_exists, pids)) and compiler.pids == []
    with pytest.raises(EngineDeadError):
        submit(compiler, "ok")
    compiler.close()


def test_closing_does_not_wait_for_the_start() -> None:
    compiler = fake_setup(settings="sleep 60").compiler
    waiting = submit(compiler, "ok")
    wait_until(lambda: bool(compiler.pids), WAIT_S)
    (pid,) = compiler.pids
    compiler.close()
    with pytest.raises((EngineDeadError, CompilerStartError)):
        waiting.result(WAIT_S)
    wait_until(lambda: not psutil.pid_exists(pid), WAIT_S)


@pytest.mark.parametrize(
    ("settings", "reason"), [("raise no model", "ZeroDivisionError: no model"), ("exit 5", "exit status 5")]
)
def test_why_it_does_not_start_is_told_to_all_who_ask(settings: str, reason: str) -> None:
    compiler = fake_setup(settings=settings).compiler
    try:
        for _ in range(2):
            with pytest.raises(CompilerStartError, match=reason):
                ask(compiler, "ok")
    finally:
        compiler.close()


def test_two_processes_that_differ_in_plugins_do_not_work_together() -> None:
    compiler = fake_setup(plugins=["acme==1.0"]).compiler
    try:
        with pytest.raises(CompilerStartError, match="differ in plugins"):
            ask(compiler, "ok")
    finally:
        compiler.close()


FRONT = """
import sys, time
from core.request import GrammarSpec
from core.testing.harness.fake_grammars import FAKES, fake_setup
compiler = fake_setup(compile_timeout=60).compiler
print(compiler.submit(GrammarSpec(kind="regex", source="pid"), FAKES).result(60).artifact.decode(), flush=True)
compiler.submit(GrammarSpec(kind="regex", source=sys.argv[1]), FAKES)
time.sleep(600)
"""


@pytest.mark.parametrize("deed", ["ok", "sleep 300", pytest.param("hold 300", marks=LINUX)])
def test_it_ends_with_its_front_also_after_kill(deed: str) -> None:
    """While it waits, while it compiles, and in native code that lets no other thread run."""
    front = subprocess.Popen([sys.executable, "-c", FRONT, deed], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert front.stdout is not None
        child = psutil.Process(int(front.stdout.readline()))
        time.sleep(0.3)  # the second grammar is there
        assert child.is_running()
        front.kill()
        front.wait()
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 10)
    finally:
        front.kill()
        front.wait()
        assert front.stdout is not None
        front.stdout.close()


def test_without_a_front_it_says_so_and_ends() -> None:
    done = subprocess.run(COMMAND, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
