"""Prometheus metrics as an observer: labelled by the nine stages' own words. Times in seconds."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from core.hookspecs import hookimpl
from core.outputs import RequestRecord, StepStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """One registry per front process.

    Rule for ended requests: every request is counted once, by the finish reason of each choice, also aborted and failed
    ones; the token counters count what was generated for it until then. So both families always agree.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges()
        self._counters()
        self._histograms()

    def _gauges(self) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"nonet_{name}", text, registry=self.registry)

        self.running = gauge("requests_running", "sequences in the running batch")
        self.waiting = gauge("requests_waiting", "sequences waiting, preempted ones included")
        self.blocks_free = gauge("kv_blocks_free", "KV blocks free, or cached and evictable")
        self.blocks_total = gauge("kv_blocks_total", "KV blocks in the pool")

    def _counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"nonet_{name}", text, labels, registry=self.registry)

        self.steps = counter("steps", "engine steps")
        self.preemptions = counter("preemptions", "sequences preempted")
        self.scheduled_tokens = counter("scheduled_tokens", "tokens run through the model", "stage")
        self.stage_seconds = counter("stage_seconds", "time spent, by stage", "stage")
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens of ended requests")
        self.cached_tokens = counter("cached_prompt_tokens", "of those, found in the prefix cache")
        self.prefix_hit_tokens = counter("prefix_hit_tokens", "prompt tokens that steps found in the prefix cache")
        self.generation_tokens = counter("generation_tokens", "generated tokens of ended requests")
        self.finished = counter("requests_finished", "choices ended, by reason", "finish_reason")

    def _histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"nonet_{name}_seconds", text, buckets=buckets, registry=self.registry)

        self.ttft = histogram("time_to_first_token", "arrival to first token", SECONDS)
        self.tpot = histogram("time_per_output_token", "mean time per token after the first", TOKEN_SECONDS)
        self.e2e = histogram("request_latency", "arrival to the end", SECONDS)
        self.queue = histogram("request_queue", "arrival to first scheduling", SECONDS)

    @hookimpl
    def step_finished(self, stats: StepStats) -> None:
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.blocks_free.set(stats.kv_blocks_free)
        self.blocks_total.set(stats.kv_blocks_total)
        if not stats.num_requests:
            return
        self.steps.inc()
        self.preemptions.inc(stats.num_preemptions)
        self.prefix_hit_tokens.inc(stats.num_cached_tokens)
        self.scheduled_tokens.labels("prefill").inc(stats.num_prefill_tokens)
        self.scheduled_tokens.labels("decode").inc(stats.num_scheduled_tokens - stats.num_prefill_tokens)
        self._add_stage_seconds(stats)

    def add_frontend_seconds(self, seconds: float) -> None:
        """Stage 1's own time, which only the frontend knows: reading requests and writing answers, waiting not counted."""
        self.stage_seconds.labels("frontend").inc(max(seconds, 0.0))

    def _add_stage_seconds(self, stats: StepStats) -> None:
        # The forward pass is shared by stages 5 and 6: split by their tokens.
        prefill_share = stats.num_prefill_tokens / max(stats.num_scheduled_tokens, 1)
        model_s = max(stats.build_s + stats.forward_s, 0.0)
        seconds = {
            "scheduler": stats.schedule_s,
            "prefill": model_s * prefill_share,
            "decode": model_s * (1 - prefill_share),
            "sampler": stats.sample_s,
            "completion": stats.output_s,
            "detokenizer": stats.detokenize_s,
        }
        for stage, value in seconds.items():
            self.stage_seconds.labels(stage).inc(max(value, 0.0))

    @hookimpl
    def request_finished(self, record: RequestRecord) -> None:
        self.prompt_tokens.inc(record.usage.prompt_tokens)
        self.cached_tokens.inc(record.usage.cached_tokens)
        self.generation_tokens.inc(record.usage.completion_tokens)
        self.stage_seconds.labels("renderer").inc(max(record.render_s, 0.0))
        self.stage_seconds.labels("admission").inc(max(record.admit_s, 0.0))
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

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)
