"""What a model may offer beside `core.model.interface.Model`: found by its methods, and done without where they are not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from core.batch import ModelBatch
from core.model.interface import Model

if TYPE_CHECKING:
    import torch

    from core.model.roofline import Roofline


@dataclass(frozen=True, slots=True, eq=False)
class Argmax:
    """What a step comes to where no other logit is looked at."""

    ids: torch.Tensor  # int64 [R], of the largest logit of each row, the lowest id among equals
    peaks: torch.Tensor  # float32 [R], that logit; NaN where the row has one


def argmax_of(logits: torch.Tensor) -> Argmax:
    """Of [R, V], the slow way."""
    return Argmax(logits.argmax(-1), logits.amax(-1))


@runtime_checkable
class ArgmaxModel(Model, Protocol):
    """A model that can do without writing logits. Optional (API 1.4)."""

    def forward_argmax(self, batch: ModelBatch, kv_caches: Sequence[torch.Tensor]) -> Argmax:
        """As `forward`, and to the same ids as the argmax of what that returns. Asked where the sampler says that it wants no
        more (`core.stages.sampler.ArgmaxSampler`)."""
        ...


@runtime_checkable
class RooflineModel(Model, Protocol):
    """A model that tells how far from this machine's limits its steps are. Optional (API 1.4)."""

    def roofline(self) -> Roofline:
        """What a step must move and compute, and what this machine can, measured when it is asked for: by `bench`, between steps.

        Without it, or where the executor does not pass it on, `bench` tells no share of the machine's limits.
        """
        ...


@runtime_checkable
class AheadModel(Model, Protocol):
    """A model that begins what it takes for the next step while the engine is busy with the results of the last one.

    Optional (API 1.4). It writes KV only where the requests' next tokens go, and drops it all when another step is asked for.
    """

    def settle(self) -> None:
        """Called before the pool is copied from, copied to or given back between steps: what was begun ends here."""
        ...
