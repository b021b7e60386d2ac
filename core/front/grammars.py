"""A request's grammar on its way in: bounded, found in the cache or compiled once for all who ask, or refused with a reason.

What a client wrote goes to the process that compiles, and nowhere else; the engine gets what that process made of it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from core.errors import GenerationError, RequestError
from core.grammar.bounds import bounded
from core.grammar.cache import Artifact, GrammarCache, Refusal, key_of
from core.grammar.compile_child import CompilerStartError, Lost
from core.grammar.compile_worker import Answer
from core.grammar.figures import GrammarFigures
from core.grammar.frames import Compiled, Reason, Refused
from core.isolation.faults import ComponentName
from core.isolation.incidents import Incidents
from core.memory import num_bytes
from core.request import GrammarSpec
from core.stages.grammar import GROUP

if TYPE_CHECKING:
    from core.grammar.setup import GrammarSetup

REMEMBER_LOST_S = 60.0  # a grammar over which the process was lost: perhaps the machine was busy
Submit = Callable[[Sequence[str], float | None], Future[Answer]]
"""Asks these backends, in so many seconds; None: in as many as a grammar gets."""
NAMES = {
    "regex": "regular expression",
    "choice": "list of choices",
    "ebnf": "grammar",
    "structural_tag": "structural tag",
}


@dataclass(slots=True, eq=False)
class _Flight:
    """A grammar that is being compiled, for everyone who asks meanwhile."""

    key: bytes
    answer: Future[Answer]  # of the backends that are asked now
    outcome: asyncio.Future[Artifact | Refusal] = field(init=False)
    num_waiting: int = 0


class Grammars:
    """Used on one event loop, but for `bounded`."""

    def __init__(self, setup: GrammarSetup, incidents: Incidents, clock: Callable[[], float] = time.monotonic):
        self._setup = setup
        self._parts = {each.part.name: each for each in setup.parts}
        self._incidents = incidents
        self._clock = clock
        self._figures = setup.figures
        self._cache = GrammarCache(num_bytes(setup.limits.cache_memory))
        self._flights: dict[bytes, _Flight] = {}

    @property
    def figures(self) -> GrammarFigures:
        return self._figures

    @property
    def compiler_pids(self) -> list[int]:
        return self._setup.compiler.pids

    def start(self) -> None:
        if self._setup.starts_early:
            self._setup.compiler.start()

    def close(self) -> None:
        """Takes the time of ending a process."""
        self._setup.compiler.close()

    def bounded(self, spec: GrammarSpec, param: str) -> GrammarSpec:
        """See `core.grammar.bounds`. From any thread: it takes milliseconds for a large one."""
        return bounded(spec, self._setup.limits, param)

    async def compiled(self, spec: GrammarSpec, param: str, tenant: str = "") -> GrammarSpec:
        """What crosses to the engine in place of a bounded `spec`, which `tenant` asks for.

        Raises RequestError (400 for what no backend takes, 503 where none is there), OverloadedError, and GenerationError that
        names the backend which failed.
        """
        names = self._able(spec, param)
        key = key_of(spec, names)
        found = self._cache.get(key, self._clock())
        if found is not None or key in self._flights:
            self._figures.hits += 1
        else:
            self._figures.misses += 1
        if found is None:
            found = await self._asked(key, spec, names, param, tenant)
        if isinstance(found, Refusal):
            raise RequestError(f"{param}: {found.text}", param=param, code=found.code)
        return msgspec.structs.replace(spec, source="", backend=found.backend, artifact=found.data)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """For the figures: of requests, whatever they are refused for."""
        try:
            yield
        except RequestError as error:
            self._figures.refused[error.code] += 1
            raise

    def _able(self, spec: GrammarSpec, param: str) -> list[str]:
        asked = [n for n, each in self._parts.items() if spec.kind in each.kinds and spec.backend in ("", n)]
        if not asked:
            raise RequestError(f"{param}: nothing here compiles {spec.kind}", param=param, code="unsupported")
        off = {one.name for one in self._incidents.latest() if one.group == GROUP and one.quarantined}
        able = [name for name in asked if name not in off]
        if not able:
            raise RequestError(
                f"{' and '.join(f'{GROUP}={name}' for name in asked)} switched off after failures; requests with a "
                f"{spec.kind} are refused until the next start",
                param=param,
                code="plugin_quarantined",
                status=503,
            )
        return able

    async def _asked(
        self, key: bytes, spec: GrammarSpec, names: Sequence[str], param: str, tenant: str
    ) -> Artifact | Refusal:
        try:
            return await self._landed(self._flights.get(key) or self._take_off(key, spec, names, tenant))
        except CompilerStartError as error:
            raise RequestError(
                f"{param}: the process that compiles grammars does not start: {error}",
                param=param,
                code="grammar_compiler_failed",
                status=503,
            ) from None

    def _take_off(self, key: bytes, spec: GrammarSpec, names: Sequence[str], tenant: str) -> _Flight:
        asked = GrammarSpec(
            kind=spec.kind, source=spec.source, any_whitespace=spec.any_whitespace
        )  # as `key_of` has it

        def submit(backends: Sequence[str], timeout_s: float | None) -> Future[Answer]:
            return self._setup.compiler.submit(asked, backends, tenant, timeout_s)

        flight = self._flights[key] = _Flight(key, submit(names, None))
        flight.outcome = asyncio.ensure_future(self._outcome(flight, spec, names, submit))
        flight.outcome.add_done_callback(_look_at)
        return flight

    async def _landed(self, flight: _Flight) -> Artifact | Refusal:
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.outcome)
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting and flight.answer.cancel():  # not compiled for nobody, unless that has begun
                self._flights.pop(flight.key, None)

    async def _outcome(
        self, flight: _Flight, spec: GrammarSpec, names: Sequence[str], submit: Submit
    ) -> Artifact | Refusal:
        """A backend that was lost over a grammar leaves it to the next, with what is left of its time."""
        try:
            found = self._judged(spec, answer := await asyncio.wrap_future(flight.answer))
            while isinstance(answer, Lost) and (rest := _behind(answer, names)):
                flight.answer = submit(rest, answer.left_s)
                found = self._judged(spec, answer := await asyncio.wrap_future(flight.answer))
        finally:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
        self._cache.put(flight.key, found)
        self._figures.cached, self._figures.cached_bytes = len(self._cache), self._cache.num_bytes
        return found

    def _judged(self, spec: GrammarSpec, answer: Answer) -> Artifact | Refusal:
        if isinstance(answer, Lost):
            return self._judged_loss(answer)
        errors = [self._failed(fault.backend, fault.text) for fault in answer.faults]
        if isinstance(answer, Compiled):
            self._figures.taken[answer.backend] += 1
            return Artifact(answer.backend, answer.artifact)
        if errors:
            raise errors[0]
        return Refusal(_reasons(spec.kind, answer), "unsupported_grammar")

    def _judged_loss(self, lost: Lost) -> Refusal:
        limits, until = self._setup.limits, self._clock() + REMEMBER_LOST_S
        if lost.how == "start":
            raise self._failed(lost.backend, f"it was lost before its first grammar: {lost.detail}")
        if lost.how == "slow":
            limit = f"structured_outputs.compile_timeout={limits.compile_timeout:g} s"
            return Refusal(f"the grammar takes too long to compile: more than {limit}", "grammar_timeout", until)
        if lost.how == "memory":
            limit = f"structured_outputs.compile_memory={limits.compile_memory}"
            return Refusal(f"the grammar takes too much memory to compile: more than {limit}", "grammar_memory", until)
        self._failed(lost.backend, f"the process that compiles was lost over a grammar: {lost.detail}")
        return Refusal("the grammar cannot be compiled: the process that tried it crashed", "grammar_crash", until)

    def _failed(self, name: str, text: str) -> GenerationError:
        each = self._parts.get(name)
        part, limit = (ComponentName(GROUP), math.inf) if each is None else (each.part, each.quarantine_after)
        self._incidents.failed(part, text, quarantine_after=limit)
        return GenerationError(f"{part.who}: {text}")


def _behind(lost: Lost, names: Sequence[str]) -> Sequence[str]:
    """The backends to ask next, where one was lost over the grammar itself."""
    if lost.how == "start" or lost.left_s <= 0 or lost.backend not in names:
        return ()
    return names[names.index(lost.backend) + 1 :]


def _reasons(kind: str, refused: Refused) -> str:
    own = [reason.text for reason in refused.reasons if not reason.backend]
    return own[0] if own else f"no grammar backend takes this {NAMES.get(kind, 'schema')}: {_listed(refused.reasons)}"


def _listed(reasons: Iterable[Reason]) -> str:
    return "; ".join(f"{reason.backend}: {reason.text}" for reason in reasons)


def _look_at(outcome: asyncio.Future[Artifact | Refusal]) -> None:
    """An error that nobody waits for any more is no news."""
    if not outcome.cancelled():
        outcome.exception()
