"""Grammars that are asked about whole texts: the way of a schema through the backends, with a token for each byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import llguidance

from core.assembly import build, chain_parts
from core.grammar.compilation import BackendPlan, GrammarBackends
from core.grammar.frames import Compile, Compiled, Refused
from core.request import GrammarSpec
from core.session import inspect_session
from core.stages.grammar import GROUP, CompiledGrammar, GrammarBackend, GrammarContext, GrammarError, Vocabulary

END = 256
BYTES = Vocabulary(
    tokens=[*(bytes([byte]) for byte in range(256)), b"</s>"],
    vocab_size=END + 1,
    special_ids=frozenset((END,)),
    eos_ids=frozenset((END,)),
    encode=lambda text: list(text.encode()),
)


class Judge(Protocol):
    def accepts(self, text: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class BackendJudge:
    backend: str
    grammar: CompiledGrammar

    def accepts(self, text: str) -> bool:
        ids = [*text.encode(), END]
        return self.grammar.matcher().accept(ids) == len(ids)


class ByteBackends:
    """The selected backends, as the process that compiles asks them, and as they load what it made."""

    def __init__(self, names: Sequence[str]):
        session = inspect_session([f"grammars=[{','.join(names)}]"])
        context = GrammarContext(lambda: BYTES)
        parts = {part.provided.component.name: part for part in chain_parts(session.settings, session.plugins, GROUP)}
        plans = {
            name: BackendPlan(partial(build, part, context), part.provided.component.provides)
            for name, part in parts.items()
        }
        self._names = list(plans)
        self._asked = GrammarBackends(plans, BYTES.vocab_size)
        self._loading: dict[str, GrammarBackend] = {}
        self._build: dict[str, Callable[[], GrammarBackend]] = {name: plan.build for name, plan in plans.items()}

    def judge(self, schema: Any) -> BackendJudge:
        """Raises GrammarError where all refuse it, RuntimeError where one fails over it."""
        spec = GrammarSpec(kind="json_schema", source=json.dumps(schema))
        answer = self._asked.answer(Compile(spec=spec, backends=self._names), lambda _: None, lambda: 0)
        if answer.faults:
            raise RuntimeError("; ".join(reason.text for reason in answer.faults))
        if isinstance(answer, Refused):
            raise GrammarError("; ".join(reason.text for reason in answer.reasons))
        return self._loaded(answer)

    def _loaded(self, answer: Compiled) -> BackendJudge:
        if answer.backend not in self._loading:
            self._loading[answer.backend] = self._build[answer.backend]()
        return BackendJudge(answer.backend, self._loading[answer.backend].load(answer.artifact))


@dataclass(frozen=True, slots=True)
class LLGuidanceAlone:
    """A schema as llguidance reads it by itself: what the way through `core.grammar.schema` is compared with."""

    grammar: llguidance.LLMatcher

    def accepts(self, text: str) -> bool:
        data, matcher = list(text.encode()), self.grammar.deep_copy()
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def llguidance_alone(schema: Any) -> LLGuidanceAlone:
    """Raises GrammarError where it refuses."""
    source = json.dumps({"grammars": [{"json_schema": schema}]})
    matcher = llguidance.LLMatcher(_byte_tokenizer(), source, log_level=0)
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return LLGuidanceAlone(matcher)


@cache
def _byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(_Bytes(), eos_token=END)  # type: ignore[arg-type]


class _Bytes:
    is_tokenizer_wrapper = True
    tokens = BYTES.tokens
    special_token_ids = (END,)
    eos_token_id = END
    bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())
