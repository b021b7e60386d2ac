"""Logits processor `mirostat`: how surprising tokens may be follows how surprising the text has been so far.

Basu, Ramachandran, Keskar, Varshney, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity", ICLR 2021,
in its second form (no estimate of the distribution's tail). Before each token there is a bound in bits: tokens with a greater
surprise -log2 p are left out, the likeliest never is. The surprise of the token that is drawn, among those that are left, moves
it: bound -= eta * (surprise - tau). It begins at twice `tau`, the surprise that is aimed at.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel

from core.batch import SampledRow
from core.stages.logits_processor import LogitsProcessorContext
from plugins.logits_processors.settings import MirostatParams, MirostatSettings

MAX_COURSES = 4096  # of requests that are remembered past their end or a preemption, which look alike from here


@dataclass(frozen=True, slots=True)
class Left:
    """The tokens that one position was left with."""

    token_ids: NDArray[np.int64]
    bits: NDArray[np.float32]  # the surprise of each among them

    def surprise(self, token_id: int) -> float | None:
        at = int(np.searchsorted(self.token_ids, token_id))
        found = at < len(self.token_ids) and self.token_ids[at] == token_id
        return float(self.bits[at]) if found else None


@dataclass(slots=True, eq=False)
class Course:
    """One request's bounds. What a position was left with is kept until its token is known."""

    tau: float
    eta: float
    bounds: list[float] = field(default_factory=list)  # by position, as far as it is settled
    left: dict[int, Left] = field(default_factory=dict)

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """To the settled output. A token that did not come of what is known here (a grammar added it) moves nothing."""
        for position in range(len(self.bounds) - 1, len(output_token_ids)):
            if position >= 0:
                self.bounds.append(self._moved(self.bounds[position], position, output_token_ids[position]))
                self.left.pop(position, None)
            else:
                self.bounds.append(2.0 * self.tau)

    def bound(self, row: SampledRow) -> float:
        """Before the row's token: behind its drafts, which may never be settled."""
        settled = len(row.output_token_ids)
        bound = self.bounds[settled]
        for offset, token_id in enumerate(row.draft_token_ids):
            bound = self._moved(bound, settled + offset, token_id)
        return bound

    def _moved(self, bound: float, position: int, token_id: int) -> float:
        left = self.left.get(position)
        surprise = left.surprise(token_id) if left is not None else None
        return bound if surprise is None else bound - self.eta * (surprise - self.tau)


class Mirostat:
    """For requests that send parameters; with `always`, for all that are not greedy.

    Surprise is by the request's temperature, as its tokens are drawn; top-k, top-p and min-p still come after, and are best left
    off. While ids are in flight the surprise of the newest is unknown, and nothing is left out.

    The bound depends on what the logits were, which no history tells. It is kept here past a preemption for the `MAX_COURSES`
    newest requests; one that comes back later begins again at twice `tau`.
    """

    Settings = MirostatSettings

    def __init__(self, settings: MirostatSettings, context: LogitsProcessorContext):
        self._settings = settings
        self._courses: OrderedDict[str, Course] = OrderedDict()

    def state(self, row: SampledRow, params: BaseModel | None) -> Course | None:
        if row.params.greedy or (params is None and not self._settings.always):
            return None
        own = params if isinstance(params, MirostatParams) else MirostatParams()
        tau = self._settings.tau if own.tau is None else own.tau
        eta = self._settings.eta if own.eta is None else own.eta
        course = self._courses.pop(row.request_id, None)
        known = course is not None and row.position > 0 and (course.tau, course.eta) == (tau, eta)
        made = course if course is not None and known else Course(tau, eta)
        self._courses[row.request_id] = made
        if len(self._courses) > MAX_COURSES:
            self._courses.popitem(last=False)
        return made

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow], states: Sequence[Course]) -> None:
        """Row by row: what a row is left with, a draft of the next one may be taken from."""
        for index, (row, course) in enumerate(zip(rows, states, strict=True)):
            if row.position > len(row.output_token_ids) + len(row.draft_token_ids):
                continue
            course.advance(row.output_token_ids)
            course.left[row.position] = _leave(logits[index], row.params.temperature, course.bound(row))


def _leave(logits: torch.Tensor, temperature: float, bound: float) -> Left:
    """`logits` [V] in place. A token that a grammar forces surprises nobody: nothing is known of that position."""
    if int(torch.isfinite(logits).sum()) == 1:
        return Left(np.empty(0, np.int64), np.empty(0, np.float32))
    best = logits.max()
    logs = ((logits - best) / max(temperature, 1e-5)).log_softmax(-1)
    bits = logs / -math.log(2.0)
    out = (bits > bound) & (logits < best)
    logits.masked_fill_(out, float("-inf"))
    token_ids = torch.nonzero(~out).flatten()
    among = bits[token_ids].cpu().numpy()
    share = float(np.exp2(-among.astype(np.float64)).sum())
    return Left(token_ids.cpu().numpy(), among + np.float32(math.log2(share)))
