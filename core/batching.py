"""From the scheduler's plan to tensors: numpy arrays, built whole-batch at a time, handed over as CPU tensors.

Per token Python work is avoided: a step of N decodes costs N short loops and a few array operations. Block tables are
kept between steps in one buffer and only their new entries are written (R11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, groupby

import numpy as np
import numpy.typing as npt
import torch

from core.batch import ModelBatch, PromptRows, SampledRow, SamplingMetadata, ScheduledRequest, SchedulerOutput
from core.request import GroupTable, Request, RequestStatus

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_BLANK = GroupTable(0, ())
RUNNING = RequestStatus.RUNNING  # an enum's attribute costs as much as a call


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
        counts = np.array([part.num_tokens for part in parts], dtype=np.int64)
        starts = np.array([part.start for part in parts], dtype=np.int64)
        query_start_loc = np.zeros(len(parts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        positions = np.arange(query_start_loc[-1], dtype=np.int64)
        positions += np.repeat(starts - query_start_loc[:-1], counts)
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
            group_block_tables=None if group_tables is None else torch.from_numpy(group_tables),
            group_slot_mappings=(
                None if group_tables is None else torch.from_numpy(self._slots(group_tables, positions, counts))
            ),
        )

    def _slots(self, tables: Int32Array, positions: Int64Array, counts: Int64Array) -> Int64Array:
        """[…, T] of block tables […, N, B]."""
        request_rows = np.repeat(np.arange(len(counts)), counts)
        blocks = tables[..., request_rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size


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


@dataclass(slots=True, eq=False)
class _Row:
    """Where a request's block table stands in the buffer, and how much of it."""

    request: Request
    index: int
    num_preemptions: int  # a preempted request starts a new block table
    num_blocks: int = 0


class BlockTableRows:
    """Block tables of running requests as rows of one int32 buffer, extended by what is new since the last step.

    Nothing is copied per step: rows of the requests of a step are moved together where others stand between them, which
    only happens when somebody ends or is not in every step.
    """

    def __init__(self, max_blocks: int):
        self._max_blocks = max_blocks
        self._buffer: Int32Array = np.full((16, min(max_blocks, 64)), -1, dtype=np.int32)
        self._rows: dict[str, _Row] = {}
        self._at: list[_Row | None] = [None] * 16  # by index

    def gather(self, requests: Sequence[Request]) -> tuple[list[int], Int32Array]:
        """Row of each request, 0 to N - 1 in some order, and the [N, B] tables: -1 past each one's end; B is the longest of them.

        The tables are a view of the buffer: they change with the next call.
        """
        rows, indices, width = self._rows, [], 0
        for request in requests:
            row = rows.get(request.request_id)
            if row is None or row.request is not request or row.num_preemptions != request.num_preemptions:
                row = self._restart(request, row)
            num_blocks = len(request.block_table)
            if row.num_blocks < num_blocks:
                self._extend(row)
            indices.append(row.index)
            width = max(width, num_blocks)
        if len(rows) > len(requests):
            self._drop_ended()
        if indices and max(indices) >= len(indices):
            indices = self._moved_together(requests, indices)
        return indices, self._buffer[: len(indices), :width]

    def _restart(self, request: Request, old: _Row | None) -> _Row:
        if old is None:
            if len(self._rows) == len(self._at):
                self._grow_rows()
            index = self._at.index(None)
        else:
            index = old.index
        self._buffer[index] = -1
        row = self._rows[request.request_id] = self._at[index] = _Row(request, index, request.num_preemptions)
        return row

    def _extend(self, row: _Row) -> None:
        table = row.request.block_table
        if len(table) > self._buffer.shape[1]:
            self._grow_width(len(table))
        self._buffer[row.index, row.num_blocks : len(table)] = table[row.num_blocks :]
        row.num_blocks = len(table)

    def _drop_ended(self) -> None:
        """Those that run no more: one that was preempted starts a new table."""
        for request_id in [key for key, row in self._rows.items() if row.request.status is not RUNNING]:
            self._at[self._rows.pop(request_id).index] = None

    def _moved_together(self, requests: Sequence[Request], indices: Sequence[int]) -> list[int]:
        """The requests' rows change places with those before them that are not of this step."""
        taken, count = set(indices), len(indices)
        places = iter([place for place in range(count) if place not in taken])
        for index in indices:
            if index >= count:
                self._swap(index, next(places))
        return [self._rows[request.request_id].index for request in requests]

    def _swap(self, one: int, other: int) -> None:
        self._buffer[[one, other]] = self._buffer[[other, one]]
        self._at[one], self._at[other] = self._at[other], self._at[one]
        for index in (one, other):
            row = self._at[index]
            if row is not None:
                row.index = index

    def _grow_rows(self) -> None:
        self._at += [None] * len(self._at)
        self._buffer = np.concatenate([self._buffer, np.full_like(self._buffer, -1)])

    def _grow_width(self, num_blocks: int) -> None:
        width = max(num_blocks, min(2 * self._buffer.shape[1], self._max_blocks))
        wider = np.full((len(self._buffer), width), -1, dtype=np.int32)
        wider[:, : self._buffer.shape[1]] = self._buffer
        self._buffer = wider


def _moves(pair: tuple[GroupTable, GroupTable]) -> tuple[int, int, int, int]:
    """First block and number of blocks, before and now."""
    had, table = pair
    return had.first, len(had.blocks), table.first, len(table.blocks)


class GroupTableRows(BlockTableRows):
    """The same for several groups of layers: the tables of the others lie in planes beside those of the first.

    A cache replaces a request's group tables when it moves them, so one comparison tells. What has left a window is -1.
    """

    def __init__(self, max_blocks: int, num_groups: int):
        super().__init__(max_blocks)
        self._planes: Int32Array = np.full((num_groups - 1, *self._buffer.shape), -1, dtype=np.int32)
        self._written: dict[str, tuple[GroupTable, ...]] = {}  # by request id

    def gather_groups(self, requests: Sequence[Request], width: int) -> Int32Array:
        """[G - 1, N, width] for requests that `gather` was just called with; a view of the buffer like its tables."""
        written = self._written
        for request in requests:
            if written.get(request.request_id) is not request.group_tables:
                self._write(request)
        return self._planes[:, : len(requests), :width]

    def _write(self, request: Request) -> None:
        tables, index = request.group_tables, self._rows[request.request_id].index
        before = self._written.get(request.request_id) or (_BLANK,) * len(tables)
        at = 0
        for (old, held, first, count), members in groupby(zip(before, tables, strict=True), _moves):
            num_old = max(old + held - first, 0)
            new = [table.blocks[num_old:] for _, table in members]
            rows = self._planes[at : at + len(new), index]  # of groups that move alike, as those of one window do
            rows[:, old:first] = -1
            rows[:, first + num_old : first + count] = new
            at += len(new)
        self._written[request.request_id] = tables

    def _restart(self, request: Request, old: _Row | None) -> _Row:
        row = super()._restart(request, old)
        self._planes[:, row.index] = -1
        self._written.pop(request.request_id, None)
        return row

    def _drop_ended(self) -> None:
        super()._drop_ended()
        for request_id in self._written.keys() - self._rows.keys():
            del self._written[request_id]

    def _swap(self, one: int, other: int) -> None:
        super()._swap(one, other)
        self._planes[:, [one, other]] = self._planes[:, [other, one]]

    def _grow_rows(self) -> None:
        super()._grow_rows()
        self._planes = np.concatenate([self._planes, np.full_like(self._planes, -1)], axis=1)

    def _grow_width(self, num_blocks: int) -> None:
        super()._grow_width(num_blocks)
        wider = np.full((len(self._planes), *self._buffer.shape), -1, dtype=np.int32)
        wider[:, :, : self._planes.shape[2]] = self._planes
        self._planes = wider
