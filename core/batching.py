"""From the scheduler's plan to tensors: numpy arrays, built whole-batch at a time, handed over as CPU tensors.

Per token Python work is avoided: a step of N decodes costs N short loops and a few array operations. Block tables are
kept between steps in one buffer and only their new entries are written (R11).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from core.batch import ModelBatch, PromptRows, SampledRow, SamplingMetadata, ScheduledRequest, SchedulerOutput
from core.request import Request

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class BatchBuilder:
    """Turns each step's `SchedulerOutput` into a `ModelBatch`. Call once per step, before the next `schedule`."""

    def __init__(self, block_size: int, max_model_len: int):
        self._block_size = block_size
        self._tables = BlockTableRows(max_blocks=-(-max_model_len // block_size))

    def build(self, output: SchedulerOutput) -> ModelBatch:
        """Shapes as in `ModelBatch`. A step in which nothing samples has R = 0 logits rows.

        A request preempted and computed again gets its prompt rows again, with equal targets.
        """
        parts = output.scheduled
        counts = np.array([part.num_tokens for part in parts], dtype=np.int64)
        starts = np.array([part.start for part in parts], dtype=np.int64)
        query_start_loc = np.zeros(len(parts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        positions = np.arange(query_start_loc[-1], dtype=np.int64)
        positions += np.repeat(starts - query_start_loc[:-1], counts)
        table = self._tables.gather([part.request for part in parts])
        input_ids = _input_ids(parts)
        rows = _Rows.of(parts, query_start_loc.tolist())
        return ModelBatch(
            step=output.step,
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy((starts + counts).astype(np.int32)),
            block_table=torch.from_numpy(table),
            slot_mapping=torch.from_numpy(self._slots(table, positions, counts)),
            logits_indices=torch.tensor(rows.logits_indices, dtype=torch.int64),
            sampling=SamplingMetadata(tuple(rows.sampled_rows), tuple(rows.rows), tuple(rows.prompt_rows)),
            request_ids=tuple([part.request.request_id for part in parts]),
            num_prefill_tokens=sum(p.num_tokens for p in parts if p.start < p.request.num_prompt_tokens),
            token_sources=_token_sources(parts, input_ids, query_start_loc),
        )

    def _slots(self, table: Int32Array, positions: Int64Array, counts: Int64Array) -> Int64Array:
        request_rows = np.repeat(np.arange(len(counts)), counts)
        blocks = table[request_rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size


def _input_ids(parts: Sequence[ScheduledRequest]) -> Int64Array:
    ids: list[int] = []
    for part in parts:
        request, end = part.request, part.start + part.num_tokens - part.num_drafts
        output_index = part.start - len(request.prompt_token_ids)
        if end - part.start == 1 and 0 <= output_index < len(request.output_token_ids):
            ids.append(request.output_token_ids[output_index])  # a decode, nearly every part: no slices
        else:
            ids += request.token_ids(part.start, end)
        if part.num_drafts:
            ids += request.draft_token_ids[: part.num_drafts]
    return np.array(ids, dtype=np.int64)


def _token_sources(
    parts: Sequence[ScheduledRequest], input_ids: Int64Array, query_start_loc: Int32Array
) -> dict[int, str]:
    in_flight = np.flatnonzero(input_ids < 0)
    if not len(in_flight):
        return {}
    owners = np.searchsorted(query_start_loc, in_flight, side="right") - 1
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


@dataclass(slots=True)
class _Row:
    """Where a request's block table stands in the buffer, and how much of it."""

    request: Request
    index: int
    num_preemptions: int  # a preempted request starts a new block table
    num_blocks: int = 0


class BlockTableRows:
    """Block tables of recent requests as rows of one int32 buffer, extended by what is new since the last step."""

    def __init__(self, max_blocks: int):
        self._max_blocks = max_blocks
        self._buffer: Int32Array = np.full((16, min(max_blocks, 64)), -1, dtype=np.int32)
        self._rows: dict[str, _Row] = {}
        self._unused = list(range(16))

    def gather(self, requests: Sequence[Request]) -> Int32Array:
        """[N, B] copy, -1 past each table's end; B is the longest table of these requests."""
        rows = self._rows
        if len(rows) > len(requests):
            self._drop_ended()
        indices = []
        width = 0
        for request in requests:
            row = rows.get(request.request_id)
            if row is None or row.request is not request or row.num_preemptions != request.num_preemptions:
                row = self._restart(request, row)
            num_blocks = len(request.block_table)
            if row.num_blocks < num_blocks:
                self._extend(row)
            indices.append(row.index)
            width = max(width, num_blocks)
        return self._buffer[indices, :width]

    def _restart(self, request: Request, old: _Row | None) -> _Row:
        if old is None and not self._unused:
            self._grow_rows()
        index = self._unused.pop() if old is None else old.index
        self._buffer[index] = -1
        row = self._rows[request.request_id] = _Row(request, index, request.num_preemptions)
        return row

    def _extend(self, row: _Row) -> None:
        table = row.request.block_table
        if len(table) > self._buffer.shape[1]:
            self._grow_width(len(table))
        self._buffer[row.index, row.num_blocks : len(table)] = table[row.num_blocks :]
        row.num_blocks = len(table)

    def _drop_ended(self) -> None:
        for request_id in [key for key, row in self._rows.items() if row.request.is_finished]:
            self._unused.append(self._rows.pop(request_id).index)

    def _grow_rows(self) -> None:
        more = np.full_like(self._buffer, -1)
        self._unused.extend(range(len(self._buffer), 2 * len(self._buffer)))
        self._buffer = np.concatenate([self._buffer, more])

    def _grow_width(self, num_blocks: int) -> None:
        width = max(num_blocks, min(2 * self._buffer.shape[1], self._max_blocks))
        wider = np.full((len(self._buffer), width), -1, dtype=np.int32)
        wider[:, : self._buffer.shape[1]] = self._buffer
        self._buffer = wider
