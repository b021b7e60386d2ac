"""The chain of logits processors: which rows each is shown, what is kept of a request, and what becomes of one that fails.

A step costs a comparison of request ids where its rows are those of the step before, and per processor with rows one call
and a few checks. Everything else happens when the set of rows changes.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from core.batch import SampledRow
from core.errors import PluginError, Terminated, described
from core.isolation.faults import Tally, blocked_text, drained
from core.logits.rows import Member, RowPlan, Share, share_out
from core.outputs import PluginIncident
from core.stages.logits_processor import asks_for, parsed_params

log = logging.getLogger("nonet.logits_processors")

MAX_INCIDENTS = 64  # kept where nobody fetches them
OTHER_STORAGE = "it gave the logits another shape, type or storage; they are edited in place"


class ProcessorChain:
    """See `core.stages.logits_processor.LogitsChain`.

    A failure in a step of several requests only raises: the engine runs the step again, each request alone, and there it is
    the failure of that request, counted once. After `quarantine_after` of them the processor is switched off: requests that
    asked for it end with an error, others go on without it. A call that takes longer than `block_timeout` seconds counts too.
    """

    def __init__(
        self,
        members: Sequence[Member],
        device: str = "cpu",
        quarantine_after: int = 3,
        block_timeout: float = 5.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._members = tuple(members)
        self._device = device  # of the logits
        for member in self._members:
            member.tally = Tally(member.part, log, quarantine_after)
        self._block_timeout = block_timeout
        self._clock = clock
        self._plan: RowPlan | None = None
        self._rows: Sequence[SampledRow] = ()  # of the step that `_plan` was last asked for
        self._alone = False  # the step's rows are one request's
        self._unexplained: tuple[Member, str] | None = None  # a shared step failed, and no request alone has yet
        self._incidents: deque[PluginIncident] = deque(maxlen=MAX_INCIDENTS)

    def touches(self, rows: Sequence[SampledRow]) -> Sequence[int]:
        return self._plan_of(rows).touched

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
        plan = self._plan_of(rows)
        if not plan.shares:
            return
        was_bad = plan.alone and _fault(logits[0]) is not None  # then it is the model's fault
        part, own = logits, rows
        storage = storage_of_part = _storage(logits)
        started = self._clock()
        for share in plan.shares:
            if share.takes:
                part, own = share.take(logits), share.rows(rows)
                storage_of_part = storage if share.whole else _storage(part)
            finished = self._edit(share, part, own, plan)
            if (plan.alone or not share.whole) and _storage(part) != storage_of_part:
                self._fail(share.member, OTHER_STORAGE, plan.only)
            share.put_back(logits)
            ended = self._clock()
            if ended - started > self._block_timeout:
                self._blocked(share.member, ended - started)
            started = ended
            if plan.alone and not was_bad:
                self._refuse_spoilt(share, logits, plan)
            if finished:
                self._finish(share, rows, finished)
        if _storage(logits) != storage:  # whose doing it was, the request alone will show
            self._fail(plan.shares[-1].member, OTHER_STORAGE, None)

    def blame(self, row: SampledRow) -> str:
        suspects = [member for member in self._members if member.states.get(row.request_id) is not None]
        names = " and ".join(member.who for member in suspects)
        reason = "it left a request without a token to draw"
        if suspects and not self._alone:  # it may have been called for another one, whose step alone will show it
            if len(suspects) == 1:
                self._unexplained = suspects[0], reason
            raise PluginError(f"{names}: {reason}" if len(suspects) == 1 else f"one of {names} {reason[3:]}")
        if len(suspects) == 1:
            self._count(suspects[0], row.request_id, reason)
        return f" (after {names})" if names else ""

    def forget(self, request_ids: Sequence[str]) -> None:
        for member in self._members:
            for request_id in request_ids:
                member.failed.discard(request_id)
                if request_id in member.states:
                    del member.states[request_id]
                    self._plan = None

    def incidents(self) -> Sequence[PluginIncident]:
        return drained(self._incidents)

    def _plan_of(self, rows: Sequence[SampledRow]) -> RowPlan:
        plan = self._plan
        if plan is not None and rows is self._rows:  # `touches`, then `apply`
            return plan
        request_ids = [row.request_id for row in rows]
        if plan is None or plan.request_ids != request_ids:
            self._plan = None
            plan = self._new_plan(rows, request_ids)
            self._plan = None if any(share.member.tally.quarantined for share in plan.shares) else plan
            self._alone = plan.alone
        self._rows = rows
        return plan

    def _new_plan(self, rows: Sequence[SampledRow], request_ids: list[str]) -> RowPlan:
        alone = len(set(request_ids)) == 1
        if not alone:
            self._count_unexplained()
        wanted = []
        for member in self._members:
            if member.tally.quarantined:
                member.states.clear()
                _refuse_asking(member, rows)
            else:
                wanted.append((member, [self._state(member, row, alone) for row in rows]))
        shares = share_out(wanted, self._device)
        touched = sorted({index for share in shares for index in share.indices})
        return RowPlan(request_ids, alone, shares, tuple(touched))

    def _state(self, member: Member, row: SampledRow, alone: bool) -> Any:
        """The first of a request's rows decides: what comes before it is settled."""
        if row.request_id not in member.states:
            values = row.params.extra.get(member.name)
            started = self._clock()
            try:
                params = parsed_params(member.params, values) if member.params and values is not None else None
                member.states[row.request_id] = member.processor.state(row, params)
            except Terminated:
                raise
            except BaseException as error:  # a stranger's code may raise anything
                self._fail(member, described(error), row.request_id if alone else None, error)
            took = self._clock() - started
            if took > self._block_timeout:
                self._blocked(member, took)
        return member.states[row.request_id]

    def _edit(
        self, share: Share, logits: torch.Tensor, rows: Sequence[SampledRow], plan: RowPlan
    ) -> Sequence[int] | None:
        """`logits` and `rows` of the share. Returns indices among them."""
        try:
            return _indices(share.apply(logits, rows, share.states), len(share.indices))
        except Terminated:
            raise
        except BaseException as error:
            self._fail(share.member, described(error), plan.only, error)

    def _refuse_spoilt(self, share: Share, logits: torch.Tensor, plan: RowPlan) -> None:
        """One request's step: what is not finite now is this processor's doing. Rows after a draft may never count, so they
        are left to the sampler, which knows how far drafts are accepted."""
        fault = _fault(logits[0])
        if fault is not None:
            self._fail(share.member, f"it left {fault}", plan.only)

    def _finish(self, share: Share, rows: Sequence[SampledRow], finished: Sequence[int]) -> None:
        """A row after a draft is not the request's last word: drafts may be rejected."""
        for index in finished:
            row = rows[share.indices[index]]
            if not row.draft_token_ids:
                share.member.states[row.request_id] = None
                self._plan = None

    def _fail(
        self, member: Member, reason: str, request_id: str | None, cause: BaseException | None = None
    ) -> NoReturn:
        """`request_id`: whose failure it is; None where several requests shared the call."""
        self._plan = None  # with the memory that it may hold
        if request_id is not None:
            self._count(member, request_id, reason, cause)
        else:
            self._unexplained = member, reason
        raise PluginError(f"{member.who}: {reason}") from cause

    def _count_unexplained(self) -> None:
        """The failure of a shared step that no request alone repeats is a failure all the same."""
        if self._unexplained is not None:
            member, reason = self._unexplained
            self._count(member, "", f"{reason} (in a step of several requests only)")

    def _count(self, member: Member, request_id: str, reason: str, cause: BaseException | None = None) -> None:
        if self._unexplained is not None and self._unexplained[0] is member:
            self._unexplained = None
        if request_id and request_id in member.failed:
            return
        member.failed.add(request_id)
        incident = member.tally.failed(reason, cause)
        if incident.quarantined:
            self._plan = None
        self._incidents.append(incident)

    def _blocked(self, member: Member, seconds: float) -> None:
        self._count(member, "", blocked_text(seconds, self._block_timeout))


def _refuse_asking(member: Member, rows: Sequence[SampledRow]) -> None:
    if any(asks_for(row.params, member.name, member.provides) for row in rows):
        raise PluginError(
            f"{member.who}: switched off after {member.tally.failures} failures, and the request asks for it"
        )


def _storage(logits: torch.Tensor) -> tuple[object, ...]:
    """What an edit in place cannot change."""
    return logits.shape, logits.dtype, logits.data_ptr(), logits.stride()


def _indices(value: object, count: int) -> Sequence[int] | None:
    """What a processor's `apply` returned. Raises TypeError where it is no row indices below `count`."""
    if value is None or (type(value) is list and not value):
        return None
    found: list[object] = list(value) if isinstance(value, Sequence) else [None]
    indices = [index for index in found if type(index) is int and 0 <= index < count]
    if len(indices) != len(found):
        kind = type(value).__name__
        raise TypeError(f"apply returned {kind}; logits are edited in place, and it returns row indices or None")
    return indices


def _fault(row: torch.Tensor) -> str | None:
    """What keeps a token from being drawn from `row` [V]."""
    peak = float(row.amax())
    if math.isfinite(peak):
        return None
    return (
        "no token to draw: every logit is -inf"
        if peak == -math.inf
        else f"{'+inf' if peak > 0 else 'NaN'} in the logits"
    )
