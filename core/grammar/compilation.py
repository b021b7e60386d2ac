"""One grammar through the backends, in the process that compiles."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from core.errors import Terminated, described, told
from core.grammar.frames import (
    MAX_ARTIFACT_BYTES,
    OUT_OF_MEMORY,
    Compile,
    Compiled,
    Message,
    Reason,
    Refused,
    Trying,
    Warming,
)
from core.grammar.samples import sample
from core.grammar.schema.normalise import normalise
from core.request import GrammarSpec
from core.stages.grammar import GrammarBackend, GrammarError, mask_size
from core.stages.structural_tag import parse_structural_tag

logger = logging.getLogger(__name__)

FORMATS: Final = "known"
"""Whether `format` holds: draft 2020-12 lets a validator ignore it, but who asks for a date does not want any other text."""

Tell = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class BackendPlan:
    """A backend that is built when it is first asked: what it imports may be large."""

    build: Callable[[], GrammarBackend]
    kinds: Sequence[str]


@dataclass(slots=True)
class _Found:
    """What is known of a grammar until a backend takes it."""

    reasons: list[Reason] = field(default_factory=list)
    faults: list[Reason] = field(default_factory=list)


class GrammarBackends:
    """The selected backends. `plugins`: "name==version" of each plugin that is loaded here."""

    def __init__(self, plans: Mapping[str, BackendPlan], vocab_size: int, plugins: Sequence[str] = ()):
        self.plugins = plugins
        self._plans = plans
        self._vocab_size = vocab_size
        self._warm: dict[str, GrammarBackend] = {}

    def warm_first(self) -> None:
        """The one that is nearly always asked. What it does wrong is told when it is asked."""
        for name in list(self._plans)[:1]:
            try:
                self._backend(name, _say_nothing)
            except Terminated:
                raise
            except BaseException:  # a stranger's code may raise anything
                logger.exception("grammars=%s cannot be built", name)

    def answer(self, job: Compile, tell: Tell, used_memory: Callable[[], int]) -> Compiled | Refused:
        """By the first backend that takes it."""
        tell(Trying(backend=""))
        try:
            spec = normalised(job.spec)
        except (GrammarError, RecursionError) as error:
            return Refused(reasons=[Reason(backend="", text=_text(error))], memory=used_memory())
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:  # ours: it costs this grammar, not the process
            logger.exception("a schema could not be normalised")
            return Refused(faults=[Reason(backend="", text=described(error))], memory=used_memory())
        found = _Found()
        for name in job.backends:
            artifact = self._tried(name, spec, tell, found)
            if artifact is not None:
                return Compiled(backend=name, artifact=artifact, faults=found.faults, memory=used_memory())
        return Refused(reasons=found.reasons, faults=found.faults, memory=used_memory())

    def _tried(self, name: str, spec: GrammarSpec, tell: Tell, found: _Found) -> bytes | None:
        try:
            backend = self._backend(name, tell)
            tell(Trying(backend=name))
            return proved(backend, backend.compile(spec), self._vocab_size)
        except (GrammarError, RecursionError) as error:
            found.reasons.append(Reason(backend=name, text=_text(error)))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Terminated:
            raise
        except BaseException as error:  # a stranger's code may raise anything
            logger.exception("grammars=%s failed", name)
            found.faults.append(Reason(backend=name, text=described(error)))
        return None

    def _backend(self, name: str, tell: Tell) -> GrammarBackend:
        """Built, and used once: also what it makes for its first grammar is there."""
        if name not in self._warm:
            tell(Warming(backend=name))
            plan = self._plans[name]
            backend = plan.build()
            with suppress(GrammarError):  # it need not take this one
                proved(backend, backend.compile(sample(plan.kinds)), self._vocab_size)
            self._warm[name] = backend
        return self._warm[name]


def proved(backend: GrammarBackend, artifact: object, vocab_size: int) -> bytes:
    """What would go wrong where the sampler runs goes wrong here: that it cannot be loaded, or has no text at all.

    Raises GrammarError for what is refused so, and what `load` raises.
    """
    if type(artifact) is not bytes:
        raise TypeError(f"compile returned a {type(artifact).__name__}, not bytes")
    if len(artifact) > MAX_ARTIFACT_BYTES:
        raise GrammarError(f"compiled, it takes {len(artifact)} bytes, and {MAX_ARTIFACT_BYTES} is the limit")
    mask = np.zeros(mask_size(vocab_size), np.int32)
    backend.load(artifact).matcher().fill(mask)
    if not mask.any():
        raise GrammarError("no text matches it")
    return artifact


def normalised(spec: GrammarSpec) -> GrammarSpec:
    """Its JSON schemas as backends do them right (`core.grammar.schema`). Raises GrammarError."""
    if spec.kind == "json_schema":
        written = json.dumps(_normalised(json.loads(spec.source)), ensure_ascii=False, separators=(",", ":"))
        return msgspec.structs.replace(spec, source=written)
    if spec.kind == "structural_tag":
        tag = parse_structural_tag(spec.source).with_schemas(_normalised)
        return msgspec.structs.replace(spec, source=tag.source())
    return spec


def _normalised(schema: Any) -> dict[str, Any]:
    return normalise(schema, formats=FORMATS)


def _text(error: BaseException) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else told(error)


def _say_nothing(message: Message) -> None:
    """Nobody waits yet."""
