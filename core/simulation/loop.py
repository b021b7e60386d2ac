"""The event loop of a simulation: arrivals in, steps planned by the real scheduler, their time from the cost model.

Exact up to what the cost model says of a step. With a stride, steps in which requests only decode are planned several at a
time, as if drafts were accepted: a request's end is exact within them, and no plan goes past the next arrival, nor past the
next end while others wait for its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Final, cast

from core.batch import SchedulerOutput
from core.errors import NonetError, OverloadedError, RequestError
from core.outputs import StepStats
from core.request import FinishReason, Request
from core.simulation.blame import blaming
from core.simulation.build import SimulatedRequest, Simulation
from core.simulation.cost import StepClock
from core.simulation.front import SimulatedFront, idle
from core.simulation.outcomes import Columns, History, Reasons, explained
from core.simulation.records import Arrival, Finish, RunResult, StepTotals, Traffic
from core.simulation.solo import solo_seconds
from core.simulation.step import Resident, Step
from core.stages.prefill import StepWatcher
from core.stages.scheduler import Counts
from core.stages.step_cost import StepTime

STALL_S: Final = 0.005  # what the engine waits where nothing can be planned
MAX_STALLS: Final = 1000
WORTHWHILE: Final = 4  # steps in a plan: a plan of decodes that are drafts costs as much as a few plain ones
PROGRESS_PLANS: Final = 4096


class SimulationError(NonetError):
    """A component did what a run cannot go on after."""


def simulate(simulation: Simulation, traffic: Traffic, progress: Callable[[int], object] = lambda _: None) -> RunResult:
    """Run `traffic` to its end; `progress` is told now and then how many requests have ended.

    A simulation is used up by it. Raises SimulationError where the scheduler plans nothing for good, or ends what has not
    ended, and PluginError for a component that raises: there are no guards here that a run could go on behind.
    """
    with blaming(simulation.names):
        return _simulated(simulation, traffic, progress)


def _simulated(simulation: Simulation, traffic: Traffic, progress: Callable[[int], object]) -> RunResult:
    started = time.perf_counter()
    run = _Run(simulation, traffic)
    while run.turn():
        if run.totals.num_plans % PROGRESS_PLANS == 0:
            progress(run.num_ended)
    progress(run.num_ended)
    simulation.cache.check()
    outcomes = run.columns.outcomes()
    return RunResult(
        outcomes=replace(outcomes, solo_s=solo_seconds(simulation, outcomes)),
        steps=run.totals,
        timeline=run.history.timeline(),
        simulated_s=run.last_end_s,
        wall_s=time.perf_counter() - started,
        num_kv_slots=simulation.cache.num_blocks * simulation.cache.block_size,
        reasons=run.reasons.counts(),
        left_out=dict(getattr(traffic, "left_out", {})),
    )


class _Run:
    """One run. `turn` is a turn of the engine's loop."""

    def __init__(self, simulation: Simulation, traffic: Traffic):
        self._sim = simulation
        self._scheduler, self._cache, self._clock = simulation.scheduler, simulation.cache, simulation.clock
        self._num_blocks, self._block_size = simulation.cache.num_blocks, simulation.cache.block_size
        self._seconds = StepClock(simulation.cost.seconds)
        self._front = SimulatedFront(simulation)
        self._observe_idle()
        self._arrivals = iter(traffic)
        self._shares = traffic.shares_content
        self._next: Arrival | None = next(self._arrivals, None)
        self.columns, self.history, self.totals, self.reasons = Columns(), History(), StepTotals(), Reasons()
        self.num_ended, self.last_end_s = 0, 0.0
        self._num_live = 0  # requests that were admitted and have not ended
        self._resident = Resident(self._block_size)
        self._watches = callable(getattr(simulation.prefill, "step_finished", None))
        self._take_copies = getattr(simulation.cache, "take_copies", None) or (lambda: ())
        self._counts = Counts()
        self._is_blocked = False  # requests wait, and the last plan took in none of them
        self._num_stalls = 0  # in a row

    def turn(self) -> bool:
        """False: everything that arrived has ended."""
        self._take_arrivals()
        if not self._num_live:
            if self._next is None:
                return False
            self._clock.now = self._next.time_s
            self._observe_idle()
            return True
        self._look_ahead()
        plan = self._scheduler.schedule()
        self._counts = self._scheduler.counts()
        self.totals.num_plans += 1
        if plan.preempted or plan.refused:
            self._take_losses(plan)
        if plan.scheduled:
            self._execute(plan)
            self._num_stalls = 0
        else:
            self._stall()
        if self._clock.now >= self.history.next_s:
            self._note_state()
        return True

    # Arrivals

    def _take_arrivals(self) -> None:
        now = self._clock.now
        while self._next is not None and self._next.time_s <= now:
            arrival = self._next
            self._arrive(arrival)
            self._next = next(self._arrivals, None)
            if self._next is not None and self._next.time_s < arrival.time_s:
                raise SimulationError(
                    f"the traffic goes back in time, from {arrival.time_s} s to {self._next.time_s} s"
                )

    def _arrive(self, arrival: Arrival) -> None:
        row = self.columns.add(arrival)
        try:
            request = self._front.admit(arrival, row)
        except (OverloadedError, RequestError) as error:
            finish = Finish.REFUSED if isinstance(error, OverloadedError) else Finish.ERROR
            self.reasons.add(finish, explained(error))
            self._record(row, finish, arrival.time_s)
            return
        self._sim.lengths[request.request_id] = request.left
        self._num_live += 1
        self._is_blocked = False
        self._scheduler.add(request)
        self._counts = self._scheduler.counts()

    # Steps

    def _look_ahead(self) -> None:
        """How many steps the next plan covers: as many as nobody but those who run has a part in."""
        stride, running = self._sim.stride, self._resident.running
        stride.length = 1
        waiting = self._counts.waiting + self._counts.swapped
        if stride.longest == 1 or not running or self._resident.filling or (waiting and not self._is_blocked):
            return
        count = len(running)
        room = self._cache.num_free_blocks // count * self._block_size
        length = min(stride.longest, self._sim.max_num_scheduled_tokens // count, room)
        if waiting:
            length = min(length, min(request.left for request in running.values()))
        if self._next is not None:
            step_s = self._seconds.decodes(count, self._resident.num_written)
            length = min(length, ceil((self._next.time_s - self._clock.now) / step_s))
        stride.length = length if length >= WORTHWHILE else 1

    def _execute(self, plan: SchedulerOutput) -> None:
        step, resident = Step(), self._resident
        if self._sim.stride.length > 1:
            parts = step.take_strided(plan.scheduled)
        else:
            parts = step.take_plain(plan.scheduled)
        resident.num_written += step.num_decode_tokens
        num_running = len(resident.running)
        for part in parts:
            resident.take(part, step)
        self._is_blocked = len(resident.running) == num_running and not plan.preempted
        asked = self._clock.now
        began = asked + self._copy()
        ends = self._seconds.of_steps(step.work, step.num_steps, step.leaving)
        self._add_up(step, ends, began - asked)
        self._clock.now = began + ends[-1]
        for request in step.first_tokens:
            self.columns.first_token_s[request.row] = self._clock.now
            if self._front.measures:
                self._front.started(request.request_id)
        self._scheduler.update(plan, step.verdicts)
        for request, num_tokens in step.ending:
            self._end(request, began + ends[num_tokens - 1])
        if self._front.measures:
            self._observe(step, self._clock.now - asked)
        if self._watches:
            work, each = step.work, (self._clock.now - asked) / step.num_steps
            watcher = cast(StepWatcher, self._sim.prefill)
            watcher.step_finished(StepTime(work.num_prefill_tokens, work.num_decodes, each, work.num_pairs))

    def _copy(self) -> float:
        """Seconds that moving KV between device and host takes, before the step."""
        copies = self._take_copies()
        if not copies:
            return 0.0
        out = sum(len(copy.device_blocks) for copy in copies if copy.direction == "out")
        all_ = sum(len(copy.device_blocks) for copy in copies)
        self.totals.num_blocks_swapped_out += out
        self.totals.num_blocks_swapped_in += all_ - out
        return all_ * self._block_size * self._sim.cost.seconds.copy_token

    def _observe_idle(self) -> None:
        if self._front.measures:
            self._front.observe(idle(self._num_blocks))

    def _observe(self, step: Step, seconds: float) -> None:
        """What the engine would tell the front of a step."""
        work, (running, waiting, swapped) = step.work, self._scheduler.counts()
        stats = StepStats(
            num_requests=work.num_chunks + work.num_decodes,
            num_scheduled_tokens=work.num_prefill_tokens + step.num_decode_tokens,
            num_cached_tokens=step.num_cached_tokens,
            running=running,
            waiting=waiting,
            swapped=swapped,
            kv_blocks_free=self._cache.num_free_blocks,
            kv_blocks_total=self._num_blocks,
            forward_s=seconds,
        )
        self._front.observe(stats)

    def _add_up(self, step: Step, ends: list[float], copy_s: float) -> None:
        """Blocks for all steps of a plan are taken with the first; on average half of these tokens are there."""
        totals, busy, idle = self.totals, copy_s + ends[-1], 0.0
        for _, num_tokens in step.ending:
            idle += ends[-1] - ends[num_tokens - 1]
        held = (self._num_blocks - self._cache.num_free_blocks) * self._block_size
        early = (step.num_decode_tokens - step.work.num_decodes) / 2
        unused = self._resident.num_unused(held, self._shares)
        totals.num_steps += step.num_steps
        totals.busy_s += busy
        totals.num_prefill_tokens += step.work.num_prefill_tokens
        totals.num_decode_tokens += step.num_decode_tokens
        totals.running_s += len(self._resident.running) * busy - idle
        totals.kv_allocated_s += (held - early) * busy
        totals.kv_used_s += (held - early - unused) * busy

    def _stall(self) -> None:
        """Nothing can run: as in the engine, a pause, after which something must change."""
        self._num_stalls += 1
        if self._num_stalls >= MAX_STALLS:
            raise SimulationError(f"the scheduler planned nothing in {MAX_STALLS} steps, though requests wait")
        later = self._clock.now + STALL_S
        self._clock.now = later if self._next is None else min(later, self._next.time_s)

    # Ends

    def _take_losses(self, plan: SchedulerOutput) -> None:
        """Requests that gave way, and those that the scheduler has ended itself."""
        self.totals.num_preemptions += len(plan.preempted)
        for request in plan.preempted:
            self._resident.leave(request)
        for request in plan.refused:
            expired = request.finish_reason is FinishReason.EXPIRED
            if not expired:
                self.reasons.add(Finish.ERROR, str(request.stop_reason or "the scheduler gave no reason"))
            self._leave(request, Finish.EXPIRED if expired else Finish.ERROR, self._clock.now)

    def _end(self, request: SimulatedRequest, at: float) -> None:
        if not request.is_finished:
            raise SimulationError(f"request {request.request_id} has ended, and the scheduler does not know")
        self._leave(request, Finish.SERVED, at)

    def _leave(self, request: Request, finish: Finish, at: float) -> None:
        assert isinstance(request, SimulatedRequest)
        self._resident.leave(request)
        self._is_blocked = False  # its place may be what others wait for
        del self._sim.lengths[request.request_id]
        self._num_live -= 1
        self._front.ended(request, finish is Finish.SERVED)
        row, columns = request.row, self.columns
        if request.first_scheduled_time is not None:
            columns.scheduled_s[row] = request.first_scheduled_time
        columns.num_output[row] = request.num_output_tokens
        columns.num_cached[row] = request.num_cached_tokens
        columns.num_preemptions[row] = request.num_preemptions
        self._record(row, finish, at)

    def _record(self, row: int, finish: Finish, at: float) -> None:
        self.columns.finish[row], self.columns.end_s[row] = finish, at
        self.num_ended += 1
        self.last_end_s = max(self.last_end_s, at)

    def _note_state(self) -> None:
        used = 1 - self._cache.num_free_blocks / self._num_blocks
        self.history.add(self._clock.now, self._counts.running, self._counts.waiting + self._counts.swapped, used)
