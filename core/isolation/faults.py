"""Who is at fault when a component fails while the engine runs, and what is told of it. Imports no torch."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import ParamSpec, TypeVar

from core.components import who
from core.errors import MAX_REASON, PluginError, Terminated, described, printable
from core.outputs import PluginIncident

log = logging.getLogger("nonet.faults")

FIRST = 3  # failures of a component that are all logged

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ComponentName:
    """One selected component, for messages."""

    group: str
    name: str = ""
    plugin: str = ""  # as in `PluginIncident.plugin`: "plugin, wheel version"
    target: str = ""  # "package.module:Class"

    @property
    def who(self) -> str:
        """sampler=chaos (plugin chaos, acme-chaos 1.0); the group alone in an engine that was not assembled from plugins."""
        return who(self.group, self.name, self.plugin) if self.name else self.group


class Tally:
    """The failures of one component: counted, logged, and after `quarantine_after` of them it is to be switched off.

    Its first failures are logged with their tracebacks, then each whose number is a power of two: it may fail in each step.
    From any thread.
    """

    def __init__(
        self,
        part: ComponentName,
        log: logging.Logger,
        quarantine_after: float = math.inf,
        level: int = logging.ERROR,
    ):
        self.part = part
        self.latest: PluginIncident | None = None
        self._log = log
        self._level = level
        self._quarantine_after = quarantine_after
        self._lock = threading.Lock()

    @property
    def failures(self) -> int:
        return 0 if self.latest is None else self.latest.failures

    @property
    def quarantined(self) -> bool:
        return self.latest is not None and self.latest.quarantined

    def failed(self, reason: str, cause: BaseException | None = None, *, final: bool = False) -> PluginIncident:
        """`cause`: what was raised, if anything. `final`: it is switched off however few its failures are."""
        part, reason = self.part, printable(reason, 2 * MAX_REASON)
        with self._lock:
            failures, was_off = self.failures + 1, self.quarantined
            is_off = was_off or final or failures >= self._quarantine_after
            incident = self.latest = PluginIncident(
                group=part.group,
                name=part.name,
                plugin=part.plugin,
                reason=reason,
                failures=failures,
                quarantined=is_off,
            )
        if is_told(failures):
            self._log.log(self._level, "%s: %s (failure %d)", part.who, reason, failures, exc_info=cause)
        if is_off and not was_off:
            self._log.error(
                "%s is switched off until the next start, after %d failures: %s", part.who, failures, reason
            )
        return incident


def drained(incidents: deque[PluginIncident]) -> tuple[PluginIncident, ...]:
    """All of them; none is left. Asked in each step, nearly always for nothing."""
    if not incidents:
        return ()
    found = tuple(incidents)
    incidents.clear()
    return found


def is_told(count: int) -> bool:
    """Whether to log what happens for the `count`-th time, and may happen in each step."""
    return count <= FIRST or count & (count - 1) == 0


def blocked_text(seconds: float, limit: float) -> str:
    return f"blocked {seconds:.1f} s in one call (plugins.block_timeout={limit:g})"


class Names:
    """The components of a pipeline by name. Asked when something has failed, never before."""

    def __init__(self, names: Iterable[ComponentName] = ()):
        self._names = tuple(names)

    def of(self, group: str) -> ComponentName:
        return next((name for name in self._names if name.group == group), ComponentName(group))

    def named_in(self, text: str) -> bool:
        """Whether a message names a component already."""
        return any(name.who in text for name in self._names)

    def led(self, text: str, otherwise: ComponentName) -> str:
        """`text` as `who: text`, which `core.errors.GenerationError.part` reads: of the component that it names already, or of
        `otherwise` where it names none. As it is where several are named: nobody knows which of them it was."""
        named = [name for name in self._names if name.who in text]
        if any(text.startswith(f"{name.who}: ") for name in named) or len(named) > 1:
            return text
        return f"{(named[0] if named else otherwise).who}: {text}"

    def blame(self, error: BaseException, group: str) -> ComponentName:
        """Whose code raised: the innermost frame of a component's class, or else of a module with one component in it.

        `group`: who was called, for an error that came without such frames (from another process, from native code).
        """
        found = self.of(group)
        for frame in _frames(error):
            found = self._owner(frame) or found
        return found

    def _owner(self, frame: FrameType) -> ComponentName | None:
        cls = type(frame.f_locals.get("self"))
        target = f"{cls.__module__}:{cls.__qualname__}"
        module = frame.f_globals.get("__name__")
        here = [name for name in self._names if name.target.partition(":")[0] == module]
        exact = next((name for name in self._names if name.target == target), None)
        return exact or (here[0] if len(here) == 1 else None)


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


class StageError(Exception):
    """A component raised or broke its contract. `request_id`: for whom it worked; None: for several, or for nobody."""

    def __init__(self, group: str, reason: str, request_id: str | None = None):
        super().__init__(group, reason, request_id)
        self.group = group
        self.reason = reason
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.group}: {self.reason}"


class SpoiltKVError(StageError):
    """It may also have written over the KV of other requests: all are to be computed again."""


class SwapError(SpoiltKVError):
    """A copy of KV between device and host memory failed: what was kept there, and what came back, is nothing to go by."""


class Faults:
    """What components did wrong: counted over the life of the engine, handed out once.

    `requests`: those at fault in the step in hand, with the text for their clients. The engine ends them after the step.
    """

    def __init__(
        self,
        names: Names | None = None,
        block_timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        quiet: bool = False,
    ):
        self.names = names or Names()
        self.quiet = quiet  # of a trial: what is found counts, and is told to nobody
        self._log_level = logging.DEBUG if quiet else logging.WARNING
        self.clock = clock
        self.block_timeout = block_timeout  # seconds
        self.requests: dict[str, str] = {}
        self.num_swap_failures = 0
        self.cautious = False  # a prompt's KV is shared only once its request has got a token: KV was spoilt before
        self._tallies: dict[ComponentName, Tally] = {}
        self._untold: dict[ComponentName, PluginIncident] = {}
        self.blocked_s = 0.0  # seconds in calls that were reported as blocked

    def call(self, group: str, request_id: str | None, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`method(…)`, timed. Whatever it raises comes out as StageError; one from a component that it calls stays that one's.

        A component that calls another is not blocked while the other one is.
        """
        started, blocked = self.clock(), self.blocked_s
        try:
            return method(*args, **kwargs)
        except (StageError, Terminated):
            raise
        except BaseException as error:  # a stranger's code may raise anything
            raise StageError(group, described(error), request_id) from error
        finally:
            self.watch(group, self.clock() - started - (self.blocked_s - blocked))

    def fail(self, group: str, reason: str, request_id: str, cause: BaseException | None = None) -> str:
        """The component failed this request. Returns the text for its client."""
        return self._fail(self.names.of(group), reason, request_id, cause)

    def fail_by(self, error: BaseException, group: str, request_id: str) -> str:
        """The same for what was raised in a call of `group`'s component, by it or by one that it uses."""
        if isinstance(error, PluginError):  # names its component, and is counted where it was raised
            return self.requests.setdefault(request_id, described(error))
        if isinstance(error, StageError):
            return self.fail(error.group, error.reason, request_id, error)
        return self._fail(self.names.blame(error, group), described(error), request_id, error)

    def note(self, group: str, reason: str, cause: BaseException | None = None) -> None:
        """The component did wrong, and no request suffers from it."""
        self._count(self.names.of(group), reason, cause)

    def who(self, group: str) -> str:
        return self.names.of(group).who

    def named_in(self, text: str) -> bool:
        return self.names.named_in(text)

    def watch(self, group: str, seconds: float) -> None:
        """A call of the component took so long. It is reported when that is too long; nobody fails for it."""
        if seconds > self.block_timeout:
            self.blocked_s += seconds
            self.note(group, blocked_text(seconds, self.block_timeout))

    def take_incidents(self) -> list[PluginIncident]:
        """Since the last call, the latest of each component."""
        if not self._untold:
            return []
        incidents = list(self._untold.values())
        self._untold.clear()
        return incidents

    def _fail(self, name: ComponentName, reason: str, request_id: str, cause: BaseException | None) -> str:
        self._count(name, reason, cause)
        return self.requests.setdefault(request_id, f"{name.who}: {reason}")

    def _count(self, name: ComponentName, reason: str, cause: BaseException | None) -> None:
        """A StageError of ours only says what was raised, or what is wrong with an answer: its own traceback tells nothing."""
        tally = self._tallies.setdefault(name, Tally(name, log, level=self._log_level))
        self._untold[name] = tally.failed(reason, cause.__cause__ if isinstance(cause, StageError) else cause)
