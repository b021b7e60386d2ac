"""One component of the front that goes wrong for one call, the victim, with 31 others beside it: what the tests of that share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from core.errors import GenerationError
from core.isolation.front import FrontLimits
from core.outputs import PluginIncident, RequestOutput
from core.stages.frontend import GenerateRequest
from core.testing.harness.fronts import FrontHarness, ids_of, oracle, request, text_of

MARK = 49  # first token of the victim's prompt
VICTIM_PROMPT = (MARK, 9, 10)
PLACE = 16  # of the victim among the calls
WHO = "(plugin chaos, acme 1.0)"  # as the harness names every component
QUICK = FrontLimits(block_timeout=0.1, render_timeout=0.4)
BLOCK_S = 0.3  # seconds, more than `QUICK` allows

Act = Callable[[Any, str], Any]

Seen = tuple[list[tuple[list[int], str]], list[tuple[Any, ...]], int]


def is_victim(request_id: str) -> bool:
    return request_id.startswith("victim")


def victim(**params: Any) -> GenerateRequest:
    return request("victim", VICTIM_PROMPT, 12, **params)


def others() -> list[GenerateRequest]:
    """31 calls: in deltas of one token and of three, with stop strings, with two choices, short and long."""
    calls = []
    for index in range(31):
        params: dict[str, Any] = {}
        if index % 3 == 1:
            params["stream_interval"] = 3
        if index % 5 == 2:
            params["stop"] = ("zz", "KD", "@B9", "8")  # some of them match
        if index % 7 == 3:
            params["n"] = 2
        calls.append(request(f"r{index}", range(1, 4 + index % 6), 6 + index % 9, **params))
    return calls


def seen(outputs: Sequence[RequestOutput]) -> Seen:
    """All that a client sees of an answer, apart from how it is cut into deltas: ids and text, ends, generated tokens."""
    parts = [part for output in outputs for part in output.outputs]
    ends = [(p.index, p.finish_reason, p.stop_reason) for p in parts if p.finish_reason is not None]
    choices = sorted({part.index for part in parts})
    usage = outputs[-1].usage
    assert usage is not None
    return [(ids_of(outputs, i), text_of(outputs, i)) for i in choices], sorted(ends), usage.completion_tokens


def solo_answers(scheduler: Any) -> dict[str, Seen]:
    """What each of the others sees when it runs alone."""

    async def run() -> dict[str, Seen]:
        async with FrontHarness(scheduler) as h:
            return {call.request_id: seen(await h.answer(call)) for call in others()}

    return asyncio.run(run())


async def run_all(h: FrontHarness, bad: Any = None) -> tuple[Any, dict[str, Seen]]:
    """All 32 at once. Returns what the victim ended with, and what the others saw; raises an error of one of those."""
    calls: list[Any] = others()
    calls.insert(PLACE, bad if bad is not None else victim())
    found = await asyncio.wait_for(asyncio.gather(*map(h.answer, calls), return_exceptions=True), 30)
    outcome = found.pop(PLACE)
    for other in found:
        if isinstance(other, BaseException):
            raise other
    rest: list[Any] = found
    return outcome, {call.request_id: seen(outputs) for call, outputs in zip(others(), rest, strict=True)}


async def check(
    scheduler: Any,
    solo: Mapping[str, Seen],
    stage: str,
    wrapper: Callable[[Any], Any] | None,
    *,
    limits: FrontLimits | None = None,
    bad: Any = None,
    fails: bool = True,
    reason: str = "",
) -> tuple[PluginIncident, ...]:
    """The promise: the victim alone `fails`, by the component's name, or is unhurt; nothing is left; incidents tell of it."""
    wrap = {} if wrapper is None else {stage: wrapper}
    async with FrontHarness(scheduler, wrap=wrap, limits=limits) as h:
        outcome, rest = await run_all(h, bad)
        assert rest == solo
        if fails:
            assert isinstance(outcome, GenerationError), outcome
            assert str(outcome).startswith(f"{stage}=chaos {WHO}: {reason}"), outcome
            assert outcome.part == f"{stage}=chaos {WHO}"
            assert h.front.incidents()
        else:
            assert ids_of(outcome) == oracle(VICTIM_PROMPT, 12)
        assert {(i.group, i.name, i.plugin) for i in h.front.incidents()} <= {(stage, "chaos", "chaos, acme 1.0")}
        await h.assert_whole()
        assert ids_of(await h.answer(request("later"))) == oracle()
        return h.front.incidents()


class Around:
    """A component some of whose methods do something else: `method(inner, *arguments)`."""

    def __init__(self, inner: Any, **methods: Callable[..., Any] | None):
        self._inner = inner
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        own = self._methods.get(name)
        return getattr(self._inner, name) if own is None else partial(own, self._inner)


class UnspeakableError(Exception):
    """Its text cannot be read."""

    def __str__(self) -> str:
        raise ValueError("no text")


def boom(*_: object) -> NoReturn:
    raise RuntimeError("boom")


def leave(*_: object) -> NoReturn:
    raise SystemExit(3)


def unspeakable(*_: object) -> NoReturn:
    raise UnspeakableError


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def act(*_: object) -> NoReturn:
        raise error

    return act


def returning(value: object) -> Callable[..., Any]:
    return lambda *_: value


def slow_push(inner: Any, text: str) -> Any:
    """An `Act` that takes longer than `QUICK` allows."""
    time.sleep(BLOCK_S)
    return inner.push(text)


def pushed_badly(stream: Any, act: Act) -> Around:
    """A stream of a parser that does `act` when it is pushed the victim's text."""
    return Around(stream, push=lambda inner, text: act(inner, text) if "bad" in text else inner.push(text))
