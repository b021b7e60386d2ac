"""An engine process that is begun before its config is known: taken over once, and never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from core.border.early import EARLY, EarlyProcess
from core.client import EngineProcessSettings, EngineStatus, ProcessClient

FACTORY = "core.testing.harness.fake_engine:build"
ROOT = Path(__file__).resolve().parents[2]
MARK = "NONET_TEST_OF"


def begun() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if EARLY in child.cmdline()]


async def test_the_first_engine_is_the_early_process_and_the_next_one_is_not() -> None:
    with EarlyProcess() as early:
        [process] = begun()
        settings = EngineProcessSettings(start_timeout=60)
        client = ProcessClient(json.dumps({}), settings=settings, early=early, _factory=FACTORY)
        try:
            await client.start()
            assert client.pid == process.pid
            process.kill()
            deadline = time.monotonic() + 20
            while client.pid in (None, process.pid) or client.health().status is not EngineStatus.OK:
                assert time.monotonic() < deadline, "no other engine came"
                await asyncio.sleep(0.05)
        finally:
            await client.close()
    assert begun() == []


def test_what_nobody_takes_is_ended() -> None:
    with pytest.raises(ZeroDivisionError), EarlyProcess() as early:
        [process] = begun()
        raise ZeroDivisionError
    assert not process.is_running() and early.take() is None


def test_a_dead_one_is_not_taken() -> None:
    with EarlyProcess() as early:
        [process] = begun()
        process.kill()
        process.wait(10)
        assert early.take() is None


def test_it_is_deaf_to_ctrl_c_and_this_process_is_not() -> None:
    with EarlyProcess() as early:
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        [process] = begun()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert early.take() is not None and process.is_running()
        process.kill()
        process.wait(10)


def test_it_ends_in_silence_where_the_front_gives_up(capfd: pytest.CaptureFixture[str]) -> None:
    with EarlyProcess() as early:
        process = early.take()
        assert process is not None and process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's doing")
def test_it_does_not_outlive_a_killed_front() -> None:
    code = (
        "import time; from core.border.early import EarlyProcess;"
        "process = EarlyProcess().take(); print(process.pid, flush=True); time.sleep(60)"
    )
    front = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert front.stdout is not None
    early = psutil.Process(int(front.stdout.readline()))
    time.sleep(1.0)
    front.kill()
    front.wait(10)
    front.stdout.close()
    early.wait(30)


def test_a_config_that_is_refused_leaves_none() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "core", "serve", "+preset=chat", "no_such_key=1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: str(os.getpid())},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "no_such_key" in done.stderr
    assert not [one for one in psutil.process_iter() if _is_marked(one)]


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == str(os.getpid())
    except psutil.Error:
        return False


def test_one_of_another_environment_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with EarlyProcess() as early:
        [process] = begun()
        monkeypatch.setenv(MARK, "changed")  # by a plugin that is loaded, say
        assert early.take() is None and not process.is_running()
