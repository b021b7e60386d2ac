"""Who is at fault when a component fails while the engine runs, and what is told of it. Imports no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import ParamSpec, TypeVar

from core.errors import PluginError, Terminated
from core.outputs import PluginIncident

log = logging.getLogger("nonet.faults")

MAX_REASON = 500  # characters of a stranger's error that travel to a client
MAX_SHOWN = 100  # characters of a stranger's value

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
        return f"{self.group}={self.name} (plugin {self.plugin})" if self.name else self.group


class Names:
    """The components of a pipeline by name. Asked when something has failed, never before."""

    def __init__(self, names: Iterable[ComponentName] = ()):
        self._names = tuple(names)

    def of(self, group: str) -> ComponentName:
        return next((name for name in self._names if name.group == group), ComponentName(group))

    def named_in(self, text: str) -> bool:
        """Whether a message names a component already."""
        return any(name.who in text for name in self._names)

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
        self._log_level = logging.DEBUG if quiet else logging.WARNING
        self.clock = clock
        self.block_timeout = block_timeout  # seconds
        self.requests: dict[str, str] = {}
        self.cautious = False  # a prompt's KV is shared only once its request has got a token: KV was spoilt before
        self._counts: dict[ComponentName, int] = {}
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
        except (Exception, SystemExit) as error:  # a stranger's code may raise anything
            raise StageError(group, described(error), request_id) from error
        finally:
            self.watch(group, self.clock() - started - (self.blocked_s - blocked))

    def fail(self, group: str, reason: str, request_id: str) -> str:
        """The component failed this request. Returns the text for its client."""
        return self._fail(self.names.of(group), reason, request_id)

    def fail_by(self, error: BaseException, group: str, request_id: str) -> str:
        """The same for what was raised in a call of `group`'s component, by it or by one that it uses."""
        if isinstance(error, PluginError):  # names its component, and is counted where it was raised
            return self.requests.setdefault(request_id, str(error))
        if isinstance(error, StageError):
            return self._fail(self.names.of(error.group), error.reason, request_id)
        return self._fail(self.names.blame(error, group), described(error), request_id)

    def note(self, group: str, reason: str) -> None:
        """The component did wrong, and no request suffers from it."""
        self._count(self.names.of(group), reason)

    def watch(self, group: str, seconds: float) -> None:
        """A call of the component took so long. It is reported when that is too long; nobody fails for it."""
        if seconds > self.block_timeout:
            self.blocked_s += seconds
            self.note(group, f"blocked {seconds:.1f} s in one call (plugins.block_timeout={self.block_timeout:g})")

    def take_incidents(self) -> list[PluginIncident]:
        """Since the last call, the latest of each component."""
        if not self._untold:
            return []
        incidents = list(self._untold.values())
        self._untold.clear()
        return incidents

    def _fail(self, name: ComponentName, reason: str, request_id: str) -> str:
        self._count(name, reason)
        return self.requests.setdefault(request_id, f"{name.who}: {reason}")

    def _count(self, name: ComponentName, reason: str) -> None:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count & (count - 1) == 0:  # 1, 2, 4, 8 …: a component may fail in each step
            log.log(self._log_level, "%s: %s (failure %d)", name.who, reason, count)
        self._untold[name] = PluginIncident(
            group=name.group, name=name.name, plugin=name.plugin, reason=reason, failures=count
        )


def shown(value: object) -> str:
    """A stranger's value in a message."""
    try:
        text = repr(value)
    except Exception:  # its __repr__ is a stranger's too
        return f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def described(error: BaseException) -> str:
    """Type and text of an error that is not ours, on one line and with a UTF-8 form."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "an error without a text"
    return f"{type(error).__name__}: {text}"[:MAX_REASON].encode("utf-8", "replace").decode()
