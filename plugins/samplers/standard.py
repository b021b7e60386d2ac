"""Sampler `standard`: every sampling parameter of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from core.batch import SampledRow, SamplerOutput, SamplingMetadata, TokenLogprobs
from core.request import SamplingParams
from core.stages.sampler import SamplerContext
from plugins.samplers.bad_rows import After, BadRows, bad_peaks
from plugins.samplers.candidates import block_maxima
from plugins.samplers.columns import Columns, build_columns
from plugins.samplers.logprobs import BAD_LOGITS, Logprobs, Target
from plugins.samplers.narrowing import Concerned, Narrowing
from plugins.samplers.penalties import Penalties, has_penalties
from plugins.samplers.selection import Selection
from plugins.samplers.settings import StandardSettings
from plugins.samplers.verify import AcceptedRows, blank_index, keep_accepted, mask_blank, sampled_logits, with_following


@dataclass(frozen=True, slots=True)
class RawRows:
    """The model's logits of the rows that want log-probabilities: `where` gives the index of a sampled row."""

    logits: torch.Tensor
    where: Mapping[int, int]


class Standard:
    """One step, in this order (R7.1), each part only for the rows that ask for it:

    1. logits as float32; padding rows of the vocabulary masked; log-probabilities are of the logits before this;
    2. what the grammar of a request bars, then logits processors: they choose among what may come;
    3. allowed token ids, logit bias, bad words;
    4. penalties: repetition over prompt and output, frequency and presence over the output;
    5. greedy rows: argmax, the lowest id among equals;
    6. random rows: temperature, then min-p, top-k and top-p, then a draw by (seed, choice, position) in order of ids;
    7. drafts are accepted while they equal what was drawn; log-probabilities of the tokens that count.

    A row's result is bitwise the same in any batch. A row without a finite largest logit becomes an error of its
    request. While ids are in flight (position beyond the known output) penalties use what is known and bad words of
    several tokens match nothing; `needs_history` names the requests for which that matters.
    """

    Settings = StandardSettings

    def __init__(self, settings: StandardSettings, context: SamplerContext):
        model = context.model
        self._chunk_floats = settings.chunk_mib * 2**18
        self._device = context.device
        self._vocab_size = model.vocab_size
        self._processors = context.processors
        self._grammar = context.grammar
        self._blank = blank_index(model.unusable_token_ids, model.vocab_size, context.device)
        self._narrowing = Narrowing(context, self._blank)
        self._logprobs = Logprobs(model.unusable_token_ids, self._blank, self._chunk_floats)
        self._selection = Selection(settings.first_candidates, self._chunk_floats, context.device)
        self._penalties = Penalties(model.vocab_size)
        self._columns: Columns | None = None

    @staticmethod
    def needs_history(params: SamplingParams) -> bool:
        """Whether a draw depends on the ids before it, so that overlapped steps would change the result."""
        phrases = any(len(word) > 1 for word in params.bad_words_token_ids)
        return phrases or has_penalties(params) or params.grammar is not None

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

    def takes_argmax(self, metadata: SamplingMetadata) -> bool:
        return self._narrowing.leaves_argmax(metadata) and self._columns_of(metadata.rows).is_argmax

    def forget(self, request_ids: Sequence[str]) -> None:
        self._penalties.forget(request_ids)

    def _sample_rows(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        rows = sampled_logits(logits, metadata.sampled_rows)
        columns = self._columns_of(metadata.rows)
        which = self._narrowing.concerned(metadata.rows)
        raw = self._raw_rows(rows, columns, (*which.touched, *which.constrained))
        bad = self._edit(rows, metadata.rows, columns, which)
        maxima = block_maxima(rows)
        peaks = bad_peaks(maxima.amax(-1))
        bad.add(peaks, After.PROCESSORS, only=set(which.touched).difference(columns.edited))
        bad.add(peaks, After.GRAMMAR, only=set(which.constrained).difference(columns.edited))
        bad.add(peaks, After.MASKS)
        drawn = self._selection.select(rows, maxima, metadata.rows, columns, bad)
        kept = keep_accepted(metadata.rows, drawn, bad)
        token_ids = {name: tuple(drawn[row] for row in part) for name, part in kept.rows.items()}
        logprobs, errors = self._sampled_logprobs(raw, columns, kept, drawn)
        if which.constrained:
            token_ids = with_following(token_ids, kept, metadata.rows, self._grammar)
        return SamplerOutput(
            token_ids, logprobs, errors={**bad.errors(kept, metadata.rows, self._processors), **errors}
        )

    def _columns_of(self, rows: Sequence[SampledRow]) -> Columns:
        if self._columns is None or not self._columns.fits(rows):
            self._columns = build_columns(rows, self._vocab_size, self._device)
        return self._columns

    def _raw_rows(self, rows: torch.Tensor, columns: Columns, touched: Sequence[int]) -> RawRows:
        """A copy where these rows are about to be edited, else `rows` itself."""
        wanted = columns.with_logprobs
        if not wanted or (self._blank is None and set(wanted).isdisjoint((*columns.edited, *touched))):
            return RawRows(rows, {row: row for row in wanted})
        index = torch.tensor(wanted, device=rows.device)
        return RawRows(rows[index], {row: at for at, row in enumerate(wanted)})

    def _edit(self, logits: torch.Tensor, rows: Sequence[SampledRow], columns: Columns, which: Concerned) -> BadRows:
        """Grammars, processors, masks and penalties in place."""
        mask_blank(logits, self._blank)
        bad = self._narrowing.apply(logits, rows, which, columns.edited)
        columns.masks.apply(logits, rows)
        if columns.penalised:
            self._penalties.apply(logits, rows, columns.penalised)
        return bad

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
