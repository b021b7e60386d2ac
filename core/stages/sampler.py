"""Stage 7, sampler: logits -> token ids: the processor chain, the draw, logprobs (R7.1, R7.4)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from core.batch import SamplerOutput, SamplingMetadata
from core.request import SamplingParams
from core.stages.grammar import GrammarMask, NoGrammar
from core.stages.logits_processor import LogitsChain, NoProcessors

if TYPE_CHECKING:
    import torch

    from core.model.spec import ModelSpec


# Fields of SamplingParams that only a sampler, or a logits processor, can honour.
SAMPLER_FIELDS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "grammar",
    }
)
_SHAPE_OF_RANDOMNESS = frozenset({"temperature", "top_p", "top_k", "min_p"})
_DEFAULTS = SamplingParams()


def unsupported_fields(params: SamplingParams, provides: Collection[str]) -> tuple[str, ...]:
    """Fields that `params` sets (to other than their default) and a sampler (with the processors it runs) that `provides`
    those would ignore.

    At temperature 0 the parameters of randomness change nothing, so any sampler honours them.
    """
    needed = SAMPLER_FIELDS - _SHAPE_OF_RANDOMNESS if params.greedy else SAMPLER_FIELDS
    asked = (name for name in sorted(needed) if getattr(params, name) != getattr(_DEFAULTS, name))
    return tuple(name for name in asked if name not in provides)


@dataclass(frozen=True, slots=True)
class SamplerContext:
    model: ModelSpec  # vocab_size (logits width), eos_token_ids, unusable_token_ids
    device: str = "cpu"
    processors: LogitsChain = field(default_factory=NoProcessors)  # run by samplers that provide "logits_processors"
    grammar: GrammarMask = field(default_factory=NoGrammar)  # obeyed by samplers that provide "grammar"


class Sampler(Protocol):
    """Config group `sampler`. Runs where the model runs, once per step, on the whole [R, V] matrix.

    Seedable; greedy rows are exactly argmax; a row's result does not depend on its batch mates.
    `Component.provides` names the fields of `SAMPLER_FIELDS` that it honours; the front refuses a request that sets another
    before it is rendered (`core.front.request_fields`).

    Example::

        from collections.abc import Sequence

        import torch
        from core.batch import SamplerOutput, SamplingMetadata
        from core.stages.sampler import SamplerContext
        from pydantic import BaseModel, ConfigDict


        class Argmax:
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")

            def __init__(self, settings: Settings, context: SamplerContext):
                self._unusable = sorted(context.model.unusable_token_ids)

            def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
                logits[:, self._unusable] = float("-inf")
                ids, errors = {}, {}
                for index, row in zip(metadata.sampled_rows, metadata.rows, strict=True):
                    if logits[index].amax().isfinite():
                        ids[row.request_id] = (int(logits[index].argmax()),)
                    else:
                        errors[row.request_id] = "no token can be drawn from these logits"
                return SamplerOutput(ids, errors=errors)

            def forget(self, request_ids: Sequence[str]) -> None:
                pass
    """

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """`logits` [R, V] float32, may be overwritten. A bad row (NaN, all masked) goes to `errors`, never raises.

        A reason that begins with `core.errors.NO_TOKEN_LEFT` is told to the client as its own: a 400, and nobody's failure.
        """
        ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests ended or were preempted: drop any state kept for them. Unknown ids are ignored.

        The chain of logits processors is told by whoever built the sampler, not by the sampler.
        """
        ...


@runtime_checkable
class ArgmaxSampler(Sampler, Protocol):
    """A sampler that may be left out of steps. Optional (API 1.4)."""

    def takes_argmax(self, metadata: SamplingMetadata) -> bool:
        """Whether `sample` would give each row the id of its largest logit, the lowest among equals, and tell nothing else of it.

        It is not called then where the model can say as much (`core.model.optional_model.ArgmaxModel`), unless a row has no
        number.
        """
        ...
