"""Grammars: what the output of a request must be (R7.3). Compiled beside stage 3, obeyed in stage 7.

A request names a language (`GrammarSpec`: a JSON schema, a regular expression, …). The front has it compiled in a process of its
own, with bounds on time and memory, by the first selected backend that takes it; what comes out is bytes, and only these cross
to the engine. There a backend loads them once, and each choice of the request gets a matcher: the state that says which tokens
may come next. So no text of a client is parsed where it could stop a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from core.batch import SampledRow
from core.request import GrammarSpec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from core.outputs import PluginIncident

GROUP = "grammars"
Mask: TypeAlias = "NDArray[np.int32]"
"""[ceil(vocab_size / 32)]: bit i of word w is token 32 * w + i, 1 where it may come next (as in xgrammar and llguidance)."""


_NUMBER = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
SCHEMA_KEYWORDS: Mapping[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": _NUMBER,
    "number": _NUMBER,
    "string": frozenset(("minLength", "maxLength", "pattern", "allOf")),
    "array": frozenset(("prefixItems", "items", "minItems", "maxItems")),
    "object": frozenset(
        ("properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties")
    ),
}
"""What stands beside each `type` in a normalised schema (`core.grammar.schema.normalise`).

Such a schema is true, false, or an object: an empty one; or one keyword alone, of `anyOf`, `enum`, `type` with a list, and `$ref`
to `#/$defs/…`; or `type` with one name and some of these. The outermost one has the `$defs`. Each part that is not false has a
value of finite size. `allOf` lists more schemas of strings with a `pattern`. No name matches two of `patternProperties`; where
one of `properties` matches, its own schema says all that the pattern's does. `minProperties` is above the number of `required` by
1 at most. Properties come in the order in which they are listed, those that `required` alone names after them.
"""


class GrammarError(ValueError):
    """A backend does not take a grammar, and says why in one line for the client: `uniqueItems is not supported`."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens as a backend needs them."""

    tokens: Sequence[bytes]  # by id: the bytes inside a text; b"" where an id has none
    vocab_size: int  # of the logits; ids from len(tokens) on have no text
    special_ids: frozenset[int]  # never part of a text: their bytes stand for themselves only
    eos_ids: frozenset[int]  # each ends a sequence
    # The tokens of a text behind other text, as the model has learnt them: their bytes are the text's, none of them is special.
    encode: Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class GrammarContext:
    load_vocabulary: Callable[[], Vocabulary]  # reads the tokenizer at the first call, which takes its time


class GrammarBackend(Protocol):
    """Config group `grammars`; any number, asked in config's order. Built in the compiling process and where the sampler runs.

    `Component.provides` names the kinds that it compiles (`core.request.GRAMMAR_KINDS`).

    Example::

        import json
        from collections.abc import Sequence

        from core.request import GrammarSpec
        from core.stages.grammar import GrammarContext, GrammarError, Mask, allow
        from pydantic import BaseModel, ConfigDict


        class Choices:  # provides=("choice",): one of several texts, each in the tokens of its own encoding
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")

            def __init__(self, settings: Settings, context: GrammarContext):
                self._load_vocabulary = context.load_vocabulary

            def compile(self, spec: GrammarSpec) -> bytes:
                vocabulary, texts = self._load_vocabulary(), json.loads(spec.source)
                if not texts:
                    raise GrammarError("there is nothing to choose from")
                return json.dumps([[*map(vocabulary.encode, texts)], [*vocabulary.eos_ids]]).encode()

            def load(self, artifact: bytes) -> "Path":
                return Path(*json.loads(artifact))


        class Path:  # the grammar is the matcher that has taken nothing
            def __init__(self, paths: list[list[int]], eos_ids: list[int]):
                self._paths, self._eos_ids, self._taken = paths, eos_ids, list[int]()

            def matcher(self) -> "Path":
                return Path(self._paths, self._eos_ids)

            def accept(self, token_ids: Sequence[int]) -> int:
                for count, token_id in enumerate(token_ids):
                    if token_id not in self._next():
                        return count
                    self._taken.append(token_id)
                return len(token_ids)

            def rollback(self, num_tokens: int) -> None:
                del self._taken[len(self._taken) - num_tokens :]

            def fill(self, mask: Mask) -> None:
                allow(mask, self._next())

            def forced(self) -> tuple[int, ...]:
                following = self._next()
                return (min(following),) if len(following) == 1 or following == set(self._eos_ids) else ()

            def _next(self) -> set[int]:
                done, ends = len(self._taken), self._eos_ids if self._taken in self._paths else ()
                return {path[done] for path in self._paths if path[:done] == self._taken != path}.union(ends)
    """

    def compile(self, spec: GrammarSpec) -> bytes:
        """What `load` needs and nothing else does. Raises GrammarError where it does not take `spec`.

        Every text that a matcher of the result ends with is in the language of `spec`: what it cannot hold a text to (a keyword
        that it does not know) is refused here, never left out. May take long: it runs in a process that is stopped then. There
        the result is loaded and a first mask of it made, too: a GrammarError of these, and a mask that allows nothing, are
        refusals as well, so nothing has to be tried here.

        `spec.source` is within the limits of config, and by `spec.kind`:

        - json_schema: a JSON schema that is normalised (see `SCHEMA_KEYWORDS`), so whatever draft and keywords a client used
        - json_object: "", for any JSON object
        - regex: matched against the whole text; ebnf: rules of which `root` is the whole text, as llama.cpp writes them
        - choice: a JSON list of one or more texts
        - structural_tag: see `core.stages.structural_tag`, with normalised schemas
        """
        ...

    def load(self, artifact: bytes) -> CompiledGrammar:
        """Called in a thread, once for each artifact. Raises for bytes that `compile` did not make, and GrammarError for what
        turns out not to be taken only now."""
        ...


class CompiledGrammar(Protocol):
    """A grammar that no longer changes, for any number of matchers."""

    def matcher(self) -> Matcher:
        """A new one, at the start of an output. Cheap: one for each choice, and again after a preemption."""
        ...


class Matcher(Protocol):
    """How far one output has come. One thread at a time calls it; none of it raises for tokens that do not fit."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on with these ids; returns how many of them fit, and stands after those. An end of sequence fits where the text
        may end."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the newest accepted ids."""
        ...

    def fill(self, mask: Mask) -> None:
        """Write all of `mask`. Of the ids of the end, all where the text may end, else none. Every other id that is allowed can
        be gone on from to such an end."""
        ...

    def forced(self) -> tuple[int, ...]:
        """The ids that follow in any case, as the model would write their text; () where there is a choice.

        Where the text can only end, one id of the end. Does not move the matcher.
        """
        ...


class GrammarMask(Protocol):
    """The grammars of all requests as a sampler sees them (`SamplerContext.grammar`). One thread calls it.

    A sampler that provides "grammar" calls `apply` before the logits processors, so that they choose among what may come next;
    again behind them where they edited a row with a grammar, since they may have raised what it bars; and `following` with what
    it has drawn.
    """

    def begin(self, rows: Sequence[SampledRow]) -> None:
        """Called beside the sampler, before the forward pass of the step with these rows: masks are made meanwhile."""
        ...

    def touches(self, rows: Sequence[SampledRow]) -> Sequence[int]:
        """Indices of the rows with a grammar, ascending."""
        ...

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> dict[int, str]:
        """Set what may not come next in `logits` [S, V] to -inf. Returns errors by row: of grammars that cannot go on. May be
        called again for the same step."""
        ...

    def following(self, row: SampledRow, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids that the request gets in this step: those drawn for it, from `row`'s position on, then those that its grammar
        forces after them (jump-forward decoding; idea: SGLang, llguidance)."""
        ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests ended or were preempted. Called beside the sampler, not by it. Unknown ids are ignored."""
        ...

    def incidents(self) -> Sequence[PluginIncident]:
        """What failed since the last call."""
        ...

    def close(self) -> None:
        """The executor ends."""
        ...


class NoGrammar:
    """The `GrammarMask` of a pipeline without backends: no request has a grammar."""

    def begin(self, rows: Sequence[SampledRow]) -> None:
        """There is nothing to begin."""

    def touches(self, rows: Sequence[SampledRow]) -> Sequence[int]:
        return ()

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> dict[int, str]:
        return {}

    def following(self, row: SampledRow, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return token_ids

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept."""

    def incidents(self) -> Sequence[PluginIncident]:
        return ()

    def close(self) -> None:
        """Nothing runs."""


def mask_size(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def allow(mask: Mask, token_ids: Iterable[int]) -> None:
    """Make these the only ids that may come next."""
    mask[:] = 0
    words = mask.view("uint32")
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32
