"""From the scheduler's plan to tensors: numpy arrays, built whole-batch at a time, handed over as CPU tensors.

Per token Python work is avoided: a step of N decodes costs N short loops and a few array operations. Block tables are
kept between steps in one buffer and only their new entries are written (R11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from core.batch import ModelBatch, PromptRows, SampledRow, SamplingMetadata, ScheduledRequest, SchedulerOutput
from core.block_tables import BlockTableRows, GroupTableRows, Int32Array

Int64Array = npt.NDArray[np.int64]


class BatchBuilder:
    """Turns each step's `SchedulerOutput` into a `ModelBatch`. Call once per step, before the next `schedule`.

    Requests of a batch are in another order than those of the plan. Its `block_table` is memory of the builder, which is written
    again `num_in_flight` + 1 steps later.
    """

    def __init__(self, block_size: int, max_model_len: int, num_groups: int = 1, num_in_flight: int = 2):
        """`num_groups`: of layers with block tables of their own. `num_in_flight`: batches that wait while one is built."""
        self._block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self._tables: Iterator[BlockTableRows] = cycle(
            [
                BlockTableRows(max_blocks) if num_groups == 1 else GroupTableRows(max_blocks, num_groups)
                for _ in range(num_in_flight + 1)
            ]
        )

    def build(self, output: SchedulerOutput) -> ModelBatch:
        """Shapes as in `ModelBatch`. A step in which nothing samples has R = 0 logits rows.

        A request preempted and computed again gets its prompt rows again, with equal targets.
        """
        rows_of_tables, requests = next(self._tables), [part.request for part in output.scheduled]
        indices, table = rows_of_tables.gather(requests)
        group_tables = None
        if isinstance(rows_of_tables, GroupTableRows):
            group_tables = rows_of_tables.gather_groups(requests, table.shape[1])
        parts = _in_order(output.scheduled, indices)
        axes = _axes_of_decodes(parts) or _axes_of(parts)
        slots = self._slots_of_decodes(parts) if axes.only_decodes else self._slots(table, axes)
        rows = _Rows.of(parts, axes.query_start_loc.tolist())
        return ModelBatch(
            step=output.step,
            input_ids=torch.from_numpy(axes.input_ids),
            positions=torch.from_numpy(axes.positions),
            query_start_loc=torch.from_numpy(axes.query_start_loc),
            seq_lens=torch.from_numpy(axes.seq_lens),
            block_table=torch.from_numpy(table),
            slot_mapping=torch.from_numpy(slots),
            logits_indices=torch.from_numpy(np.array(rows.logits_indices, dtype=np.int64)),
            sampling=SamplingMetadata(tuple(rows.sampled_rows), tuple(rows.rows), tuple(rows.prompt_rows)),
            request_ids=tuple([part.request.request_id for part in parts]),
            num_prefill_tokens=sum([p.num_tokens for p in parts if p.start < len(p.request.prompt_token_ids)]),
            token_sources=_token_sources(parts, axes),
            group_block_tables=None if group_tables is None else torch.from_numpy(group_tables),
            group_slot_mappings=None if group_tables is None else torch.from_numpy(self._slots(group_tables, axes)),
        )

    def _slots(self, tables: Int32Array, axes: _Axes) -> Int64Array:
        """[…, T] of block tables […, N, B]."""
        blocks, offsets = np.divmod(axes.positions, self._block_size)
        slots = tables[..., axes.owners, blocks].astype(np.int64)
        slots *= self._block_size
        slots += offsets
        return slots

    def _slots_of_decodes(self, parts: Sequence[ScheduledRequest]) -> Int64Array:
        """The same, of the requests' own tables: so few numbers are made faster without arrays."""
        size = self._block_size
        slots = [part.request.block_table[part.start // size] * size + part.start % size for part in parts]
        return np.array(slots, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Axes:
    """Of N requests and their T tokens. `owners` [T]: whose each is."""

    input_ids: Int64Array  # [T]
    positions: Int64Array  # [T]
    query_start_loc: Int32Array  # [N + 1]
    seq_lens: Int32Array  # [N]
    owners: Int64Array
    only_decodes: bool = False  # of one known token each


def _axes_of_decodes(parts: Sequence[ScheduledRequest]) -> _Axes | None:
    """What `_axes_of` returns, faster, where every part is a decode of one known token: nearly every step."""
    ids, starts = [], []
    for part in parts:
        output, at = part.request.output_token_ids, part.start - len(part.request.prompt_token_ids)
        if part.num_tokens != 1 or part.num_drafts or not 0 <= at < len(output) or output[at] < 0:
            return None
        ids.append(output[at])
        starts.append(part.start)
    both, count = np.array((ids, starts), dtype=np.int64), len(parts)
    seq_lens = (both[1] + 1).astype(np.int32)
    return _Axes(both[0], both[1], np.arange(count + 1, dtype=np.int32), seq_lens, np.arange(count), True)


def _axes_of(parts: Sequence[ScheduledRequest]) -> _Axes:
    counts = np.array([part.num_tokens for part in parts], dtype=np.int64)
    starts = np.array([part.start for part in parts], dtype=np.int64)
    query_start_loc = np.zeros(len(parts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    positions = np.arange(query_start_loc[-1], dtype=np.int64)
    positions += np.repeat(starts - query_start_loc[:-1], counts)
    owners = np.repeat(np.arange(len(parts)), counts)
    return _Axes(_input_ids(parts), positions, query_start_loc, (starts + counts).astype(np.int32), owners)


def _in_order(parts: Sequence[ScheduledRequest], indices: Sequence[int]) -> list[ScheduledRequest]:
    """By row of the block table."""
    ordered = list(parts)
    for index, part in zip(indices, parts, strict=True):
        ordered[index] = part
    return ordered


def _input_ids(parts: Sequence[ScheduledRequest]) -> Int64Array:
    ids: list[int] = []
    for part in parts:
        request, end = part.request, part.start + part.num_tokens - part.num_drafts
        output_index = part.start - len(request.prompt_token_ids)
        if end - part.start == 1 and 0 <= output_index < len(request.output_token_ids):
            ids.append(request.output_token_ids[output_index])  # a decode: no slices
        else:
            ids += request.token_ids(part.start, end)
        if part.num_drafts:
            ids += request.draft_token_ids[: part.num_drafts]
    return np.array(ids, dtype=np.int64)


def _token_sources(parts: Sequence[ScheduledRequest], axes: _Axes) -> dict[int, str]:
    if axes.only_decodes:
        return {}
    in_flight = np.flatnonzero(axes.input_ids < 0)
    owners = axes.owners[in_flight]
    return {
        index: parts[owner].request.request_id for index, owner in zip(in_flight.tolist(), owners.tolist(), strict=True)
    }


@dataclass(slots=True)
class _Rows:
    """Logits rows in order of the T axis, so that a request's prompt rows and sampled rows stay together."""

    logits_indices: list[int] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    rows: list[SampledRow] = field(default_factory=list)
    prompt_rows: list[PromptRows] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Sequence[ScheduledRequest], query_start_loc: Sequence[int]) -> _Rows:
        made = cls()
        if not any(
            not part.samples or part.num_drafts or part.request.params.prompt_logprobs is not None for part in parts
        ):
            made.logits_indices = [after - 1 for after in query_start_loc[1:]]
            made.sampled_rows = list(range(len(parts)))
            made.rows = [_sampled_row(part) for part in parts]  # nearly always
            return made
        for part, first, after in zip(parts, query_start_loc, query_start_loc[1:], strict=False):
            if part.request.params.prompt_logprobs is not None:
                made._add_prompt_rows(part, first, part.request.params.prompt_logprobs)
            if part.samples:
                made._add_sampled_rows(part, after)
        return made

    def _add_prompt_rows(self, part: ScheduledRequest, first: int, num_logprobs: int) -> None:
        """Position p predicts prompt token p + 1; the last prompt position predicts output and is a sampled row."""
        prompt = part.request.prompt_token_ids
        end = min(part.start + part.num_tokens, len(prompt) - 1)
        if end <= part.start:
            return
        row = len(self.logits_indices)
        count = end - part.start
        self.logits_indices.extend(range(first, first + count))
        targets = tuple(prompt[part.start + 1 : end + 1])
        self.prompt_rows.append(
            PromptRows(part.request.request_id, tuple(range(row, row + count)), targets, num_logprobs)
        )

    def _add_sampled_rows(self, part: ScheduledRequest, after: int) -> None:
        """The last known token's row, and one row per draft: row j is drawn as if the first j drafts were right."""
        request = part.request
        drafts = tuple(request.draft_token_ids[: part.num_drafts])
        position = part.start + part.num_tokens - part.num_drafts - len(request.prompt_token_ids)
        for index in range(part.num_drafts + 1):
            self.sampled_rows.append(len(self.logits_indices))
            self.logits_indices.append(after - 1 - part.num_drafts + index)
            self.rows.append(
                SampledRow(
                    request.request_id,
                    request.params,
                    request.seed,
                    request.choice,
                    position + index,
                    request.prompt_token_ids,
                    request.output_token_ids,
                    drafts[:index],
                )
            )


def _sampled_row(part: ScheduledRequest) -> SampledRow:
    request = part.request
    prompt = request.prompt_token_ids
    position = part.start + part.num_tokens - len(prompt)
    params, output = request.params, request.output_token_ids
    return SampledRow(request.request_id, params, request.seed, request.choice, position, prompt, output)
