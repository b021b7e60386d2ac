"""`observers: prometheus`. Metrics labelled by the nine stages' own words; times in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict

from core.components import STAGES
from core.front.spans import StageSeconds
from core.grammar.figures import COMPILE_SECONDS, GrammarFigures
from core.observers import ObserverContext
from core.outputs import RequestRecord, StepStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
IN_STEPS = tuple(each.name for each in fields(StageSeconds))
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(slots=True)
class Steps:
    """Sums of some steps."""

    last: StepStats | None = None
    count: int = 0
    preemptions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    scheduled_tokens: int = 0
    prefill_tokens: int = 0
    seconds: StageSeconds = field(default_factory=StageSeconds)

    def add(self, stats: StepStats) -> None:
        self.last = stats
        self.swapped_out_blocks += stats.num_swapped_out_blocks
        self.swapped_in_blocks += stats.num_swapped_in_blocks
        if stats.num_requests:
            self.count += 1
            self.preemptions += stats.num_preemptions
            self.prefix_query_tokens += stats.num_queried_tokens
            self.prefix_hit_tokens += stats.num_cached_tokens
            self.scheduled_tokens += stats.num_scheduled_tokens
            self.prefill_tokens += stats.num_prefill_tokens
            self.seconds.add(stats)


class Metrics:
    """One registry per front process.

    Rule for ended requests: every request is counted once, by the finish reason of each choice, also aborted and failed
    ones; the token counters count what was generated for it until then. So both families always agree.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: ObserverContext) -> None:
        self.registry = CollectorRegistry()
        self._steps = Steps()  # not shown yet
        self._gauges()
        self._counters()
        self._histograms()
        self.registry.register(DroppedRecords(context.dropped))
        self.registry.register(GrammarCosts(context.grammars))

    def _gauges(self) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"nonet_{name}", text, registry=self.registry)

        self.running = gauge("requests_running", "sequences in the running batch")
        self.waiting = gauge("requests_waiting", "sequences waiting, preempted ones included but for swapped ones")
        self.swapped = gauge("requests_swapped", "preempted sequences with KV in host memory")
        self.blocks_free = gauge("kv_blocks_free", "KV blocks free, or cached and evictable")
        self.blocks_total = gauge("kv_blocks_total", "KV blocks in the pool")
        self.swap_blocks_free = gauge("swap_blocks_free", "host memory for KV: blocks that nobody needs")
        self.swap_blocks_total = gauge("swap_blocks_total", "host memory for KV: blocks in all")

    def _counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"nonet_{name}", text, labels, registry=self.registry)

        self.steps = counter("steps", "engine steps")
        self.preemptions = counter("preemptions", "sequences preempted")
        self.swapped_out_blocks = counter("swapped_out_blocks", "KV blocks copied to host memory")
        self.swapped_in_blocks = counter("swapped_in_blocks", "KV blocks copied back from host memory")
        self.scheduled_tokens = counter("scheduled_tokens", "tokens run through the model", "stage")
        self.stage_seconds = counter("stage_seconds", "time spent, by stage", "stage")
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens of ended requests")
        self.cached_tokens = counter("cached_prompt_tokens", "of those, found in the prefix cache")
        self.prefix_query_tokens = counter("prefix_query_tokens", "prompt tokens looked up in the prefix cache")
        self.prefix_hit_tokens = counter("prefix_hit_tokens", "of those, found there")
        self.generation_tokens = counter("generation_tokens", "generated tokens of ended requests")
        self.finished = counter("requests_finished", "choices ended, by reason", "finish_reason")
        self._prefill_tokens, self._decode_tokens = map(self.scheduled_tokens.labels, ("prefill", "decode"))
        self._seconds = {stage: self.stage_seconds.labels(stage) for stage in STAGES}

    def _histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"nonet_{name}_seconds", text, buckets=buckets, registry=self.registry)

        self.ttft = histogram("time_to_first_token", "arrival to first token", SECONDS)
        self.tpot = histogram("time_per_output_token", "mean time per token after the first", TOKEN_SECONDS)
        self.e2e = histogram("request_latency", "arrival to the end", SECONDS)
        self.queue = histogram("request_queue", "arrival to first scheduling", SECONDS)

    def step_finished(self, stats: StepStats) -> None:
        self._steps.add(stats)

    def flush(self) -> None:
        """Bring the registry up to date; once per batch of steps, since its counters are dear."""
        if self._steps.last is not None:
            steps, self._steps = self._steps, Steps()
            self._show(steps, steps.last or StepStats())

    def _show(self, steps: Steps, last: StepStats) -> None:
        self.running.set(last.running)
        self.waiting.set(last.waiting)
        self.swapped.set(last.swapped)
        self.blocks_free.set(last.kv_blocks_free)
        self.blocks_total.set(last.kv_blocks_total)
        self.swap_blocks_free.set(last.swap_blocks_free)
        self.swap_blocks_total.set(last.swap_blocks_total)
        counts = {
            self.steps: steps.count,
            self.preemptions: steps.preemptions,
            self.swapped_out_blocks: steps.swapped_out_blocks,
            self.swapped_in_blocks: steps.swapped_in_blocks,
            self.prefix_query_tokens: steps.prefix_query_tokens,
            self.prefix_hit_tokens: steps.prefix_hit_tokens,
            self._prefill_tokens: steps.prefill_tokens,
            self._decode_tokens: steps.scheduled_tokens - steps.prefill_tokens,
            **{self._seconds[stage]: getattr(steps.seconds, stage) for stage in IN_STEPS},
        }
        for counter, value in counts.items():
            counter.inc(max(value, 0))  # a clock may have stepped back (bugs P4)

    def add_frontend_seconds(self, seconds: float) -> None:
        """Stage 1's own time, which only the frontend knows: reading requests and writing answers, waiting not counted."""
        self._seconds["frontend"].inc(max(seconds, 0.0))

    def request_finished(self, record: RequestRecord) -> None:
        self.prompt_tokens.inc(record.usage.prompt_tokens)
        self.cached_tokens.inc(record.usage.cached_tokens)
        self.generation_tokens.inc(record.usage.completion_tokens)
        self._seconds["renderer"].inc(max(record.render_s, 0.0))
        self._seconds["admission"].inc(max(record.admit_s, 0.0))
        for reason in record.finish_reasons:
            self.finished.labels(reason.value).inc()
        timings = record.timings
        for histogram, value in (
            (self.ttft, timings.ttft),
            (self.tpot, timings.tpot),
            (self.e2e, timings.e2e),
            (self.queue, timings.queue),
        ):
            if value is not None:
                histogram.observe(max(value, 0.0))

    def close(self) -> None:
        self.flush()

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


class DroppedRecords(Collector):
    """What observers missed, read when somebody asks."""

    def __init__(self, dropped: Callable[[], Mapping[str, int]]):
        self._dropped = dropped

    def collect(self) -> Iterator[CounterMetricFamily]:
        text = "records that an observer was too slow to see"
        family = CounterMetricFamily("nonet_observer_dropped_records", text, labels=("observer",))
        for name, count in self._dropped().items():
            family.add_metric((name,), count)
        yield family


class GrammarCosts(Collector):
    """What grammars cost, read when somebody asks."""

    def __init__(self, figures: GrammarFigures):
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        known = self._figures
        yield self._seconds()
        for name, text, count in (
            ("cache_hits", "requests whose grammar was compiled already, or was being compiled", known.hits),
            ("cache_misses", "requests whose grammar had to be compiled", known.misses),
            (
                "lost_processes",
                "processes lost over a grammar: too slow, too much memory, a crash",
                known.lost_processes,
            ),
        ):
            yield CounterMetricFamily(f"nonet_grammar_{name}", text, value=count)
        refused = CounterMetricFamily("nonet_grammar_refusals", "requests whose grammar was refused", labels=("code",))
        for code, count in tuple(known.refused.items()):
            refused.add_metric((code,), count)
        yield refused
        taken = CounterMetricFamily("nonet_grammar_compiled", "grammars by who compiled them", labels=("backend",))
        for backend, count in tuple(known.taken.items()):
            taken.add_metric((backend,), count)
        yield taken
        yield GaugeMetricFamily(
            "nonet_grammar_cache_bytes", "of compiled and refused grammars", value=known.cached_bytes
        )
        yield GaugeMetricFamily("nonet_grammar_cache_entries", "compiled and refused grammars", value=known.cached)

    def _seconds(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily("nonet_grammar_compile_seconds", "compiling one grammar, refused ones included")
        counts = list(accumulate(self._figures.compiled))
        bounds = [*map(str, COMPILE_SECONDS), "+Inf"]
        family.add_metric((), list(zip(bounds, counts, strict=True)), self._figures.compile_s)
        return family
