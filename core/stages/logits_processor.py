"""Logits processors: edits of the logits before the sampler's own, for whole batches of rows (used by stage 7).

A processor is shown rows, not requests: speculation gives a request several rows in one step, and `SampledRow` says whose
each is. What it must remember of a request is a state that the framework keeps: made when the request first has a row here,
dropped when it ends, is preempted or is aborted. So a processor cannot mix up slots of a batch, and cannot leak.
(vLLM's processors mirror moves and swaps of a persistent batch themselves; its users report the faults that come of it.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from core.batch import SampledRow
from core.request import SamplingParams

if TYPE_CHECKING:
    import torch

    from core.model.spec import ModelSpec
    from core.model.tokenizer import Tokenizer
    from core.outputs import PluginIncident


GROUP = "logits_processors"
_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class LogitsProcessorContext:
    model: ModelSpec  # vocab_size (logits width), eos_token_ids
    device: str
    load_tokenizer: Callable[[], Tokenizer]  # loads it at the first call; costs the engine process time and memory


class LogitsProcessor(Protocol):
    """Config group `logits_processors`; any number, called in config's order, where the sampler runs.

    A request's own parameters come as `SamplingParams.extra[name]`, checked at the edge by the model that
    `Component.params` names (a pydantic class in a light module; without one, no request may send any).

    Example::

        from collections.abc import Sequence
        from typing import TYPE_CHECKING

        from core.batch import SampledRow
        from core.stages.logits_processor import LogitsProcessorContext
        from pydantic import BaseModel, ConfigDict, Field

        if TYPE_CHECKING:  # the settings and `Params` are read without it
            import torch


        class Params(BaseModel):
            model_config = ConfigDict(frozen=True, extra="forbid")
            tokens: int = Field(ge=1, description="the newest ones, none of which comes again")


        class NoRepeat:
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")
                max_tokens: int = Field(default=64, ge=1)

            def __init__(self, settings: Settings, context: LogitsProcessorContext):
                self._most = settings.max_tokens

            def state(self, row: SampledRow, params: BaseModel | None) -> int | None:
                return min(params.tokens, self._most) if isinstance(params, Params) else None

            def apply(self, logits: "torch.Tensor", rows: Sequence[SampledRow], states: Sequence[int]) -> None:
                for index, (row, num_tokens) in enumerate(zip(rows, states, strict=True)):
                    newest = [*row.output_token_ids, *row.draft_token_ids][-num_tokens:]
                    if newest:
                        logits[index, newest] = float("-inf")
    """

    def state(self, row: SampledRow, params: BaseModel | None) -> object | None:
        """What to keep for the request of `row`; None: it does not concern this processor, and is never shown to it.

        `params` is an instance of the params class where the request sent parameters. Called once per request, and again
        after a preemption, when `row` has the history so far.
        """
        ...

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow], states: Sequence[Any]) -> Sequence[int] | None:
        """Edit `logits` [A, V] float32 in place; row i belongs to `rows[i]` and has the state `states[i]`.

        Rows of requests without a state are not here. The history of a row is `output_token_ids`, then `draft_token_ids`;
        the rows of one request share its state. A row's edit depends on its own history, state and logits, never on batch
        mates. The same position may come twice, since a step that failed is run again: a state may follow the settled
        history (prompt and `output_token_ids`), and must not count calls. NaN, +inf, or nothing left to draw from, fails the
        request by this processor's name.

        Returns the indices of rows that it has left as they are, as it will leave every later row of their requests: those
        requests are not shown to it again (None: there are no such rows).
        """
        ...


class LogitsChain(Protocol):
    """The selected processors as a sampler sees them (`SamplerContext.processors`).

    A sampler looks for bad rows (no finite largest logit) among `touches` before `apply`, where no processor can hide them,
    and again after it, before its own masks. A row that went bad in between gets its error with `blame` in the text. Ids that
    may never be sampled are masked after `apply` again. All calls come from one thread.
    """

    def touches(self, rows: Sequence[SampledRow]) -> Sequence[int]:
        """Indices of the rows that any processor may edit in this step, ascending. Raises PluginError, as `apply`."""
        ...

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
        """All processors over `logits` [S, V] float32 in place, before the sampler's own masks; `rows` [S].

        Raises PluginError naming the processor that failed: the engine then runs the step request by request.
        """
        ...

    def blame(self, row: SampledRow) -> str:
        """For an error message: the processors that may have spoilt this row, as in ` (after logits_processors=dry)`; else "".

        Counts a failure of the one that did. Raises PluginError where other requests share the step: a processor that was
        called for one of them may have, and the engine runs the step request by request.
        """
        ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests ended or were preempted. Unknown ids are ignored. Called beside the sampler, not by it."""
        ...

    def incidents(self) -> Sequence[PluginIncident]:
        """What failed since the last call."""
        ...


class NoProcessors:
    """The `LogitsChain` of a pipeline without any. It keeps nothing."""

    def touches(self, rows: Sequence[SampledRow]) -> Sequence[int]:
        return ()

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
        """Nothing is edited."""

    def blame(self, row: SampledRow) -> str:
        return ""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept."""

    def incidents(self) -> Sequence[PluginIncident]:
        return ()


def asks_for(params: SamplingParams, name: str, provides: Collection[str]) -> bool:
    """Whether a request asks for the processor `name`, by parameters of its own or by one of the fields it `provides`."""
    if name in params.extra:
        return True
    return any(getattr(params, field, None) != getattr(_DEFAULTS, field, None) for field in provides)


def parsed_params(model: type[BaseModel], values: Mapping[str, Any]) -> BaseModel:
    """A request's parameters as JSON has them: "1" is no number, and a list may stand for a tuple.

    Raises ValidationError; ValueError or TypeError for what JSON cannot hold (NaN).
    """
    return model.model_validate_json(json.dumps(values, allow_nan=False), strict=True)
