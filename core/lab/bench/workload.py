"""What a workload is, and those whose requests are all alike."""

from __future__ import annotations

import time
from typing import ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field

from core.lab.bench.calls import WorkItem
from core.lab.bench.figures import Report, known, quantiles, throughput
from core.lab.bench.load import Load
from core.lab.bench.prompts import Prompts


class WorkloadSettings(BaseModel):
    """Lengths in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    seed: int = Field(default=0, description="of lengths, prompts and arrivals")
    warmup: int = Field(default=1, ge=0, le=1000, description="requests that are run first and not counted")


class Workload(Protocol):
    """One load. A class of it has a name in `core.lab.bench.workloads` and one line that says what it is for."""

    Settings: ClassVar[type[WorkloadSettings]]

    @property
    def settings(self) -> WorkloadSettings: ...

    @property
    def num_calls(self) -> int:
        """That a progress bar counts."""
        ...

    async def run(self, load: Load) -> Report:
        """One round, after its warm-up. Raises NonetError where nothing was answered."""
        ...


class LengthSettings(WorkloadSettings):
    num_requests: int = Field(default=16, ge=1, le=100_000)
    input_len: int = Field(default=128, ge=1, description="tokens of a prompt")
    output_len: int = Field(default=64, ge=1, description="tokens of an answer")


class Closed:
    """So many requests in flight at any time: `concurrency` clients, each of which sends its next when it has its answer."""

    class Settings(LengthSettings):
        concurrency: int = Field(default=16, ge=1, le=4096, description="requests in flight at once")

    def __init__(self, settings: Settings):
        self.settings = settings

    @property
    def num_calls(self) -> int:
        return self.settings.num_requests

    async def run(self, load: Load) -> Report:
        s = self.settings
        items = load.prompts.items(s.num_requests + s.warmup, s.input_len, s.output_len)
        await load.warm(items[: s.warmup])
        started = time.perf_counter()
        calls = await load.closed(items[s.warmup :], s.concurrency)
        return served(throughput(calls, time.perf_counter() - started))


class Open:
    """Arrivals that wait for nobody: a Poisson process of `rate` requests per second."""

    class Settings(LengthSettings):
        rate: float = Field(default=1.0, gt=0, description="requests per second")

    def __init__(self, settings: Settings):
        self.settings = settings

    @property
    def num_calls(self) -> int:
        return self.settings.num_requests

    async def run(self, load: Load) -> Report:
        s = self.settings
        items = load.prompts.items(s.num_requests + s.warmup, s.input_len, s.output_len)
        await load.warm(items[: s.warmup])
        started = time.perf_counter()
        calls = await load.arriving(items[s.warmup :], s.rate)
        return served(throughput(calls, time.perf_counter() - started))


class Single:
    """One stream after another: what one user gets, whose tokens cost a read of all weights each."""

    class Settings(LengthSettings):
        num_requests: int = Field(default=4, ge=1, le=100_000)
        input_len: int = Field(default=64, ge=1, description="tokens of a prompt")
        output_len: int = Field(default=128, ge=1, description="tokens of an answer")

    def __init__(self, settings: Settings):
        self.settings = settings

    @property
    def num_calls(self) -> int:
        return self.settings.num_requests

    async def run(self, load: Load) -> Report:
        s = self.settings
        items = load.prompts.items(s.num_requests + s.warmup, s.input_len, s.output_len)
        await load.warm(items[: s.warmup])
        started = time.perf_counter()
        report = throughput(await load.closed(items[s.warmup :], 1), time.perf_counter() - started)
        ttft, tpot = report["ttft_s"].get("p50"), report["tpot_s"].get("p50")
        headline = known(
            decode_tokens_per_s=1 / tpot if tpot else None,
            prefill_tokens_per_s=report["prompt_tokens"] / report["num_requests"] / ttft if ttft else None,
            ttft_p50_s=ttft,
        )
        return {"headline": headline, **report}


class Offline:
    """All requests at once, of mixed lengths: how soon a batch of work is done."""

    class Settings(WorkloadSettings):
        num_requests: int = Field(default=32, ge=1, le=100_000)
        min_input_len: int = Field(default=32, ge=1)
        max_input_len: int = Field(default=384, ge=1)
        min_output_len: int = Field(default=32, ge=1)
        max_output_len: int = Field(default=192, ge=1)

    def __init__(self, settings: Settings):
        self.settings = settings

    @property
    def num_calls(self) -> int:
        return self.settings.num_requests

    def items(self, draw: Prompts) -> list[WorkItem]:
        s, items = self.settings, []
        for _ in range(s.num_requests):
            input_len = draw.length(s.min_input_len, max(s.min_input_len, s.max_input_len))
            output_len = draw.length(s.min_output_len, max(s.min_output_len, s.max_output_len))
            items.append(draw.item(input_len, output_len))
        return items

    async def run(self, load: Load) -> Report:
        s, draw = self.settings, load.prompts
        items = self.items(draw)
        await load.warm(draw.items(s.warmup, s.min_input_len, s.min_output_len))
        started = time.perf_counter()
        calls = await load.closed(items, len(items))
        report = throughput(calls, time.perf_counter() - started)
        rates = {name: report[name] for name in ("output_tokens_per_s", "total_tokens_per_s")}
        return {"headline": {**rates, **quantiles(report, "ttft_p50_s", "tpot_p50_s")}, **report}


def served(report: Report) -> Report:
    """With the headline of a load on a server."""
    latencies = quantiles(report, "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
    return {"headline": {"output_tokens_per_s": report["output_tokens_per_s"], **latencies}, **report}
