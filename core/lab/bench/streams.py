"""Workloads whose requests differ: some share a prefix, one comes late and is long, some have a grammar."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from pydantic import Field

from core.errors import NonetError
from core.lab.bench.calls import Call, WorkItem
from core.lab.bench.figures import Report, known, measured, middle, throughput, whole
from core.lab.bench.load import Load
from core.lab.bench.workload import WorkloadSettings

WATCH_S = 0.005  # between two looks at streams that are to be under way


class SharedPrefix:
    """Groups of requests that begin alike, such as with one system prompt: what the prefix cache saves of TTFT."""

    class Settings(WorkloadSettings):
        groups: int = Field(default=4, ge=1, le=1000)
        group_size: int = Field(default=4, ge=2, le=1000, description="requests of a group; the first finds nothing")
        prefix_len: int = Field(default=512, ge=1, description="tokens that a group shares")
        suffix_len: int = Field(default=32, ge=1, description="tokens of a request's own")
        output_len: int = Field(default=16, ge=1)
        concurrency: int = Field(default=1, ge=1, le=4096, description="requests in flight at once")

    def __init__(self, settings: Settings):
        self.settings = settings

    @property
    def num_calls(self) -> int:
        return self.settings.groups * self.settings.group_size

    async def run(self, load: Load) -> Report:
        s, draw = self.settings, load.prompts
        await load.warm(draw.items(s.warmup, s.prefix_len + s.suffix_len, s.output_len))
        prefixes = [draw.ids(s.prefix_len) for _ in range(s.groups)]
        passes = [
            [WorkItem([*p, *draw.ids(s.suffix_len)], s.output_len) for p in prefixes] for _ in range(s.group_size)
        ]
        started = time.perf_counter()
        first = await load.closed(passes[0], s.concurrency)
        later = await load.closed([item for items in passes[1:] for item in items], s.concurrency)
        report = throughput([*first, *later], time.perf_counter() - started)
        without, found = (measured(call.ttft for call in calls if not call.error) for calls in (first, later))
        headline = known(
            prefix_hit_share=hit_share([*first, *later]),
            ttft_without_hit_s=without.get("p50"),
            ttft_with_hit_s=found.get("p50"),
        )
        return {"headline": headline, **report, "ttft_without_hit_s": without, "ttft_with_hit_s": found}


def hit_share(calls: Sequence[Call]) -> float | None:
    """Prompt tokens that were found in the prefix cache, of all; None where nobody says."""
    told = [call for call in calls if call.num_cached_tokens is not None and not call.error]
    if not told:
        return None
    return sum(call.num_cached_tokens or 0 for call in told) / max(sum(call.num_prompt_tokens for call in told), 1)


class LongPrefill:
    """A long prompt arrives while streams run: how long their users wait for a token, and when its own first one comes."""

    class Settings(WorkloadSettings):
        streams: int = Field(default=8, ge=1, le=4096)
        input_len: int = Field(default=32, ge=1, description="tokens of a stream's prompt")
        output_len: int = Field(default=192, ge=4, description="tokens of a stream")
        before: int = Field(default=48, ge=2, description="tokens that each stream has when the prompt arrives")
        prompt_len: int = Field(default=1500, ge=1, description="tokens of the long prompt")
        prompt_output_len: int = Field(default=8, ge=1, description="tokens of its answer")

    def __init__(self, settings: Settings):
        self.settings = settings

    @property
    def num_calls(self) -> int:
        return self.settings.streams + 1

    async def run(self, load: Load) -> Report:
        s, draw = self.settings, load.prompts
        await load.warm(draw.items(s.warmup, s.prompt_len, s.prompt_output_len))
        streams = [Call(item) for item in draw.items(s.streams, s.input_len, s.output_len)]
        long, started = Call(draw.item(s.prompt_len, s.prompt_output_len)), time.perf_counter()
        tasks = [asyncio.create_task(load.one(stream)) for stream in streams]
        while any(len(one.arrivals) < s.before and not task.done() for one, task in zip(streams, tasks, strict=True)):
            await asyncio.sleep(WATCH_S)
        await load.one(long)
        await asyncio.gather(*tasks)
        return self._report(streams, long, time.perf_counter() - started)

    def _report(self, streams: Sequence[Call], long: Call, wall_s: float) -> Report:
        """Raises NonetError where the long prompt was not answered, or no stream was there to notice it."""
        (answered,), running = whole([long]), [stream for stream in whole(streams) if stream.arrivals]
        if not running:
            raise NonetError("no stream had an event")
        first = answered.arrivals[0] if answered.arrivals else answered.ended
        under_way = max(stream.arrivals[min(self.settings.before, len(stream.arrivals)) // 2] for stream in running)
        before = gaps_between(running, under_way, answered.sent)
        beside = gaps_between(running, answered.sent, first)
        if not beside:
            raise NonetError("every stream had ended when the long prompt came; raise output_len, or lower before")
        headline = known(
            worst_gap_s=max(beside), itl_before_s=middle(before), itl_beside_s=median(beside), long_ttft_s=answered.ttft
        )
        ended = sum(stream.arrivals[-1] < first for stream in running)
        more = {"gaps_before_s": measured(before), "gaps_beside_s": measured(beside), "streams_ended_before": ended}
        return {"headline": headline, **throughput([*streams, long], wall_s), **more}


def gaps_between(calls: Sequence[Call], start: float, end: float) -> list[float]:
    """Waits for a token that lie in part, or wholly, between two moments."""
    return [late - early for call in calls for early, late in call.gaps if late > start and early < end]


class Structured:
    """Streams whose answer a JSON schema binds, and the same without, in turns: what a grammar costs per token."""

    class Settings(WorkloadSettings):
        streams: int = Field(default=8, ge=1, le=4096)
        input_len: int = Field(default=40, ge=1)
        output_len: int = Field(default=96, ge=2)
        rounds: int = Field(default=3, ge=1, le=1000, description="of each kind; the ratio is their median")
        warmup: int = Field(
            default=1, ge=0, le=1000, description="rounds of each kind that are run first and not counted"
        )

    def __init__(self, settings: Settings):
        self.settings = settings

    @property
    def num_calls(self) -> int:
        return 2 * self.settings.streams * (self.settings.rounds + self.settings.warmup)

    async def run(self, load: Load) -> Report:
        from core.lab.grammar_cost import ENDLESS  # with an engine, which a client of a server is better without

        s, plain, bound, calls = self.settings, list[float](), list[float](), list[Call]()
        started = time.perf_counter()
        for number in range(s.warmup + s.rounds):
            if number == s.warmup:
                load.target.counting()
                started = time.perf_counter()
            streams = [
                replace(item, temperature=1.0, seed=index)
                for index, item in enumerate(load.prompts.items(s.streams, s.input_len, s.output_len))
            ]
            for kind, items in ((plain, streams), (bound, [replace(item, schema=ENDLESS) for item in streams])):
                done = await load.closed(items, len(items))
                took = middle(call.tpot for call in whole(done))
                if number >= s.warmup and took is not None:
                    kind.append(took)
                    calls += done
        if not plain or not bound:
            raise NonetError("no stream had two tokens, so there is no time per token to compare")
        ratios = [with_schema / without for without, with_schema in zip(plain, bound, strict=True)]
        headline = {"schema_ratio": median(ratios), "tpot_plain_s": median(plain), "tpot_schema_s": median(bound)}
        return {"headline": headline, **throughput(calls, time.perf_counter() - started), "ratios": ratios}
