"""Calls of a front component that may be anybody's code: whatever it does becomes one error that names it.

(The engine's components are guarded in the engine, where a failure may have touched every request of a step.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from core.errors import GenerationError, NonetError, OverloadedError, RequestError, Terminated, described
from core.isolation.faults import ComponentName, Names, blocked_text
from core.isolation.incidents import Incidents
from core.outputs import PluginIncident

P = ParamSpec("P")
T = TypeVar("T")

MAX_RETRY_AFTER_S = 86_400.0


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """What components of the front may take (`core.settings.PluginSettings`). Times in seconds."""

    block_timeout: float = 5.0
    render_timeout: float = 60.0
    quarantine_after: int = 3  # failures


class MalformedError(Exception):
    """A component handed over what its contract does not allow; the text says what."""


class BlamedError(Exception):
    """A call of a component failed; the text says how, without its name."""


@dataclass(frozen=True, slots=True)
class Guard:
    """One component. `passes`: errors of ours that are its answer to a client, not a failure.

    `quarantine_after`: failures after which whoever uses it should switch it off.
    """

    part: ComponentName
    incidents: Incidents
    block_timeout: float  # seconds of one call that count as blocked
    passes: tuple[type[NonetError], ...] = ()
    quarantine_after: float = math.inf

    @property
    def incident(self) -> PluginIncident | None:
        """Its latest, if any."""
        return self.incidents.of(self.part)

    @property
    def is_off(self) -> bool:
        """Switched off until the next start."""
        return (incident := self.incident) is not None and incident.quarantined

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it. Raises BlamedError for whatever it raises, except a well-formed error of `passes`.

        SystemExit and KeyboardInterrupt too: frontends handle signals themselves, so neither comes from a signal here.

        A call that takes longer than `block_timeout` is reported; nothing can end it earlier.
        """
        started = time.monotonic()
        try:
            return fn(*args, **kwargs)
        except Terminated:
            raise
        except BaseException as error:
            if isinstance(error, self.passes) and is_well_formed(error):
                raise
            raise BlamedError(str(error) if isinstance(error, MalformedError) else described(error)) from error
        finally:
            self._note_time(time.monotonic() - started)

    def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`run`, with a GenerationError that names the component in place of BlamedError, and an incident."""
        try:
            return self.run(fn, *args, **kwargs)
        except BlamedError as blamed:
            raise self.error(str(blamed), blamed.__cause__) from blamed.__cause__

    def error(self, reason: str, cause: BaseException | None = None) -> GenerationError:
        """For a request that failed by it. Reports the incident."""
        self._failed(reason, cause)
        return GenerationError(f"{self.part.who}: {reason}")

    def blocked(self, seconds: float) -> None:
        """It is reported; `seconds` are the limit themselves where its threads are watched in place of its calls."""
        self._failed(blocked_text(seconds, min(seconds, self.block_timeout)))

    def _failed(self, reason: str, cause: BaseException | None = None) -> None:
        self.incidents.failed(self.part, reason, quarantine_after=self.quarantine_after, error=cause)

    def _note_time(self, seconds: float) -> None:
        if seconds > self.block_timeout:
            self.blocked(seconds)


def is_well_formed(error: BaseException) -> bool:
    """Whether a frontend can answer a client with an error that a plugin has made."""
    try:
        return _has_legal_fields(error)
    except AttributeError:  # a subclass that did not call __init__
        return False


def _has_legal_fields(error: BaseException) -> bool:
    if isinstance(error, RequestError):
        legal = type(error.status) is int and 400 <= error.status < 600
        return legal and all(map(_is_text, (error.message, error.code, error.param or "")))
    if isinstance(error, OverloadedError):
        wait = error.retry_after
        is_number = type(wait) in (int, float) and math.isfinite(wait)
        return is_number and 0 <= wait <= MAX_RETRY_AFTER_S and _is_text(error.message)
    return True


def _is_text(value: object) -> bool:
    return isinstance(value, str) and is_encodable(value)


def kind_of(value: object) -> str:
    """For messages: never the value itself, whose text may be long, secret, or raise."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def is_encodable(text: str) -> bool:
    """Whether it has a UTF-8 form: no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class FrontGuards:
    """One for each component of the front."""

    frontend: Guard
    renderer: Guard
    admission: Guard
    detokenizer: Guard
    tool_parser: Guard
    reasoning_parser: Guard
    incidents: Incidents

    def of_processor(self, part: ComponentName) -> Guard:
        """For the check of a request's parameters. Clients alone must not be able to have a processor switched off."""
        return Guard(part, self.incidents, math.inf, passes=(RequestError,))

    @classmethod
    def of(cls, names: Names, limits: FrontLimits, incidents: Incidents) -> FrontGuards:
        """The renderer's time is watched where its threads are (`core.front.render_threads`)."""

        def guard(group: str, block_timeout: float = limits.block_timeout, **options: Any) -> Guard:
            return Guard(names.of(group), incidents, block_timeout, **options)

        answers = (RequestError, OverloadedError)
        return cls(
            frontend=guard("frontend"),
            renderer=guard("renderer", math.inf, passes=answers),
            admission=guard("admission", passes=answers),
            detokenizer=guard("detokenizer"),
            tool_parser=guard("tool_parser", passes=answers, quarantine_after=limits.quarantine_after),
            reasoning_parser=guard("reasoning_parser", quarantine_after=limits.quarantine_after),
            incidents=incidents,
        )
