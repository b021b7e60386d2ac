"""Stage 7 as an executor gets it: the sampler, with the logits processors that it runs and the grammars that it obeys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from core.front.request_fields import RUNS_PROCESSORS, params_class
from core.grammar.rows import GrammarRows
from core.grammar.vocabulary import read_vocabulary
from core.grammar.warmup import Warmup
from core.logits.chain import ProcessorChain
from core.logits.rows import Member
from core.model.tokenizer import load_tokenizer
from core.outputs import PluginIncident
from core.pipeline import Part
from core.stages.grammar import GrammarContext, GrammarMask, NoGrammar
from core.stages.logits_processor import LogitsChain, LogitsProcessorContext, NoProcessors
from core.stages.sampler import ArgmaxSampler, Sampler, SamplerContext

if TYPE_CHECKING:
    import torch

    from core.batch import SampledRow, SamplerOutput, SamplingMetadata
    from core.model.spec import ModelSpec
    from core.settings import PluginSettings


class SamplerBuilder:
    """`ExecutorContext.build_sampler`: called where the model lives, once its device is known.

    `build` makes an object of a part and its context, as `core.assembly.build`.
    """

    def __init__(
        self,
        sampler: Part,
        processors: Sequence[Part],
        grammars: Sequence[Part],
        build: Callable[[Part, object], Any],
        spec: ModelSpec,
        limits: PluginSettings,
        jump_forward: bool = True,
    ):
        words = sampler.provided.component.provides
        self._sampler = sampler
        self._processors = processors if RUNS_PROCESSORS in words else ()
        self._grammars = grammars if "grammar" in words else ()
        self._jump_forward = jump_forward
        self._build = build
        self._spec = spec
        self._limits = limits
        self._chain: LogitsChain = NoProcessors()
        self._grammar: GrammarMask = NoGrammar()
        self._warmup: Warmup | None = None

    def __call__(self, device: str) -> Sampler:
        tokenizer = cache(partial(load_tokenizer, self._spec.files))
        limits = self._limits.quarantine_after, self._limits.block_timeout
        if self._processors:
            shown = LogitsProcessorContext(self._spec, device, tokenizer)
            self._chain = ProcessorChain([self._member(part, shown) for part in self._processors], device, *limits)
        if self._grammars:
            vocabulary = GrammarContext(cache(lambda: read_vocabulary(self._spec, tokenizer())))
            backends = {part.named: self._build(part, vocabulary) for part in self._grammars}
            first = self._grammars[0]
            self._warmup = Warmup(backends[first.named], first.provided.component.provides)
            self._grammar = GrammarRows(
                backends,
                self._spec.vocab_size,
                self._jump_forward,
                *limits,
                trusted=[part.named for part in self._grammars if part.provided.plugin.builtin],
                load_vocabulary=vocabulary.load_vocabulary,
                device=device,
            )
        context = SamplerContext(self._spec, device, self._chain, self._grammar)
        return BuiltSampler(self._build(self._sampler, context), self._chain, self._grammar, self._warmup)

    def incidents(self) -> tuple[PluginIncident, ...]:
        """Of processors and grammars, since the last call."""
        return (*self._chain.incidents(), *self._grammar.incidents())

    def _member(self, part: Part, context: LogitsProcessorContext) -> Member:
        provided = part.provided
        return Member(
            part=part.named,
            processor=self._build(part, context),
            params=params_class(provided),
            provides=provided.component.provides,
        )


class BuiltSampler:
    """A sampler with the chain that it runs and the grammars that it obeys: one call ends a request in all of them."""

    def __init__(self, sampler: Sampler, chain: LogitsChain, grammar: GrammarMask, warmup: Warmup | None = None):
        self._sampler = sampler
        self._chain = chain
        self._grammar = grammar
        self._warmup = warmup

    def begin(self, rows: Sequence[SampledRow]) -> None:
        """Before the forward pass: what can be made beside it."""
        self._grammar.begin(rows)

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        return self._sampler.sample(logits, metadata)

    def takes_argmax(self, metadata: SamplingMetadata) -> bool:
        return isinstance(self._sampler, ArgmaxSampler) and self._sampler.takes_argmax(metadata)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._sampler.forget(request_ids)
        self._chain.forget(request_ids)
        self._grammar.forget(request_ids)

    def close(self) -> None:
        if self._warmup is not None:
            self._warmup.cancel()
        self._grammar.close()
