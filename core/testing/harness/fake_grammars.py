"""Grammar backends without a tokenizer that do what a grammar's text tells them: `sleep 5`, `raise boom`, `exit 3`.

For tests of the process that compiles: its factory is `core.testing.harness.fake_grammars:fake_backends`. Where a text is
`a | b`, the first backend does `a` and the second `b`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from core.grammar.compilation import BackendPlan, GrammarBackends
from core.grammar.compiler import IDLE_S, GrammarCompiler
from core.grammar.figures import GrammarFigures
from core.grammar.frames import Boot
from core.grammar.setup import GrammarPart, GrammarSetup
from core.isolation.faults import ComponentName
from core.memory import num_bytes
from core.request import GrammarSpec
from core.settings import StructuredOutputSettings
from core.stages.grammar import GrammarError, Mask

FACTORY = "core.testing.harness.fake_grammars:fake_backends"
FAKES = ("first", "second")
NO_TEXT = b"no text"
VOCAB_SIZE = 64

_leaked: list[bytes] = []


class FakeBackend:
    def __init__(self, place: int):
        self._place = place

    def compile(self, spec: GrammarSpec) -> bytes:
        told = spec.source.split(" | ")
        word, _, rest = told[min(self._place, len(told) - 1)].partition(" ")
        return DEEDS[word](rest) if word in DEEDS else spec.source.encode()

    def load(self, artifact: bytes) -> FakeGrammar:
        return FakeGrammar(artifact)


class FakeGrammar:
    """Any text, or none."""

    def __init__(self, artifact: bytes):
        self._artifact = artifact

    def matcher(self) -> FakeGrammar:
        return self

    def accept(self, token_ids: object) -> int:
        return len(list(token_ids)) if isinstance(token_ids, list | tuple) else 0

    def rollback(self, num_tokens: int) -> None:
        """Nothing is kept."""

    def fill(self, mask: Mask) -> None:
        mask[:] = 0 if self._artifact == NO_TEXT else -1

    def forced(self) -> tuple[int, ...]:
        return ()


def _sleep(seconds: str) -> bytes:
    time.sleep(float(seconds))
    return b"slept"


def _refuse(text: str) -> NoReturn:
    raise GrammarError(text)


def _raise(text: str) -> NoReturn:
    raise ZeroDivisionError(text)


def _exit(status: str) -> NoReturn:
    os._exit(int(status))


def _crash(signum: str) -> bytes:
    os.kill(os.getpid(), getattr(signal, signum))
    return b"still there"


def _eat(mebibytes: str) -> bytes:
    """Kept until the process ends."""
    for _ in range(int(mebibytes)):
        _leaked.append(bytes(2**20))
    return b"ate"


def _hold(seconds: str) -> bytes:
    """Native code that lets no other thread run."""
    ctypes.PyDLL(None).sleep(int(seconds))
    return b"held"


def _say(text: str) -> bytes:
    print(text)
    return b"said"


def _make(num: str) -> bytes:
    return bytes(int(num))


def _tell_pid(text: str) -> bytes:
    return str(os.getpid()).encode()


DEEDS: Mapping[str, Callable[[str], bytes]] = {
    "sleep": _sleep,
    "refuse": _refuse,
    "raise": _raise,
    "exit": _exit,
    "crash": _crash,
    "eat": _eat,
    "hold": _hold,
    "say": _say,
    "make": _make,
    "pid": _tell_pid,
    "nothing": lambda text: NO_TEXT,
}


def fake_backends(settings: str) -> GrammarBackends:
    """`settings` may be a deed, which is done before anything is built."""
    word, _, rest = settings.partition(" ")
    if word in DEEDS:
        DEEDS[word](rest)
    plans = {name: BackendPlan(_builder(place), ("regex", "ebnf")) for place, name in enumerate(FAKES)}
    return GrammarBackends(plans, VOCAB_SIZE)


def _builder(place: int) -> Callable[[], FakeBackend]:
    return lambda: FakeBackend(place)


def fake_setup(
    *,
    settings: str = "",
    plugins: list[str] | None = None,
    quarantine_after: float = 3,
    max_workers: int = 1,
    idle_s: float = IDLE_S,
    **limits: object,
) -> GrammarSetup:
    """What assembly would make of two selected backends, `first` and `second`; with one process, so that it is known which."""
    known, figures = StructuredOutputSettings.model_validate(limits), GrammarFigures()
    boot = Boot(factory=FACTORY, settings=settings, plugins=plugins, memory=num_bytes(known.compile_memory))
    parts = tuple(
        GrammarPart(ComponentName("grammars", name, "fakes, acme 1.0"), frozenset({"regex"}), quarantine_after)
        for name in FAKES
    )
    compiler = GrammarCompiler(
        boot,
        timeout_s=known.compile_timeout,
        max_queued=known.max_queued,
        figures=figures,
        max_workers=max_workers,
        idle_s=idle_s,
    )
    return GrammarSetup(parts, known, compiler, figures)
