"""Check what plugins provide with the suites of their groups, each plugin's code in a process of its own.

The parent imports no plugin: whatever a plugin does, hang or end its process, becomes a failed check.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from core.testing.sweeper import swept_folder

if TYPE_CHECKING:
    from core.components import Provided

CHECK_TIMEOUT_S = 60.0
START_S = 180.0  # for the child to import torch and what is checked
GRACE_S = 15.0  # a check that does not even end by its alarm
MAX_STARTS = 6  # of a child: one more than the checks that may kill it
MAX_DETAIL = 4000  # characters


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked: all that these plugins provide, or of it one group or component."""

    plugins: tuple[str, ...]
    group: str = ""
    component: str = ""
    overrides: tuple[str, ...] = ()
    model: str = ""  # path of a model's files, for model plugins that do not run transformers' types

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Subject:
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**fields)

    def chooses(self, provided: Provided) -> bool:
        of_group = self.group in ("", provided.group)
        return of_group and self.component in ("", provided.component.name)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check of one component. `node` is unlike that of any other; `check` is shared by those of a parameter."""

    subject: str
    check: str
    node: str
    outcome: str  # passed, failed or skipped
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FailedCheck:
    check: str
    reason: str  # of the first that failed
    failed: int  # how many of its parameters
    detail: str = ""


@dataclass(slots=True)
class Checked:
    """All checks of one component, or of a plugin's package (`subject` "plugin …")."""

    subject: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def num_checks(self) -> int:
        return sum(outcome.outcome != "skipped" for outcome in self.outcomes)

    @property
    def num_skipped(self) -> int:
        return sum(outcome.outcome == "skipped" for outcome in self.outcomes)

    @property
    def skipped(self) -> dict[str, str]:
        """Check -> why, of the first of its parameters."""
        found: dict[str, str] = {}
        for outcome in self.outcomes:
            if outcome.outcome == "skipped":
                found.setdefault(outcome.check, outcome.reason.removeprefix("Skipped: "))
        return found

    @property
    def failed(self) -> list[FailedCheck]:
        by_check: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            if outcome.outcome == "failed":
                by_check.setdefault(outcome.check, []).append(outcome)
        return [FailedCheck(check, some[0].reason, len(some), some[0].detail) for check, some in by_check.items()]


def check(subject: Subject, timeout: float = CHECK_TIMEOUT_S) -> list[Checked]:
    """Run every suite on every part of the subject; a check may take `timeout` seconds.

    Raises ConfigError for an override that is of nothing in the subject.
    """
    outcomes = list(_outcomes(subject, timeout))
    found: dict[str, Checked] = {}
    for outcome in outcomes:
        found.setdefault(outcome.subject, Checked(outcome.subject)).outcomes.append(outcome)
    return list(found.values())


def _outcomes(subject: Subject, timeout: float) -> Iterator[Outcome]:
    skip: list[str] = []
    for _ in range(MAX_STARTS):
        with (
            swept_folder("nonet-check-") as (folder, sweeper),
            Child(subject, timeout, skip, folder) as child,
        ):
            sweeper.kill_with_us(child.pid)
            for outcome in child.outcomes():
                skip.append(outcome.node)
                yield outcome
            if child.is_done or child.began is None:
                return
    yield Outcome(f"plugin {subject.plugins[0]}", "the_process_lives", "", "failed", f"{MAX_STARTS} checks ended it")


class Child:
    """One process over the checks that are not in `skip`. It is killed at the end, with all it started."""

    def __init__(self, subject: Subject, timeout: float, skip: Sequence[str], folder: str):
        self.began: Mapping[str, Any] | None = None  # the check that runs, or ran when the process ended
        self.is_done = False
        self._subject = subject
        self._timeout = timeout
        self._read, write = os.pipe()
        request = json.dumps({"subject": subject.as_dict(), "timeout": timeout, "skip": list(skip)})
        command = [sys.executable, "-m", "core.testing.conformance_child", request, str(write)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environ(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(write,),
            start_new_session=True,
        )
        os.close(write)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        self._errors.close()

    def outcomes(self) -> Iterator[Outcome]:
        """Until the child is done, has died, or says nothing for too long; the check that it is in then has failed."""
        for message in self._messages():
            if "begin" in message:
                self.began = message
            elif "end" in message and self.began is not None:
                yield self._ended(message)
            elif "misuse" in message:
                raise ConfigError(str(message["misuse"]))
            elif "error" in message:
                yield Outcome(self._package, "test_it_can_be_checked", "", "failed", str(message["error"]))
            elif "done" in message:
                self.is_done = True
                return
        if self.began is None:
            yield Outcome(self._package, "test_it_can_be_checked", "", "failed", self._why("while it was listed"))
        else:
            began = self.began
            yield Outcome(began["subject"], began["check"], began["begin"], "failed", self._why("in this check"))

    def _ended(self, message: Mapping[str, Any]) -> Outcome:
        assert self.began is not None
        return Outcome(
            self.began["subject"],
            message.get("check", self.began["check"]),
            message["end"],
            message["outcome"],
            message.get("reason", ""),
            message.get("detail", "")[-MAX_DETAIL:],
        )

    @property
    def _package(self) -> str:
        return f"plugin {self._subject.plugins[0]}"

    def _why(self, when: str) -> str:
        """What ended the child, or that it had to be ended."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"the process answered no more {when}, and was killed"
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"the process ended with {code} {when}{': ' + last[0][:200] if last else ''}"

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Lines of the pipe, as they come."""
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while selector.select(START_S if self.began is None else 3 * self._timeout + GRACE_S):
                data = os.read(self._read, 1 << 16)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                yield from (json.loads(line) for line in lines)


def _environ(folder: str) -> dict[str, str]:
    """Ours, with nothing that steers pytest, and with this process's module path from wherever it was started."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    threads = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")
    }  # checks are small, and more threads only wait
    return {**kept, **threads, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": folder}
