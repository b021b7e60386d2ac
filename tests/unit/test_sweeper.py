"""What a command leaves behind when it is killed: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from core.testing.harness.frontend_thread import wait_until
from core.testing.sweeper import swept_folder

# Prints its folder and the process that hangs in it, and waits for its end.
HANGING = """\
import subprocess, sys, time
from core.testing.sweeper import swept_folder

with swept_folder("nonet-test-") as (folder, sweeper):
    hang = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(hang, cwd=folder, start_new_session=True)
    sweeper.kill_with_us(child.pid)
    print(folder, child.pid, flush=True)
    time.sleep(600)
"""


def lives(pid: int) -> bool:
    """A zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_nothing_outlives_a_process_that_is_killed(number):
    with subprocess.Popen(
        [sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        folder, _, child = process.stdout.readline().decode().strip().rpartition(" ")
        assert os.path.isdir(folder) and lives(int(child))
        process.send_signal(number)
        process.wait(20)
    wait_until(lambda: not os.path.exists(folder), 20)
    if number is not signal.SIGINT:  # the `with` block ends, and the caller has its own way to end the child
        wait_until(lambda: not lives(int(child)), 20)
    else:
        os.killpg(int(child), signal.SIGKILL)


def test_an_end_in_order_kills_nobody():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        with swept_folder("nonet-test-") as (folder, sweeper):
            sweeper.kill_with_us(child.pid)
        assert not os.path.exists(folder)
        assert child.poll() is None
        child.communicate(b"\n")
        assert child.returncode == 0
