"""Grammars of strangers by the thousand: the front's way of a grammar, and a server that gets a new one with each request."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from core.assembly import read_model
from core.errors import NonetError, RequestError
from core.front.front import Front
from core.front.grammars import Grammars
from core.grammar.figures import GrammarFigures
from core.grammar.setup import GrammarSetup, grammar_setup
from core.isolation.incidents import Incidents
from core.lab.hostile_grammars import Hostile, hostile_grammars
from core.outputs import PluginIncident
from core.progress import no_progress
from core.request import GrammarSpec, SamplingParams
from core.session import open_session, start_front
from core.stages.frontend import GenerateRequest
from core.stages.renderer import TokenPrompt

PARAM = "grammar"
CONCURRENCY = 16
ONE_PROCESS = ("process.separate=false", "process.probe_timeout=600", "admission=open")


@dataclass(frozen=True, slots=True)
class Told:
    """What became of one grammar. `code`: "compiled", that of its refusal, or the name of another error."""

    name: str
    seconds: float
    code: str
    message: str = ""


@dataclass(slots=True)
class HostileRun:
    told: list[Told]
    front_bytes: int  # memory of its own
    compiler_bytes: int  # of the largest process that compiled, at the end
    figures: GrammarFigures
    is_alive: bool  # a sound grammar is compiled afterwards
    incidents: Sequence[PluginIncident] = ()  # the latest of each backend that failed, or crashed

    @property
    def codes(self) -> Counter[str]:
        return Counter(one.code for one in self.told)

    def slower_than(self, seconds: float) -> list[Told]:
        return sorted((one for one in self.told if one.seconds > seconds), key=lambda one: -one.seconds)

    def not_answered(self) -> list[Told]:
        """Neither compiled nor refused: an error that is not the client's."""
        return [one for one in self.told if one.code in ("GenerationError", "OverloadedError", "EngineDeadError")]


@asynccontextmanager
async def grammar_front(
    overrides: Sequence[str], incidents: Incidents | None = None
) -> AsyncIterator[tuple[Grammars, GrammarSetup]]:
    """The front's way of a grammar without the rest of the front."""
    session = open_session(overrides)
    spec = read_model(session.settings)
    setup = grammar_setup(session.description, session.settings, session.plugins, spec, GrammarFigures())
    assert setup is not None, "no grammar backend is selected"
    grammars = Grammars(setup, incidents or Incidents())
    try:
        yield grammars, setup
    finally:
        grammars.close()


async def hostile_run(overrides: Sequence[str], num: int | None = None) -> HostileRun:
    """The hostile grammars, one after the other, as a client sees them."""
    incidents = Incidents()
    async with grammar_front(overrides, incidents) as (grammars, setup):
        sound = GrammarSpec(kind="regex", source="[a-z]{3}")
        await grammars.compiled(sound, PARAM)  # the process is there
        told = [await _told(grammars, each) for each in hostile_grammars()[:num]]
        after = GrammarSpec(kind="regex", source="[a-z]{4}")
        is_alive = bool((await grammars.compiled(after, PARAM)).artifact)
        compilers = [memory_bytes(pid) for pid in setup.compiler.pids]
        front = memory_bytes(os.getpid())
        return HostileRun(told, front, max(compilers), setup.figures, is_alive, incidents.latest())


async def _told(grammars: Grammars, each: Hostile) -> Told:
    started = time.perf_counter()
    code, message = "compiled", ""
    try:
        asked = await asyncio.to_thread(grammars.bounded, each.spec, PARAM)
        await grammars.compiled(asked, PARAM)
    except RequestError as error:
        code, message = error.code, error.message
    except NonetError as error:
        code, message = type(error).__name__, str(error)
    return Told(each.name, time.perf_counter() - started, code, message)


def unique_grammars() -> Iterator[GrammarSpec]:
    """Schemas and regular expressions in turn; no two are equal."""
    number = 0
    while True:
        yield GrammarSpec(kind="json_schema", source=json.dumps(_unique_schema(number)))
        yield GrammarSpec(kind="regex", source=rf"item-{number}(-[a-z]{{1,{1 + number % 30}}}|\d+)")
        number += 1


def _unique_schema(number: int) -> dict[str, object]:
    properties = {
        f"name_{number}": {"type": "string", "maxLength": 10 + number % 50},
        f"count_{number}": {"type": "integer", "minimum": number},
        f"kind_{number}": {"enum": ["a", "b", f"c{number}"]},
        f"tags_{number}": {"type": "array", "items": {"type": "string"}, "maxItems": 1 + number % 5},
    }
    required = sorted(properties)[: number % 4]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@dataclass(slots=True)
class UniqueRun:
    num_ended: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    server_bytes: list[int] = field(default_factory=list)  # front and engine, at each tenth
    compiler_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    cached_bytes: int = 0
    num_again: int = 0  # the last ones come again
    hits_again: int = 0  # and are in the cache

    def growth(self, measured: Callable[[UniqueRun], list[int]]) -> int:
        """Bytes from the second tenth (caches are full, buffers made) to the last."""
        found = measured(self)
        return found[-1] - found[1]


async def unique_run(overrides: Sequence[str], num: int) -> UniqueRun:
    """Requests for one token, each with a grammar of its own, through a whole server of this process."""
    run, specs = UniqueRun(), unique_grammars()
    session = open_session([*overrides, *ONE_PROCESS])
    async with AsyncExitStack() as at_end:
        front = await start_front(session, no_progress)
        at_end.push_async_callback(front.close)
        grammars = front._intake.grammars
        assert grammars is not None
        started, last = time.perf_counter(), list[GrammarSpec]()
        for _ in range(10):
            part = list(islice(specs, num // 10))
            await _all_of(front, part, run)
            run.server_bytes.append(memory_bytes(os.getpid()))
            run.compiler_bytes.append(max(map(memory_bytes, grammars.compiler_pids)))
            last = part[-100:]
        run.seconds = time.perf_counter() - started
        before = grammars.figures.hits
        await _all_of(front, last, UniqueRun())
        run.num_again, run.hits_again = len(last), grammars.figures.hits - before
        run.cached_bytes = grammars.figures.cached_bytes
    return run


async def _all_of(front: Front, specs: Sequence[GrammarSpec], run: UniqueRun) -> None:
    left = iter(specs)

    async def client() -> None:
        for spec in left:
            await _one(front, spec, run)

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))


async def _one(front: Front, spec: GrammarSpec, run: UniqueRun) -> None:
    params = SamplingParams(temperature=0.0, grammar=spec)
    request = GenerateRequest("unique", TokenPrompt([5, 6, 7]), params, max_tokens=1)
    try:
        async with aclosing(front.generate(request)) as outputs:
            async for _ in outputs:
                pass
        run.num_ended += 1
    except NonetError as error:
        run.errors[f"{type(error).__name__}: {error}"] += 1


def memory_bytes(pid: int) -> int:
    """Anonymous memory of a process, in RAM and swapped out; 0 where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap") if name in fields)
