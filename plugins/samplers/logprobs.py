"""Log-probabilities of the model's own distribution: log_softmax of the float32 logits before any parameter.

Always finite: -inf (and anything below) is given as `LOWEST`, since JSON has no infinity. Ranks and alternatives are
ordered by logit, ties by id, and never name an unusable id (a padding row of the vocabulary); its share stays in the
softmax, as in the model. Rows are worked on in chunks: a [R, V] copy never exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from core.batch import PromptRows, TokenLogprobs
from plugins.samplers.candidates import block_maxima, top_candidates

LOWEST = -9999.0
BAD_LOGITS = "the model's logits hold NaN or infinity; no log-probability can be given"


@dataclass(frozen=True, slots=True)
class Target:
    """A row of logits, the token whose log-probability is asked, and how many alternatives."""

    row: int
    token_id: int
    num_top: int


class Logprobs:
    def __init__(self, unusable: frozenset[int], blank: slice | torch.Tensor | None, chunk_floats: int):
        """`blank` indexes the columns of `unusable`; `chunk_floats` bounds one temporary."""
        self._unusable = unusable
        self._blank = blank
        self._chunk_floats = chunk_floats

    def of_targets(self, logits: torch.Tensor, targets: Sequence[Target]) -> list[TokenLogprobs | None]:
        """One result per target, in order; None where the row is NaN, +inf or all -inf. `logits` [R, V] is only read."""
        size = max(1, self._chunk_floats // logits.shape[1])
        chunks = (targets[start : start + size] for start in range(0, len(targets), size))
        return [result for chunk in chunks for result in self._chunk(logits, chunk)]

    def of_prompt(
        self, logits: torch.Tensor, prompt_rows: Sequence[PromptRows]
    ) -> tuple[dict[str, tuple[TokenLogprobs, ...]], dict[str, str]]:
        """(results, errors) by request id."""
        found: dict[str, tuple[TokenLogprobs, ...]] = {}
        errors: dict[str, str] = {}
        for part in prompt_rows:
            pairs = zip(part.rows, part.target_ids, strict=True)
            results = self.of_targets(logits, [Target(row, token_id, part.num_logprobs) for row, token_id in pairs])
            good = tuple(result for result in results if result is not None)
            if len(good) < len(results):
                errors[part.request_id] = f"prompt position: {BAD_LOGITS}"
            else:
                found[part.request_id] = found.get(part.request_id, ()) + good
        return found, errors

    def _chunk(self, logits: torch.Tensor, targets: Sequence[Target]) -> Iterator[TokenLogprobs | None]:
        rows = logits[torch.tensor([t.row for t in targets], device=logits.device)].float()
        width = rows.shape[1]
        token_ids = torch.tensor([min(max(t.token_id, 0), width - 1) for t in targets], device=rows.device).unsqueeze(1)
        logprobs = rows.log_softmax(-1)
        peaks = logprobs.amax(-1).tolist()  # NaN exactly where the row has no distribution
        own = _finite(logprobs.gather(1, token_ids)).squeeze(1).tolist()
        chosen = rows.gather(1, token_ids)
        if self._blank is not None:
            rows[:, self._blank] = float("-inf")
        ranks = ((rows > chosen).sum(-1, dtype=torch.int32) + 1).tolist()
        tops = self._alternatives(rows, logprobs, max(t.num_top for t in targets))
        for target, peak, logprob, rank, top in zip(targets, peaks, own, ranks, tops, strict=True):
            valid = peak == peak
            yield TokenLogprobs(target.token_id, logprob, rank, top[: target.num_top]) if valid else None

    def _alternatives(self, rows: torch.Tensor, logprobs: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
        if count <= 0:
            return [[] for _ in range(rows.shape[0])]
        ids = top_candidates(rows, block_maxima(rows), count).ids.clamp(0, rows.shape[1] - 1)
        values = _finite(logprobs.gather(1, ids)).tolist()
        pairs = (zip(row, best, strict=True) for row, best in zip(ids.tolist(), values, strict=True))
        return [[(token_id, value) for token_id, value in row if token_id not in self._unusable] for row in pairs]


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.nan_to_num(nan=LOWEST, posinf=0.0).clamp(min=LOWEST)
