"""Sampler `greedy`: the most probable token and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.batch import SamplerOutput, SamplingMetadata
from core.stages.sampler import SamplerContext
from plugins.samplers.bad_rows import After, bad_peaks
from plugins.samplers.candidates import block_maxima, first_maximum
from plugins.samplers.narrowing import Narrowing
from plugins.samplers.settings import GreedySettings
from plugins.samplers.verify import NO_TOKEN, blank_index, keep_accepted, mask_blank, sampled_logits, with_following


class Greedy:
    """Argmax of every row, the lowest id among equals, after grammars and logits processors; speculation is verified, nothing is
    kept between steps.

    It provides no sampling parameter: a request that asks for one is refused.
    A seed needs no support, since the answer is the same without it.
    """

    Settings = GreedySettings

    def __init__(self, settings: GreedySettings, context: SamplerContext):
        self._blank = blank_index(context.model.unusable_token_ids, context.model.vocab_size, context.device)
        self._processors = context.processors
        self._grammar = context.grammar
        self._narrowing = Narrowing(context, self._blank)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        if not metadata.rows:
            return SamplerOutput({})
        rows = sampled_logits(logits, metadata.sampled_rows)
        mask_blank(rows, self._blank)
        which = self._narrowing.concerned(metadata.rows)
        bad = self._narrowing.apply(rows, metadata.rows, which)
        maxima = block_maxima(rows)
        peaks = bad_peaks(maxima.amax(-1))
        bad.add(peaks, After.PROCESSORS, only=which.touched)
        bad.add(peaks, After.GRAMMAR, only=which.constrained)
        bad.add(peaks, After.MODEL)
        token_ids = first_maximum(rows, maxima).tolist()
        for row in bad:
            token_ids[row] = NO_TOKEN
        kept = keep_accepted(metadata.rows, token_ids, bad)
        chosen = {request_id: tuple(token_ids[row] for row in rows) for request_id, rows in kept.rows.items()}
        if which.constrained:
            chosen = with_following(chosen, kept, metadata.rows, self._grammar)
        return SamplerOutput(chosen, errors=bad.errors(kept, metadata.rows, self._processors))

    def takes_argmax(self, metadata: SamplingMetadata) -> bool:
        return self._narrowing.leaves_argmax(metadata)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept here."""
