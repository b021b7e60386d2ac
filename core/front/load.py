"""What is in flight, counted as it comes and goes: the `Load` that admission looks at costs the same however much that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from core.outputs import StepStats
from core.request import EngineRequest
from core.stages.frontend import Load

HALF_LIFE_S = 10.0  # of what steps say of the throughput, in seconds that the engine worked
KNOWN_AFTER_S = 1.0  # seconds of work under load, before which nothing is said of it
FORGET_OUTPUTS = 0.98  # per sequence that ends: the last fifty count


class Throughput:
    """Tokens per second of the engine's work, over its last steps."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        kept = 0.5 ** (seconds / HALF_LIFE_S)
        self._tokens = self._tokens * kept + num_tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def rate(self) -> float:
        """0.0 while it is not known."""
        return self._tokens / self._seconds if self._seconds >= KNOWN_AFTER_S else 0.0


@dataclass(slots=True)
class _Sequence:
    tenant: str
    num_prompt: int
    num_tokens: int  # prompt and expected output
    queued: bool = True


class LoadMeter:
    """Has no clock and does no I/O: a front feeds it, and so may a simulation.

    A sequence is queued from `add` to `started` (its first token) or `ended`. Unknown ids are ignored.
    """

    def __init__(self) -> None:
        self._sequences: dict[str, _Sequence] = {}
        self._prompt_tokens = self._queued_prompt_tokens = self._queued_tokens = 0
        self._rendering: Counter[str] = Counter()  # sequences by tenant
        self._of_tenant: Counter[str] = Counter()
        self._tokens_of_tenant: Counter[str] = Counter()
        self._stats = StepStats()
        self._all, self._loaded = Throughput(), Throughput()
        self._output_sum = self._output_weight = 0.0

    def step(self, stats: StepStats) -> None:
        """An engine step has ended; or, without requests, the engine tells how it is."""
        self._stats = stats
        if not stats.num_requests:
            return
        num_tokens = stats.num_scheduled_tokens + stats.num_cached_tokens  # found in the cache is done, too
        seconds = max(stats.total_s, 0.0)
        self._all.add(num_tokens, seconds)
        if stats.waiting + stats.swapped:
            self._loaded.add(num_tokens, seconds)

    @contextmanager
    def rendering(self, tenant: str, num_sequences: int) -> Iterator[None]:
        """Sequences that are no more than wanted yet, and have their places while it is found out what their prompts are."""
        self._rendering[tenant] += num_sequences
        try:
            yield
        finally:
            self._rendering[tenant] -= num_sequences
            if not self._rendering[tenant]:
                del self._rendering[tenant]

    def add(self, request: EngineRequest) -> None:
        num_prompt = len(request.prompt_token_ids)
        expected = self.load().expected_output(request.params.max_tokens)
        sequence = _Sequence(request.tenant, num_prompt, num_prompt + expected)
        self._sequences[request.request_id] = sequence
        self._prompt_tokens += num_prompt
        self._queue(sequence, 1)
        self._of_tenant[sequence.tenant] += 1
        self._tokens_of_tenant[sequence.tenant] += sequence.num_tokens

    def started(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.queued:
            sequence.queued = False
            self._queue(sequence, -1)

    def ended(self, request_id: str, num_output: int | None = None) -> None:
        """`num_output`: tokens of a sequence that ended by itself; None for one that was aborted or failed."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if sequence.queued:
            self._queue(sequence, -1)
        self._prompt_tokens -= sequence.num_prompt
        self._of_tenant[sequence.tenant] -= 1
        self._tokens_of_tenant[sequence.tenant] -= sequence.num_tokens
        if not self._of_tenant[sequence.tenant]:
            del self._of_tenant[sequence.tenant], self._tokens_of_tenant[sequence.tenant]
        if num_output is not None:
            self._output_sum = self._output_sum * FORGET_OUTPUTS + num_output
            self._output_weight = self._output_weight * FORGET_OUTPUTS + 1

    def load(self, tenant: str = "") -> Load:
        stats, loaded = self._stats, self._loaded.rate
        return Load(
            in_flight=len(self._sequences) + self._rendering.total(),
            running=stats.running,
            waiting=stats.waiting + stats.swapped,
            prompt_tokens_in_flight=self._prompt_tokens,
            kv_blocks_free=stats.kv_blocks_free,
            kv_blocks_total=stats.kv_blocks_total,
            queued_prompt_tokens=self._queued_prompt_tokens,
            queued_tokens=self._queued_tokens,
            mean_output_tokens=self._output_sum / self._output_weight if self._output_weight else 0.0,
            # Without load it does less than it could, unless it did more than what is known of it.
            tokens_per_s=max(loaded, self._all.rate) if loaded else 0.0,
            tenant=tenant,
            tenant_in_flight=self._of_tenant[tenant] + self._rendering[tenant] if tenant else 0,
            tenant_tokens_in_flight=self._tokens_of_tenant[tenant] if tenant else 0,
            num_tenants=len(self._of_tenant),
        )

    def _queue(self, sequence: _Sequence, sign: int) -> None:
        self._queued_prompt_tokens += sign * sequence.num_prompt
        self._queued_tokens += sign * sequence.num_tokens
