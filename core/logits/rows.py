"""Which rows of a step each logits processor is shown, and in which memory. Made when the set of rows changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import BaseModel

from core.batch import SampledRow
from core.isolation.faults import ComponentName, Tally
from core.stages.logits_processor import LogitsProcessor


@dataclass(slots=True, eq=False)
class Member:
    """One processor, the states of its requests, and its failures."""

    part: ComponentName
    processor: LogitsProcessor
    params: type[BaseModel] | None = None
    provides: tuple[str, ...] = ()  # fields of SamplingParams that it honours
    states: dict[str, Any] = field(default_factory=dict)  # by request id; None: not concerned
    failed: set[str] = field(default_factory=set)  # requests whose failure is counted, until they are forgotten
    tally: Tally = field(init=False)  # of the chain that it belongs to

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def who(self) -> str:
        """For messages: logits_processors=dry (plugin …)."""
        return self.part.who


@dataclass(slots=True, eq=False)
class Copy:
    """Rows that are no neighbours, side by side: one copy for all processors in a row that have the same ones."""

    index: torch.Tensor  # int64 [A]
    rows: torch.Tensor | None = None  # [A, V], the same memory in each step


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one processor, as long as the set of rows stays the same. Neighbouring rows are a view of the logits,
    others a copy that is written back: there is no way to a neighbour's row."""

    member: Member
    apply: Callable[..., Sequence[int] | None]  # of its processor
    indices: tuple[int, ...]  # ascending
    states: tuple[Any, ...]
    whole: bool  # all rows
    copy: Copy | None  # None: the rows are neighbours
    takes: bool = True  # False: its rows are those of the share before it, which has taken them
    writes_back: bool = True  # the share after it does not go on with them

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        if self.whole:
            return logits
        if self.copy is None:
            return logits[self.indices[0] : self.indices[-1] + 1]
        if self.copy.rows is None:
            self.copy.rows = logits.new_empty(len(self.indices), logits.shape[1])
        torch.index_select(logits, 0, self.copy.index, out=self.copy.rows)
        return self.copy.rows

    def put_back(self, logits: torch.Tensor) -> None:
        if self.copy is not None and self.copy.rows is not None and self.writes_back:
            logits.index_copy_(0, self.copy.index, self.copy.rows)

    def rows(self, rows: Sequence[SampledRow]) -> Sequence[SampledRow]:
        if self.whole:
            return rows
        if self.copy is None:
            return rows[self.indices[0] : self.indices[-1] + 1]
        return [rows[index] for index in self.indices]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Who sees which rows of a step with these request ids."""

    request_ids: list[str]  # [S]
    alone: bool  # all rows are one request's
    shares: tuple[Share, ...]
    touched: tuple[int, ...]

    @property
    def only(self) -> str | None:
        """The request whose step it is."""
        return self.request_ids[0] if self.alone else None


def share_out(wanted: Sequence[tuple[Member, Sequence[Any]]], device: str) -> tuple[Share, ...]:
    """The shares of the members that have any row; each comes with its states by row, None where it is not concerned."""
    shares = [share for member, states in wanted if (share := _share(member, states, device)) is not None]
    return tuple(_joined(shares))


def _share(member: Member, states: Sequence[Any], device: str) -> Share | None:
    indices = tuple(index for index, state in enumerate(states) if state is not None)
    if not indices:
        return None
    neighbours = indices[-1] - indices[0] == len(indices) - 1
    return Share(
        member=member,
        apply=member.processor.apply,
        indices=indices,
        states=tuple(states[index] for index in indices),
        whole=len(indices) == len(states),
        copy=None if neighbours else Copy(torch.tensor(indices, device=device)),
    )


def _joined(shares: Sequence[Share]) -> Iterator[Share]:
    """Neighbours in the chain with the same rows use one copy of them."""
    copy: Copy | None = None
    for index, share in enumerate(shares):
        same_as_before = index > 0 and shares[index - 1].indices == share.indices
        same_as_after = index + 1 < len(shares) and shares[index + 1].indices == share.indices
        copy = copy if same_as_before else share.copy
        yield replace(share, copy=copy, takes=not same_as_before, writes_back=not same_as_after)
