"""Tables of the groups of layers after the first, checked: a block has one writer over all groups, and no window a hole."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import shown
from core.request import GroupTable


class GroupChecks:
    """`num_holders`: of each block, over all groups; the first group's are counted by whoever made it.

    Methods raise ValueError with what is wrong.
    """

    def __init__(self, windows: Sequence[int], block_size: int, num_holders: list[int]):
        self._windows = windows
        self._block_size = block_size
        self._num_holders = num_holders
        self._blanks = [GroupTable(0, ())] * len(windows)

    def found(self, num_tokens: int, tables: object) -> tuple[GroupTable, ...]:
        """What `lookup` found, as it stands in the request. The blocks may be others' too."""
        checked = self._checked(tables, num_tokens, num_tokens)
        blocks = [block for table in checked for block in table.blocks]
        if len(set(blocks)) != len(blocks) or any(table.first * self._block_size > num_tokens for table in checked):
            raise ValueError(f"lookup found {num_tokens} tokens and left the group tables {shown(tables)}")
        self._check_blocks(blocks)
        for block in blocks:
            self._num_holders[block] += 1
        return checked

    def slid(self, had: Sequence[GroupTable], start: int, end: int, tables: object) -> tuple[GroupTable, ...]:
        """Tables for a step of positions [start, end), in place of `had`. New blocks are nobody else's."""
        checked, holders = self._checked(tables, start, end), self._num_holders
        given: list[int] = []
        for before, now in zip(had or self._blanks, checked, strict=True):
            num_gone = now.first - before.first
            kept = before.blocks[num_gone:] if num_gone > 0 else before.blocks
            if num_gone < 0 or now.blocks[: len(kept)] != kept:
                raise ValueError("slide changed blocks that the request had already")
            for block in before.blocks[:num_gone]:
                holders[block] -= 1
            given += now.blocks[len(kept) :]
        self._check_blocks(given)
        for block in given:
            if holders[block]:
                raise ValueError(f"slide gave block {block}, which is held already")
            holders[block] += 1
        return checked

    def num_slots(self, tables: Sequence[GroupTable]) -> int:
        """Positions [0, n) that all tables reach."""
        return min(table.first + len(table.blocks) for table in tables) * self._block_size

    def drop(self, tables: Sequence[GroupTable]) -> None:
        for table in tables:
            for block in table.blocks:
                self._num_holders[block] -= 1

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if type(block) is not int or not 0 <= block < len(self._num_holders):
                raise ValueError(f"a group table has block {shown(block)}, and there are {len(self._num_holders)}")

    def _checked(self, tables: object, start: int, end: int) -> tuple[GroupTable, ...]:
        """One for each group, from the window of `start` to `end`; what is in them is not looked at."""
        size = self._block_size
        if type(tables) is not tuple or len(tables) != len(self._windows):
            raise ValueError(f"its group tables are {shown(tables)}, for {len(self._windows)} groups beside the first")
        for window, table in zip(self._windows, tables, strict=True):
            if type(table) is not GroupTable or type(table.first) is not int or type(table.blocks) is not tuple:
                raise ValueError(f"one of its group tables is {shown(table)}")
            first, last = table.first * size, (table.first + len(table.blocks)) * size
            if not 0 <= first <= max(start - window + 1, 0) or last < end:
                raise ValueError(f"a group table reaches from {first} to {last}; {start} to {end} need more")
        return tables
