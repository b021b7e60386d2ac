"""Sampler `standard`: every sampling parameter of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.batch import SampledRow, SamplerOutput, SamplingMetadata, TokenLogprobs
from core.request import SamplingParams
from core.stages.sampler import SamplerContext
from plugins.samplers.candidates import block_maxima
from plugins.samplers.columns import Columns, build_columns
from plugins.samplers.logprobs import BAD_LOGITS, Logprobs, Target
from plugins.samplers.penalties import Penalties, has_penalties
from plugins.samplers.selection import select_tokens, take_rows
from plugins.samplers.settings import StandardSettings
from plugins.samplers.verify import AcceptedRows, bad_rows, blank_index, keep_accepted, sampled_logits


@dataclass(frozen=True, slots=True)
class RawRows:
    """The model's logits of the rows that want log-probabilities: `where` gives the index of a sampled row."""

    logits: torch.Tensor
    where: Mapping[int, int]


class Standard:
    """One step, in this order (R7.1), each part only for the rows that ask for it:

    1. logits as float32; padding rows of the vocabulary masked; log-probabilities are of the logits before this;
    2. allowed token ids, logit bias, min_tokens (EOS and stop_token_ids masked, EOS not with ignore_eos), bad words;
    3. penalties: repetition over prompt and output, frequency and presence over the output;
    4. greedy rows: argmax, the lowest id among equals;
    5. random rows: temperature, then min-p, top-k and top-p, then one draw by (seed, choice, position);
    6. drafts are accepted while they equal what was drawn; log-probabilities of the tokens that count.

    A row's result is bitwise the same in any batch. A row without a finite largest logit becomes an error of its
    request. While ids are in flight (position beyond the known output) penalties use what is known and bad words of
    several tokens match nothing; `needs_history` names the requests for which that matters.
    """

    Settings = StandardSettings

    def __init__(self, settings: StandardSettings, context: SamplerContext):
        model = context.model
        self._first_candidates = settings.first_candidates
        self._chunk_floats = settings.chunk_mib * 2**18
        self._device = context.device
        self._vocab_size = model.vocab_size
        self._eos = model.eos_token_ids
        self._blank = blank_index(model.unusable_token_ids, model.vocab_size, context.device)
        self._logprobs = Logprobs(model.unusable_token_ids, self._blank, self._chunk_floats)
        self._penalties = Penalties(model.vocab_size)
        self._columns: Columns | None = None

    @staticmethod
    def needs_history(params: SamplingParams) -> bool:
        """Whether a draw depends on the ids before it, so that overlapped steps would change the result."""
        return has_penalties(params) or any(len(word) > 1 for word in params.bad_words_token_ids)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        # before anything is edited: a sampled row may be a view of these logits
        prompt, errors = self._logprobs.of_prompt(logits, metadata.prompt_rows)
        sampled = self._sample_rows(logits, metadata) if metadata.rows else SamplerOutput({})
        errors = {**sampled.errors, **errors}
        return SamplerOutput(
            token_ids={name: ids for name, ids in sampled.token_ids.items() if name not in errors},
            logprobs={name: found for name, found in sampled.logprobs.items() if name not in errors},
            prompt_logprobs={name: found for name, found in prompt.items() if name not in errors},
            errors=errors,
        )

    def forget(self, request_ids: Sequence[str]) -> None:
        self._penalties.forget(request_ids)

    def _sample_rows(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        rows = sampled_logits(logits, metadata.sampled_rows)
        columns = self._columns_of(metadata.rows)
        raw = self._raw_rows(rows, columns)
        bad = self._edit(rows, metadata.rows, columns)
        maxima = block_maxima(rows)
        bad = {**bad_rows(maxima.amax(-1), "with these sampling parameters"), **bad}
        drawn = select_tokens(rows, maxima, metadata.rows, columns, bad, self._chunk_floats)
        kept = keep_accepted(metadata.rows, drawn, bad)
        token_ids = {name: tuple(drawn[row] for row in part) for name, part in kept.rows.items()}
        logprobs, errors = self._sampled_logprobs(raw, columns, kept, drawn)
        return SamplerOutput(token_ids, logprobs, errors={**kept.errors, **errors})

    def _columns_of(self, rows: Sequence[SampledRow]) -> Columns:
        if self._columns is None or not self._columns.fits(rows):
            self._columns = build_columns(rows, self._eos, self._vocab_size, self._first_candidates, self._device)
        return self._columns

    def _raw_rows(self, rows: torch.Tensor, columns: Columns) -> RawRows:
        """A copy where these rows are about to be edited, else `rows` itself."""
        wanted = columns.with_logprobs
        if not wanted or (self._blank is None and not set(wanted).intersection(columns.edited)):
            return RawRows(rows, {row: row for row in wanted})
        index = torch.tensor(wanted, device=rows.device)
        return RawRows(rows[index], {row: at for at, row in enumerate(wanted)})

    def _edit(self, logits: torch.Tensor, rows: Sequence[SampledRow], columns: Columns) -> dict[int, str]:
        """Masks and penalties in place. Bad logits are looked for first, where a mask cannot hide them."""
        if self._blank is not None:
            logits[:, self._blank] = float("-inf")
        if not columns.edited:
            return {}
        found = bad_rows(take_rows(logits, np.array(columns.edited)).amax(-1), "at this position")
        columns.masks.apply(logits, rows)
        if columns.penalised:
            self._penalties.apply(logits, rows, columns.penalised)
        return {columns.edited[index]: reason for index, reason in found.items()}

    def _sampled_logprobs(
        self, raw: RawRows, columns: Columns, kept: AcceptedRows, drawn: Sequence[int]
    ) -> tuple[dict[str, tuple[TokenLogprobs, ...]], dict[str, str]]:
        """(results, errors) by request id, for the tokens that count."""
        names = [(name, row) for name, part in kept.rows.items() for row in part if row in raw.where]
        targets = [Target(raw.where[row], drawn[row], columns.params[row].logprobs or 0) for _, row in names]
        found: dict[str, tuple[TokenLogprobs, ...]] = {}
        errors: dict[str, str] = {}
        for (name, _), result in zip(names, self._logprobs.of_targets(raw.logits, targets), strict=True):
            if result is None:
                errors[name] = BAD_LOGITS
            else:
                found[name] = (*found.get(name, ()), result)
        return found, errors
