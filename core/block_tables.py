"""Block tables as rows of int32 buffers that are written where something is new, and never built anew (R11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from core.request import GroupTable, Request, RequestStatus

Int32Array = npt.NDArray[np.int32]

_BLANK = GroupTable(0, ())
RUNNING = RequestStatus.RUNNING  # an enum's attribute costs as much as a call


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
