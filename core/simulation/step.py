"""What a plan does when it runs: which request gets how many tokens, what that costs, and who holds KV afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from core.batch import ScheduledRequest, Verdict
from core.request import FinishReason, Request
from core.simulation.build import MAX_STRIDE, SimulatedRequest
from core.simulation.cost import Work

KEPT: Final = tuple(Verdict((0,) * count) for count in range(MAX_STRIDE + 1))
STOPPED: Final = tuple(Verdict((0,) * count, FinishReason.STOP) for count in range(MAX_STRIDE + 1))
FULL: Final = tuple(Verdict((0,) * count, FinishReason.LENGTH) for count in range(MAX_STRIDE + 1))
ONE: Final = KEPT[1]


@dataclass(slots=True)
class Step:
    """One plan: one step of the model, or several in which requests decode alone."""

    work: Work = field(default_factory=Work)  # of the first step
    num_steps: int = 1
    num_decode_tokens: int = 0  # over all steps
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    leaving: dict[int, list[int]] = field(default_factory=dict)  # steps that a decode takes part in -> where it began
    ending: list[tuple[SimulatedRequest, int]] = field(default_factory=list)  # and how many tokens it got
    first_tokens: list[SimulatedRequest] = field(default_factory=list)  # requests that get theirs
    num_cached_tokens: int = 0  # of prompts that begin, found in the prefix cache

    def take_plain(self, parts: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """Take decodes that get one token and go on, nearly all parts of nearly all plans. Returns the others."""
        verdicts, others = self.verdicts, []
        count = context = 0
        for part in parts:
            request: Any = part.request
            if part.num_tokens == 1 and request.decoding and request.left > 1:
                count += 1
                context += part.start
                request.left -= 1
                verdicts[request.request_id] = ONE
            else:
                others.append(part)
        self.work.num_decodes, self.work.num_context, self.num_decode_tokens = count, context + count, count
        return others

    def take_strided(self, parts: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """Take decodes that get several tokens. Returns the parts of requests that are not decoding."""
        verdicts, leaving, others = self.verdicts, self.leaving, []
        decodes = context = num_tokens = longest = 0
        for part in parts:
            request: Any = part.request
            if not request.decoding:
                others.append(part)
                continue
            count, start = part.num_tokens, part.start
            decodes += 1
            context += start
            num_tokens += count
            longest = count if count > longest else longest
            if count in leaving:
                leaving[count].append(start)
            else:
                leaving[count] = [start]
            if request.left > count:
                request.left -= count
                verdicts[request.request_id] = KEPT[count]
            else:
                self.judge(request, count)
        self.work.num_decodes, self.work.num_context = decodes, context + decodes
        self.num_decode_tokens, self.num_steps = num_tokens, max(longest, 1)
        return others

    def judge(self, request: SimulatedRequest, num_tokens: int) -> None:
        """The request gets so many tokens, and ends where these are its last."""
        request.left -= num_tokens
        if request.left > 0:
            self.verdicts[request.request_id] = KEPT[num_tokens]
            return
        is_full = request.num_output_tokens + num_tokens >= request.params.max_tokens
        self.verdicts[request.request_id] = (FULL if is_full else STOPPED)[num_tokens]
        self.ending.append((request, num_tokens))


@dataclass(slots=True)
class Resident:
    """The requests that hold KV, and how much of it is written."""

    block_size: int
    running: dict[str, SimulatedRequest] = field(default_factory=dict)
    filling: set[str] = field(default_factory=set)  # of those, with a prompt that is not through
    num_written: int = 0  # slots that hold a token; one that is shared counts for each

    def take(self, part: ScheduledRequest, step: Step) -> None:
        request = part.request
        assert isinstance(request, SimulatedRequest)
        self.running[request.request_id] = request
        if request.decoding:
            self._decode(request, part, step)
        else:
            self._fill(request, part, step)

    def _decode(self, request: SimulatedRequest, part: ScheduledRequest, step: Step) -> None:
        count = part.num_tokens
        step.work.add_decode(part.start)
        step.num_steps = max(step.num_steps, count)
        step.num_decode_tokens += count
        step.leaving.setdefault(count, []).append(part.start)
        step.judge(request, count)
        self.num_written += count

    def _fill(self, request: SimulatedRequest, part: ScheduledRequest, step: Step) -> None:
        """A part of a prompt, or of what is computed again; tokens that the cache had are written, too."""
        end = part.start + part.num_tokens
        if not request.num_written:
            step.num_cached_tokens += part.start
        step.work.add_chunk(part.start, part.num_tokens)
        self.num_written += end - request.num_written
        request.num_written = end
        if not part.samples:
            self.filling.add(request.request_id)
            return
        self.filling.discard(request.request_id)
        request.decoding = True
        if not request.num_output_tokens:
            step.first_tokens.append(request)
        step.judge(request, 1)

    def leave(self, request: Request) -> None:
        """It holds nothing any more."""
        assert isinstance(request, SimulatedRequest)
        if self.running.pop(request.request_id, None) is None:
            return
        self.num_written -= request.num_tokens - 1 if request.decoding else request.num_written
        self.filling.discard(request.request_id)
        request.decoding, request.num_written = False, 0

    def num_unused(self, num_held: int, shared: bool) -> int:
        """KV slots that are taken and hold no token, of `num_held` that are taken. None is in a block that is shared."""
        if shared:
            num_held = sum(len(r.block_table) for r in self.running.values()) * self.block_size
        return num_held - self.num_written
