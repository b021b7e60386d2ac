"""A fake model with a real (if small) memory, and an engine loop that checks every invariant after each step.

The fake model writes token ids where a model writes KV, and reads them back through the block table. What it samples is
a function of what it read, so a wrong block, slot, hit or roll-back changes the output and shows against `expected_ids`.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from core.batch import ModelBatch, SampledRow, SamplerOutput, SchedulerOutput, Verdict
from core.batching import BatchBuilder
from core.cache.kv_cache import KVCache, KVCopy
from core.request import FinishReason, Request, RequestStatus, SamplingParams
from core.stages.prefill import StepWatcher
from core.stages.scheduler import Counts, Scheduler
from core.stages.step_cost import StepTime

VOCAB_SIZE = 50
EOS_TOKEN_ID = 7
GROUP_STEP = 1 << 32  # between the ids that one group of layers writes, and the next
MAX_IDLE_STEPS = 3  # steps without work, result or refusal while requests wait: more means that the scheduler spins
MAX_BARREN_STEPS = 200  # steps that work, and bring neither a token nor an end: requests push each other out for ever


class FakeClock:
    """Monotonic seconds that move only when a test says so."""

    def __init__(self, now: float = 100.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_request(request_id: str, prompt_token_ids: Sequence[int], max_tokens: int = 8, **fields: Any) -> Request:
    """A request that only `max_tokens` ends, unless `params` is given among the fields of `Request`."""
    params = fields.pop("params", SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return Request(request_id, list(prompt_token_ids), params, **fields)


def snapshot(request: Request) -> dict[str, Any]:
    """What a request holds now, lists copied: for stages that may read it and change nothing."""
    return {name: copy.copy(getattr(request, name)) for name in Request.__slots__}


def next_token(seed: int, choice: int, position: int, previous_ids: npt.NDArray[np.int64]) -> int:
    """The fake model and sampler in one: any difference in what was read gives another token."""
    return zlib.crc32(f"{seed},{choice},{position}".encode() + previous_ids.tobytes()) % VOCAB_SIZE


def expected_ids(request: Request) -> list[int]:
    """What the request must produce, computed without cache, batch, scheduler or blocks: the slow twin."""
    ids = list(request.prompt_token_ids)
    for position in range(request.params.max_tokens):
        ids.append(next_token(request.seed, request.choice, position, np.array(ids, dtype=np.int64)))
        if ids[-1] == EOS_TOKEN_ID and not request.params.ignore_eos:
            break
    return ids[request.num_prompt_tokens :]


class FakeModel:
    """Model and sampler. `kv` holds a token id per slot; -1 is memory that was never written.

    `windows`: as in `CacheContext`. Each group of layers writes ids of its own, and looks at all of its window in each step.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)):
        self._windows = windows
        self._block_size = block_size
        self._kv = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self._host = np.full(0, -1, dtype=np.int64)
        self._last_ids: dict[str, int] = {}  # last id sampled per request, for inputs that are still in flight

    def allocate_swap(self, num_blocks: int) -> None:
        self._host = np.full(num_blocks * self._block_size, -1, dtype=np.int64)

    def swap(self, copies: Sequence[KVCopy]) -> None:
        """One block after the other: the slow twin of what executors do."""
        device, host = self._kv.reshape(-1, self._block_size), self._host.reshape(-1, self._block_size)
        for one in copies:
            for device_block, host_block in zip(one.device_blocks, one.host_blocks, strict=True):
                if one.direction == "out":
                    host[host_block] = device[device_block]
                else:
                    device[device_block] = host[host_block]

    def run(self, batch: ModelBatch) -> SamplerOutput:
        ids = batch.input_ids.numpy().copy()
        for index, request_id in batch.token_sources.items():
            ids[index] = self._last_ids[request_id]
        others = () if batch.group_slot_mappings is None else batch.group_slot_mappings.unbind()
        assert len(others) == len(self._windows) - 1, "slots of other groups of layers than the model has"
        slots = np.stack([tensor.numpy() for tensor in (batch.slot_mapping, *others)])
        assert len(set(slots.flat)) == slots.size, "two tokens are written to one slot"
        self._kv[slots] = ids + GROUP_STEP * np.arange(len(slots))[:, None]
        self._look_through_windows(batch)
        sampled = self._sample(batch)
        self._last_ids.update({request_id: tokens[-1] for request_id, tokens in sampled.items()})
        return SamplerOutput(token_ids=sampled)

    def _look_through_windows(self, batch: ModelBatch) -> None:
        """Each group after the first has what the first one has, from the window of each part's first token on."""
        starts, ends = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        for group, window in enumerate(self._windows[1:], start=1):
            assert batch.group_block_tables is not None and window is not None
            for owner, (first, end) in enumerate(zip(starts, ends, strict=False)):
                positions = np.arange(max(int(batch.positions[first]) - window + 1, 0), end)
                table = batch.group_block_tables[group - 1, owner].numpy()
                found = self._ids_at(table, positions) - GROUP_STEP * group
                assert (found == self._ids_at(batch.block_table[owner].numpy(), positions)).all(), (
                    "another's KV is read"
                )

    def _ids_at(self, table: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        blocks = table[positions // self._block_size].astype(np.int64)
        assert (blocks >= 0).all(), "a position has no block"
        ids: npt.NDArray[np.int64] = self._kv[blocks * self._block_size + positions % self._block_size]
        return ids

    def _sample(self, batch: ModelBatch) -> dict[str, tuple[int, ...]]:
        """Drafts are accepted up to the first that differs from what the model itself says."""
        sampled: dict[str, tuple[int, ...]] = {}
        rejected: set[str] = set()
        for row_index, row in zip(batch.sampling.sampled_rows, batch.sampling.rows, strict=True):
            have = sampled.get(row.request_id, ())
            if row.draft_token_ids and have[-1] != row.draft_token_ids[-1]:
                rejected.add(row.request_id)
            if row.request_id not in rejected:
                sampled[row.request_id] = (*have, self._draw(batch, row, int(batch.logits_indices[row_index])))
        return sampled

    def _draw(self, batch: ModelBatch, row: SampledRow, token_index: int) -> int:
        previous = self._read(batch, token_index)
        assert (previous >= 0).all(), f"{row.request_id} reads memory that was never written"
        return next_token(row.seed, row.choice, row.position, previous)

    def _read(self, batch: ModelBatch, token_index: int) -> npt.NDArray[np.int64]:
        """Ids at positions [0, position of the token], through the block table, as attention reads KV."""
        owner = int(np.searchsorted(batch.query_start_loc.numpy(), token_index, side="right")) - 1
        positions = np.arange(int(batch.positions[token_index]) + 1)
        return self._ids_at(batch.block_table[owner].numpy(), positions)


class FakeDrafts:
    """A decode stage that guesses `num_drafts` ids, of which the last `num_wrong` are wrong."""

    def __init__(self, num_drafts: int = 3, num_wrong: int = 1):
        self._num_drafts = num_drafts
        self._num_right = num_drafts - num_wrong

    def propose(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
        return {request.request_id: self._guess(request) for request in requests}

    def _guess(self, request: Request) -> tuple[int, ...]:
        ids = list(request.prompt_token_ids) + request.output_token_ids
        for index in range(self._num_drafts):
            position = request.num_output_tokens + index
            right = next_token(request.seed, request.choice, position, np.array(ids, dtype=np.int64))
            ids.append(right if index < self._num_right else (right + 1) % VOCAB_SIZE)
        return tuple(ids[request.num_tokens :])


def forced_after(output: SchedulerOutput, sampled: SamplerOutput, rng: random.Random) -> SamplerOutput:
    """What was sampled, and up to five ids after it that a grammar forces: those that the model would say itself."""
    longer = dict(sampled.token_ids)
    for part in output.scheduled:
        request = part.request
        if ids := longer.get(request.request_id):
            known = [*request.prompt_token_ids, *request.output_token_ids, *ids]
            for position in range(
                request.num_output_tokens + len(ids), request.num_output_tokens + len(ids) + rng.randrange(6)
            ):
                known.append(next_token(request.seed, request.choice, position, np.array(known, dtype=np.int64)))
            longer[request.request_id] = tuple(known[request.num_tokens :])
    return SamplerOutput(token_ids=longer)


def judge(output: SchedulerOutput, sampled: SamplerOutput) -> Mapping[str, Verdict]:
    """Stage 9 as far as schedulers see it: EOS and max_tokens."""
    verdicts = {}
    for part in output.scheduled:
        request, ids = part.request, sampled.token_ids.get(part.request.request_id)
        if ids is None:
            continue
        ids = ids[: request.params.max_tokens - request.num_output_tokens]
        if EOS_TOKEN_ID in ids and not request.params.ignore_eos:
            verdicts[request.request_id] = Verdict(ids[: ids.index(EOS_TOKEN_ID) + 1], FinishReason.STOP)
        elif request.num_output_tokens + len(ids) >= request.params.max_tokens:
            verdicts[request.request_id] = Verdict(ids, FinishReason.LENGTH)
        else:
            verdicts[request.request_id] = Verdict(ids)
    return verdicts


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler under test was told to keep."""

    max_num_scheduled_tokens: int = 64
    max_num_running_reqs: int = 8
    max_model_len: int = 1024


@dataclass(slots=True)
class FakeEngine:
    """The engine loop over a scheduler and a cache under test. `num_in_flight` 1 makes every `update` one step late.

    Each step takes `step_s` of the clock's seconds, and a request arrives when it is added unless it says when.
    """

    scheduler: Scheduler
    cache: KVCache
    limits: Limits = field(default_factory=Limits)
    num_in_flight: int = 0
    requests: dict[str, Request] = field(default_factory=dict)  # live ones
    ended: dict[str, Request] = field(default_factory=dict)
    first_scheduled: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_copied: Counter[str] = field(default_factory=Counter)  # blocks to host memory and back: "out", "in"
    clock: FakeClock = field(default_factory=FakeClock)  # the scheduler's own: `SchedulerContext.clock`
    step_s: float = 0.01
    failing: set[str] = field(default_factory=set)  # requests that the next result ends with an error
    windows: tuple[int | None, ...] = (None,)  # as the cache was told
    watcher: StepWatcher | None = None  # told of each step whose results are in
    forces: random.Random | None = None  # how many ids a grammar forces after what is sampled; None: there is none
    _model: FakeModel = field(init=False)
    _builder: BatchBuilder = field(init=False)
    _queue: deque[tuple[Sequence[KVCopy], SchedulerOutput, ModelBatch]] = field(default_factory=deque)
    _num_idle: int = 0
    _num_barren: int = 0

    def __post_init__(self) -> None:
        self._model = FakeModel(self.cache.num_blocks, self.cache.block_size, self.windows)
        self._model.allocate_swap(getattr(self.cache, "num_swap_blocks", 0))
        self._builder = BatchBuilder(self.cache.block_size, self.limits.max_model_len, len(self.windows))

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            request.arrival_time = request.arrival_time or self.clock()
            self.scheduler.add(request)

    def abort(self, *request_ids: str) -> None:
        expected = {request_id for request_id in request_ids if request_id in self.requests}
        got = self.scheduler.finish(request_ids, FinishReason.ABORT)
        assert {request.request_id for request in got} == expected, "abort ended other requests than asked for"
        self._end(got)

    def step(self) -> SchedulerOutput:
        """Plan a step, run it, take in what is due, and check everything."""
        output = self.scheduler.schedule()
        self.num_steps += 1
        self._check_plan(output)
        self._end(output.refused)
        self.preempted += [request.request_id for request in output.preempted]
        copies = self._take_copies()
        for part in output.scheduled if len(self.windows) > 1 else ():
            self.cache.slide(part.request, part.start, part.start + part.num_tokens)
        if not output.is_empty:
            self._queue.append((copies, output, self._builder.build(output)))
        self.clock.advance(self.step_s)
        self._take_in(keep=self.num_in_flight if not output.is_empty else 0)
        if output.is_empty:
            self._model.swap(copies)
        self._check_state()
        return output

    def _take_copies(self) -> Sequence[KVCopy]:
        """Made before the forward pass of the step that was planned with them, and after all before it."""
        if not hasattr(self.cache, "take_copies"):
            return ()
        copies = self.cache.take_copies()
        for one in copies:
            self.num_copied[one.direction] += len(one.host_blocks)
        return copies

    def drain(self, on_step: Callable[[FakeEngine], None] | None = None) -> None:
        """Step until every request has ended, results in flight are taken in and the pool is free again."""
        while self.requests or self._queue:
            self.step()
            if on_step is not None:
                on_step(self)
        assert self.scheduler.counts() == Counts(), "requests are left in the queues"
        assert self.cache.num_free_blocks == self.cache.num_blocks, "blocks were not given back"
        if getattr(self.cache, "num_swap_blocks", 0):
            assert self.cache.num_free_swap_blocks == self.cache.num_swap_blocks, "host blocks were not given back"

    def _take_in(self, keep: int) -> None:
        while len(self._queue) > keep:
            copies, output, batch = self._queue.popleft()
            self._model.swap(copies)
            sampled = self._model.run(batch)
            if self.forces is not None:
                sampled = forced_after(output, sampled, self.forces)
            verdicts = dict(judge(output, sampled))
            failed = self.failing & {part.request.request_id for part in output.scheduled}
            verdicts |= {request_id: Verdict((), FinishReason.ERROR) for request_id in failed}
            self.failing -= failed
            self._num_barren = 0 if any(verdict.token_ids for verdict in verdicts.values()) else self._num_barren + 1
            self._end(self.scheduler.update(output, verdicts))
            if self.watcher is not None:
                self.watcher.step_finished(self._step_time(output, batch))

    def _step_time(self, output: SchedulerOutput, batch: ModelBatch) -> StepTime:
        """A step of decodes takes `step_s`, and twice that with 50 tokens of prompts."""
        num_prefill = batch.num_prefill_tokens
        seconds = self.step_s * (1 + num_prefill / 50)
        return StepTime(num_prefill, output.num_scheduled_tokens - num_prefill, seconds)

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._num_barren = 0
            assert request.is_finished and request.finish_reason is not None, "an ended request has no reason"
            assert request.request_id not in self.ended, f"{request.request_id} ended twice"
            assert not request.block_table, "an ended request holds blocks"
            self.ended[request.request_id] = self.requests.pop(request.request_id)

    def _check_plan(self, output: SchedulerOutput) -> None:
        ids = [part.request.request_id for part in output.scheduled]
        assert len(ids) == len(set(ids)), "a request is scheduled twice in a step"
        assert output.num_scheduled_tokens <= self.limits.max_num_scheduled_tokens, "token budget exceeded"
        assert self.scheduler.counts().running <= self.limits.max_num_running_reqs, "too many running requests"
        for part in output.scheduled:
            request, end = part.request, part.start + part.num_tokens
            assert part.num_tokens > 0 and request.status is RequestStatus.RUNNING
            assert len(request.block_table) * self.cache.block_size >= end, "a scheduled token has no block"
            assert request.num_computed_tokens == end <= self.limits.max_model_len
        self.first_scheduled += [request_id for request_id in ids if request_id not in self.first_scheduled]
        self._check_progress(output)

    def _check_progress(self, output: SchedulerOutput) -> None:
        works = bool(output.scheduled or output.refused or self._queue or not self.requests)
        self._num_idle = 0 if works else self._num_idle + 1
        assert self._num_idle <= MAX_IDLE_STEPS, "requests wait and no step does anything"
        assert self._num_barren <= MAX_BARREN_STEPS, "steps work and no request gets a token"

    def _check_state(self) -> None:
        self.cache.check()
        assert sum(self.scheduler.counts()) == len(self.requests), "a request was lost or invented"
        for request in self.requests.values():
            known = request.num_tokens + request.num_pending_tokens
            assert 0 <= request.num_cached_tokens <= request.num_computed_tokens <= known, "token counts out of order"
            assert (request.status is RequestStatus.RUNNING) == bool(request.block_table), "blocks without running"
            assert request.num_pending_tokens == 0 or self._queue, "ids are pending and no step is in flight"


def drive(
    scheduler: Scheduler,
    cache: KVCache,
    requests: Sequence[Request],
    limits: Limits | None = None,
    num_in_flight: int = 0,
    on_step: Callable[[FakeEngine], None] | None = None,
) -> FakeEngine:
    """Run `requests` to their ends and compare the output of each with its slow twin; refused ones have no output."""
    engine = FakeEngine(scheduler, cache, limits or Limits(), num_in_flight)
    engine.add(*requests)
    engine.drain(on_step)
    assert engine.ended.keys() == {request.request_id for request in requests}
    for request in requests:
        assert_right_output(request)
    return engine


def assert_right_output(request: Request) -> None:
    """Complete when it ran to its own end; a correct beginning when it was ended from outside."""
    expected, got = expected_ids(request), request.output_token_ids
    complete = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert got == (expected if complete else expected[: len(got)]), f"{request.request_id}: {got} is not {expected}"
