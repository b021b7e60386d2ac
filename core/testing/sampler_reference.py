"""The slow twin of stage 7: one row at a time, numpy, every rule spelled out. Tests compare samplers with it.

Masks and penalties are float32 like the logits they change (so that ties are the same ties); distributions are float64
over the fully sorted vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from core.batch import SampledRow, SamplerOutput, SamplingMetadata, TokenLogprobs
from core.model.spec import ModelFiles, ModelSpec

Row = NDArray[np.float32]
Distribution = NDArray[np.float64]
NEVER = np.float32("-inf")
LOWEST_LOGPROB = -9999.0
TOP_P_SLACK = MIN_P_SLACK = 1e-6
CHECKED_TOP_P = 0.5
"""With top-p alone, this large or larger, a row's token is the first of `NUM_CHECKED` draws from the whole that lies in the
nucleus; where none does, it is drawn from the nucleus."""
NUM_CHECKED = 4


def spec_of(vocab_size: int, eos: frozenset[int] = frozenset(), unusable: frozenset[int] = frozenset()) -> ModelSpec:
    """A model record with nothing on disk."""
    return ModelSpec(
        name="reference",
        files=ModelFiles("hf", Path("."), "reference"),
        config={},
        vocab_size=vocab_size,
        max_model_len=4096,
        eos_token_ids=eos,
        unusable_token_ids=unusable,
    )


class ReferenceSampler:
    """`uniform` gives the number in (0, 1) of (seed, choice, position, attempt); a sampler under test brings its own."""

    def __init__(self, model: ModelSpec, uniform: Callable[[int, int, int, int], float] = lambda *_: 0.5):
        self._model = model
        self._uniform = uniform

    def sample(self, logits: ArrayLike, metadata: SamplingMetadata) -> SamplerOutput:
        """`logits` [R, V]. Same meaning as `Sampler.sample`; changes nothing."""
        matrix = np.array(logits, dtype=np.float32)
        token_ids: dict[str, tuple[int, ...]] = {}
        logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        errors: dict[str, str] = {}
        for index, row in zip(metadata.sampled_rows, metadata.rows, strict=True):
            before = token_ids.get(row.request_id, ())
            if row.request_id in errors or before != row.draft_token_ids:
                continue
            if self.is_bad(matrix[index], row):
                errors[row.request_id] = "bad logits"
                continue
            token_ids[row.request_id] = (*before, self.draw(matrix[index], row))
            if row.params.logprobs is not None:
                found = self.logprobs(matrix[index], token_ids[row.request_id][-1], row.params.logprobs)
                logprobs[row.request_id] = (*logprobs.get(row.request_id, ()), found)
        prompt = {
            part.request_id: tuple(
                self.logprobs(matrix[row], target, part.num_logprobs)
                for row, target in zip(part.rows, part.target_ids, strict=True)
            )
            for part in metadata.prompt_rows
        }
        good = {name: ids for name, ids in token_ids.items() if name not in errors}
        return SamplerOutput(good, {name: logprobs[name] for name in good if name in logprobs}, prompt, errors)

    def is_bad(self, logits: Row, row: SampledRow) -> bool:
        peaks = [np.max(self._usable(logits)), np.max(self.edited(logits, row))]
        return not np.isfinite(peaks).all()

    def edited(self, logits: Row, row: SampledRow) -> Row:
        """[V] after masks, bias and penalties."""
        values = self._usable(logits)
        self._mask(values, row)
        self._penalise(values, row)
        return values

    def distribution(self, logits: Row, row: SampledRow, top_p_shift: float = 0.0) -> Distribution:
        """[V] probabilities from which the row's token is drawn."""
        values = self.edited(logits, row)
        order = _best_first(values)
        if row.params.greedy:
            certain: Distribution = np.eye(len(values))[order[0]]
            return certain
        p = row.params
        ranked = values[order].astype(np.float64)
        weights = np.exp((ranked - ranked[0]) / p.temperature)
        weights[weights < p.min_p * (1.0 - MIN_P_SLACK) * weights[0]] = 0.0
        if p.top_k > 0:
            weights[p.top_k :] = 0.0
        if p.top_p < 1.0:
            before = weights.cumsum() - weights
            goal = (p.top_p - TOP_P_SLACK + top_p_shift) * weights.sum()
            weights[1:][before[1:] >= goal] = 0.0
        probabilities = np.zeros(len(values))
        probabilities[order] = weights / weights.sum()
        return probabilities

    def draw(self, logits: Row, row: SampledRow) -> int:
        return min(self.acceptable(logits, row, tolerance=0.0))

    def acceptable(self, logits: Row, row: SampledRow, tolerance: float = 5e-6) -> set[int]:
        """Ids that a draw may give when its sums are off by `tolerance`; one id where no border is near.

        Inverse distribution function in order of ids, over what min-p, top-k and top-p leave.
        """
        shifts = (0.0, -tolerance, tolerance)
        kept = [self.distribution(logits, row, shift) for shift in shifts]
        checked = NUM_CHECKED if self._is_checked(row) else 0
        found: set[int] = set()
        for attempt in range(checked):
            near = self._near(self._whole(logits, row), self._number(row, attempt), tolerance)
            found |= {i for i in near if any(probabilities[i] > 0 for probabilities in kept)}
            if all(probabilities[i] > 0 for i in near for probabilities in kept):
                return found
        number = self._number(row, checked)
        return found.union(*(self._near(probabilities, number, tolerance) for probabilities in kept))

    def _near(self, probabilities: Distribution, number: float, tolerance: float) -> set[int]:
        upper = probabilities.cumsum()
        lower = upper - probabilities
        near = (probabilities > 0) & (lower <= number + tolerance) & (upper > number - tolerance)
        return set(np.flatnonzero(near).tolist()) or {int(np.flatnonzero(probabilities)[-1])}

    def _number(self, row: SampledRow, attempt: int) -> float:
        return self._uniform(row.seed, row.choice, row.position, attempt)

    def _whole(self, logits: Row, row: SampledRow) -> Distribution:
        """By temperature alone."""
        values = self.edited(logits, row).astype(np.float64)
        weights = np.exp((values - values.max()) / row.params.temperature)
        whole: Distribution = weights / weights.sum()
        return whole

    def logprobs(self, logits: Row, token_id: int, num_top: int) -> TokenLogprobs:
        """Of the model's own distribution, before any parameter; ranks and alternatives among usable ids."""
        wide = logits.astype(np.float64)
        peak = wide.max()
        values = np.maximum(wide - peak - np.log(np.exp(wide - peak).sum()), LOWEST_LOGPROB)
        usable = self._usable(logits)
        rank = 1 + int((usable > logits[token_id]).sum())
        best = [int(i) for i in _best_first(usable)[:num_top] if int(i) not in self._model.unusable_token_ids]
        return TokenLogprobs(token_id, float(values[token_id]), rank, [(i, float(values[i])) for i in best])

    def _usable(self, logits: Row) -> Row:
        values = logits.astype(np.float32, copy=True)
        values[sorted(self._model.unusable_token_ids)] = NEVER
        return values

    def _is_checked(self, row: SampledRow) -> bool:
        p = row.params
        alone = p.min_p == 0.0 and not 0 < p.top_k < self._model.vocab_size
        return not p.greedy and alone and CHECKED_TOP_P <= p.top_p < 1.0

    def _mask(self, values: Row, row: SampledRow) -> None:
        p = row.params
        if p.allowed_token_ids is not None:
            values[[i for i in range(len(values)) if i not in p.allowed_token_ids]] = NEVER
        for token_id, bias in p.logit_bias.items():
            values[token_id] += np.float32(bias)
        if row.position < p.min_tokens:
            values[sorted({*p.stop_token_ids, *(() if p.ignore_eos else self._model.eos_token_ids)})] = NEVER
        history = [*row.output_token_ids, *row.draft_token_ids]
        in_flight = row.position > len(history)
        for word in p.bad_words_token_ids:
            start = len(history) - len(word) + 1
            follows = start >= 0 and history[start:] == list(word[:-1]) and not in_flight
            if len(word) == 1 or follows:
                values[word[-1]] = NEVER

    def _penalise(self, values: Row, row: SampledRow) -> None:
        p = row.params
        history = [*row.output_token_ids, *row.draft_token_ids]
        for token_id in {i for i in (*row.prompt_token_ids, *history) if 0 <= i < len(values)}:
            value, repetition = values[token_id], np.float32(p.repetition_penalty)
            value = value / repetition if value > 0 else value * repetition
            count = history.count(token_id)
            value = value - np.float32(p.frequency_penalty) * np.float32(count)
            values[token_id] = value - np.float32(p.presence_penalty) * np.float32(count > 0)


def _best_first(values: Row) -> NDArray[np.int64]:
    """Ids by value, larger first, the lower id among equals."""
    return np.argsort(-values, kind="stable")
