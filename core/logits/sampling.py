"""Stage 7 as an executor gets it: the sampler, and the logits processors that it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from core.front.request_fields import RUNS_PROCESSORS, params_class
from core.logits.chain import ProcessorChain
from core.logits.rows import Member
from core.model.tokenizer import load_tokenizer
from core.outputs import PluginIncident
from core.pipeline import Part
from core.stages.logits_processor import LogitsChain, LogitsProcessorContext, NoProcessors
from core.stages.sampler import Sampler, SamplerContext

if TYPE_CHECKING:
    import torch

    from core.batch import SamplerOutput, SamplingMetadata
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
        build: Callable[[Part, object], Any],
        spec: ModelSpec,
        limits: PluginSettings,
    ):
        self._sampler = sampler
        self._processors = processors if RUNS_PROCESSORS in sampler.provided.component.provides else ()
        self._build = build
        self._spec = spec
        self._limits = limits
        self._chain: LogitsChain = NoProcessors()

    def __call__(self, device: str) -> Sampler:
        if not self._processors:
            sampler: Sampler = self._build(self._sampler, SamplerContext(self._spec, device))
            return sampler
        context = LogitsProcessorContext(self._spec, device, cache(partial(load_tokenizer, self._spec.files)))
        members = [self._member(part, context) for part in self._processors]
        self._chain = ProcessorChain(members, device, self._limits.quarantine_after, self._limits.block_timeout)
        return ChainedSampler(self._build(self._sampler, SamplerContext(self._spec, device, self._chain)), self._chain)

    def incidents(self) -> tuple[PluginIncident, ...]:
        """Of the processors, since the last call."""
        return tuple(self._chain.incidents())

    def _member(self, part: Part, context: LogitsProcessorContext) -> Member:
        provided = part.provided
        return Member(
            part=part.named,
            processor=self._build(part, context),
            params=params_class(provided),
            provides=provided.component.provides,
        )


class ChainedSampler:
    """A sampler and the chain it runs: one call ends a request in both."""

    def __init__(self, sampler: Sampler, chain: LogitsChain):
        self._sampler = sampler
        self._chain = chain

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        return self._sampler.sample(logits, metadata)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._sampler.forget(request_ids)
        self._chain.forget(request_ids)
