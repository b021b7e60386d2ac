"""The process in which a plugin is checked: pytest over the suites of a subject, each check told as it begins and ends.

`python -m core.testing.conformance_child REQUEST FD`, in an empty folder; REQUEST is JSON, FD takes a JSON object per line:
{"begin": node, "subject", "check"}, {"end": node, "outcome", "check", "reason", "detail"}, {"error": reason}, {"done": true};
{"misuse": reason} alone where the request itself is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

import pytest

AFTER_EACH = "settings_stay_as_they_are"  # what fixtures of the suites look at after each check
MAX_REASON = 300  # characters
MODULE = """\
from core.testing import explain_assertions

explain_assertions()
from core.testing.conformance import Subject
from core.testing.suites import suites_of

globals().update(suites_of(Subject.from_dict({subject!r})))
"""


class Reporter:
    """A pytest plugin: writes what happens to `out`, ends a check after `timeout` seconds, leaves out the nodes in `skip`."""

    def __init__(self, out: IO[str], timeout: float, skip: frozenset[str]):
        self._out = out
        self._timeout = timeout
        self._skip = skip

    def tell(self, **message: Any) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._skip]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell(error=reason_of(report.longrepr))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        subject, check = _names(item)
        self.tell(begin=item.nodeid, subject=subject, check=check)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        with alarm(self._timeout):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with alarm(self._timeout):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        with alarm(self._timeout):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A check ends with its call, or before it; what fails after it is a check of its own."""
        if report.when == "teardown" and not report.failed:
            return
        if report.when == "setup" and report.passed:
            return
        detail = {"reason": reason_of(report.longrepr), "detail": report.longreprtext} if not report.passed else {}
        more = {"check": AFTER_EACH} if report.when == "teardown" else {}
        self.tell(end=report.nodeid, outcome=report.outcome, **more, **detail)


def _names(item: pytest.Item) -> tuple[str, str]:
    """What is checked, and by which check, parameters left out."""
    cls = getattr(item, "cls", None)
    return getattr(cls, "subject", "?"), str(getattr(item, "originalname", None) or item.name)


def reason_of(longrepr: Any) -> str:
    """What went wrong, in a line: the message of the assertion, and what it compared."""
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        text = str(crash.message)
    elif isinstance(longrepr, tuple):  # of a skip: file, line, reason
        text = str(longrepr[2])
    else:
        lines = str(longrepr).strip().splitlines() or [""]
        text = next((line[1:] for line in lines if line.startswith("E ")), lines[-1])
    found = [line.strip() for line in text.splitlines() if line.strip()][:2]
    line = "; ".join([*found[:1], *(more for more in found[1:] if more.startswith("assert "))])
    return line.removeprefix("AssertionError: ").removeprefix("Failed: ")[:MAX_REASON]


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises in the main thread after `seconds`, and again each second until the check has ended."""

    def ring(number: int, frame: FrameType | None) -> None:
        where = f", in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
        pytest.fail(f"it did not end within {seconds:g} s{where}", pytrace=False)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _misuse(subject: Mapping[str, Any]) -> str | None:
    """What the command line has wrong. What a plugin has wrong, the checks will say."""
    from core.testing import explain_assertions

    explain_assertions()  # before any of the suites' modules is imported
    from core.testing.conformance import Subject
    from core.testing.selection import unusable_override

    try:
        return unusable_override(Subject.from_dict(subject)) if subject["overrides"] else None
    except (Exception, SystemExit):
        return None


def main(request: Mapping[str, Any], out: IO[str]) -> int:
    if problem := _misuse(request["subject"]):
        reporter = Reporter(out, request["timeout"], frozenset())
        reporter.tell(misuse=problem)
        return 0
    folder = Path.cwd()
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    module = folder / "test_conformance.py"
    module.write_text(MODULE.format(subject=request["subject"]), encoding="utf-8")
    reporter = Reporter(out, request["timeout"], frozenset(request["skip"]))
    options = ["-q", "--capture=no", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}", "-W", "ignore"]
    code = pytest.main([*options, str(module)], plugins=[reporter])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        reporter.tell(error=f"pytest ended with {code!r}")
    reporter.tell(done=True)
    return 0


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as pipe:
        code = main(json.loads(sys.argv[1]), pipe)
        pipe.flush()
    os._exit(code)  # a thread that a plugin left behind must not hold the process
