"""A real server under more than it can do: `python -m core.lab.overload [PIECE …] [key=value …]`, all pieces without a name.

Each piece starts `serve` with a small random model (`tiny=false`: the preset's own), and is its client. The server shares the
machine with the client, so figures are those of a busy machine. Other words go to the server's config (`admission.…=`).

- `rates`: open arrivals at shares of what the server can do; TTFT of what was accepted, refusals as both sides count them,
  goodput: answers whose first token came within the queue's limit and a second (F40, R7)
- `burst`: many at once into a short queue; how soon a refusal comes, and what memory does (F41)
- `long_prompt`: what 16 streams notice of a prompt of 8,192 tokens that comes while they run (F43)

Exits with 1 where a piece finds what must not be; its docstring says what that is. All else is printed, to be read.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from core.errors import near_matches
from core.simulation.metrics import quantile
from core.testing.harness.http_calls import COMPLETIONS, completion_body, connected, idle_metrics
from core.testing.harness.server import RunningServer, memory_bytes, metric

MAX_RUNNING = 16
LEAST_GOODPUT = 0.9  # R7, F40
MOST_REFUSAL_S = 0.1  # R7, F41
MOST_OVER = 1.25  # times the target: by what steps took so far, a step is known no better
LEAST_CHUNK = 16  # tokens: `target_tpot` asks for no fewer
# A step of it takes far longer than what front and client do for one: the engine is what is overloaded.
SLOW: Mapping[str, int] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}


@dataclass(frozen=True, slots=True)
class Options:
    """Times in seconds."""

    tiny: bool = True
    seconds: float = 20.0  # of arrivals, at each rate
    queue_time: float = 2.0  # admission.max_queue_time
    rounds: int = 3
    burst: int = 1000
    queue: int = 128
    streams: int = 16
    words: tuple[str, ...] = ()  # for the server's config


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a piece: its figures, and what is not as it must be."""

    figures: str
    flaws: tuple[str, ...] = ()


@dataclass(slots=True)
class Call:
    """One streamed call as its client saw it. Moments are monotonic seconds."""

    sent: float
    status: int = 0
    tokens: list[float] = field(default_factory=list)
    ended: float = 0.0
    whole: bool = False
    error: str = ""  # code of the one that ended its stream, or what became of its connection

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [late - early for early, late in zip(self.tokens, self.tokens[1:], strict=False)]


async def call(client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, made: Call | None = None) -> Call:
    made = made or Call(time.monotonic())
    body = completion_body(prompt, max_tokens, stream=True, stream_interval=1)
    try:
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            made.status = answer.status_code
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    _take(made, json.loads(line[6:]))
                made.whole = made.whole or line == "data: [DONE]"
    except httpx.HTTPError as error:
        made.error = type(error).__name__
    made.ended = time.monotonic()
    return made


def _take(made: Call, event: dict[str, Any]) -> None:
    if "error" in event:
        made.error = event["error"]["code"]
    elif event["choices"][0]["token_ids"]:
        made.tokens.append(time.monotonic())


def server(options: Options, folder: Path, *words: str, sizes: Mapping[str, int] = SLOW) -> RunningServer:
    fixed = [f"scheduler.max_num_running_reqs={MAX_RUNNING}", "frontend.limits.connections=4096"]
    fixed += ["frontend.limits.idle_seconds=60"]  # longer than the client keeps a connection
    if options.tiny:
        from core.testing.tiny_models import make_tiny_model

        tiny = folder / f"random-{sizes.get('hidden_size', 0)}"
        if not tiny.exists():
            values: dict[str, Any] = {"max_position_embeddings": 16_384, **sizes}
            make_tiny_model(tiny, **values)
        fixed += [f"model.source={tiny}", "executor.num_threads=1", "cache.num_blocks=4096"]
    return RunningServer([*fixed, *words, *options.words])


def draw_lengths(rng: random.Random) -> tuple[int, int]:
    """Conversations, a quarter as long: p50 of 255 and 32 tokens with their long tails."""
    return min(int(rng.lognormvariate(5.54, 0.6)) + 2, 2000), min(int(rng.lognormvariate(3.47, 0.8)) + 1, 400)


def draw_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(33, 290) for _ in range(length)]


# --- rates -----------------------------------------------------------------------------------------------------------


async def capacity(client: httpx.AsyncClient, seconds: float) -> float:
    """Answers per second while twice as many as can run are always there."""
    rng, ends, stop = random.Random(0), list[float](), time.monotonic() + seconds

    async def one_after_the_other() -> None:
        while time.monotonic() < stop:
            num_prompt, num_output = draw_lengths(rng)
            made = await call(client, draw_prompt(rng, num_prompt), num_output)
            ends.extend([made.ended] if made.whole else [])
            await asyncio.sleep(0.0 if made.whole else 0.5)

    started = time.monotonic()
    await asyncio.gather(*(one_after_the_other() for _ in range(2 * MAX_RUNNING)))
    half = [end for end in ends if end > started + seconds / 2 and end <= stop]  # the first steps are slow
    return len(half) / (seconds / 2)


async def arrivals(client: httpx.AsyncClient, rate: float, seconds: float, seed: int) -> list[Call]:
    rng, tasks, at = random.Random(seed), list[asyncio.Task[Call]](), time.monotonic()
    stop = at + seconds
    while (at := at + rng.expovariate(rate)) < stop:
        num_prompt, num_output = draw_lengths(rng)
        prompt = draw_prompt(rng, num_prompt)
        await asyncio.sleep(max(at - time.monotonic(), 0.0))
        tasks.append(asyncio.create_task(call(client, prompt, num_output, Call(at))))  # late clients count as waiting
    return await asyncio.gather(*tasks)


async def rates(options: Options, folder: Path) -> Found:
    """Must be: goodput at 1.5 times what it can do no less than `LEAST_GOODPUT` of that at 1.0 times, and as many 503 counted
    as clients have seen."""
    found, flaws = dict[float, float](), list[str]()
    with server(options, folder, f"admission.max_queue_time={options.queue_time}") as running:
        async with connected(running) as client:
            able = await capacity(client, options.seconds)
            print(f"capacity {able:.2f} answers/s; queue limit {options.queue_time:g} s")
            for number, share in enumerate((0.5, 0.9, 1.0, 1.5, 3.0)):
                before = await _refused(client)
                calls = await arrivals(client, share * able, options.seconds, number)
                found[share], counted = _good(calls, options), await _refused(client) - before
                print(_rate_line(share, calls, found[share], counted), flush=True)
                flaws += flaws_of_counts(f"{share}x", calls, counted)
    figures = f"goodput at 1.5x is {found[1.5] / max(found[1.0], 1e-9):.0%} of that at 1.0x"
    return Found(figures, (*flaws, *flaws_of_goodput(found)))


def flaws_of_goodput(found: Mapping[float, float]) -> list[str]:
    """`found`: good answers per second, at shares of what the server can do."""
    least = LEAST_GOODPUT * found[1.0]
    if not found[1.0]:
        return ["nothing was served in time at 1.0x"]
    return [] if found[1.5] >= least else [f"goodput at 1.5x is {found[1.5]:.2f}/s, and must be {least:.2f}/s"]


def flaws_of_counts(when: str, calls: Sequence[Call], counted: int) -> list[str]:
    seen = sum(made.status == 503 for made in calls)
    return [] if seen == counted else [f"{when}: clients saw {seen} refusals, and the server counted {counted}"]


async def _refused(client: httpx.AsyncClient) -> int:
    return int(metric(await idle_metrics(client, 60), "nonet_http_requests_total", status="503"))


def _good(calls: Sequence[Call], options: Options) -> float:
    in_time = [made for made in calls if made.whole and made.ttft <= options.queue_time + 1.0]
    return len(in_time) / options.seconds


def _rate_line(share: float, calls: Sequence[Call], good: float, counted: int) -> str:
    ttfts, refused = sorted(c.ttft for c in calls if c.whole), [c for c in calls if c.status == 503]
    told = sorted(made.ended - made.sent for made in refused) or [0.0]
    others = dict(Counter(c.error or str(c.status) for c in calls if not c.whole and c.status != 503))
    return (
        f"{share:.1f}x  {len(calls):5} calls  goodput {good:6.2f}/s  TTFT p50 {quantile(ttfts, 0.5):5.2f} "
        f"p99 {quantile(ttfts, 0.99):5.2f} s  503: {len(refused)} seen, {counted} counted, "
        f"after {1000 * quantile(told, 0.99):.0f} ms (p99)  otherwise failed: {others or 0}"
    )


# --- burst -----------------------------------------------------------------------------------------------------------


async def burst(options: Options, folder: Path) -> Found:
    """All at once, then one after the other into the queue while it is full.

    Must be: a queue full is served and all others get 503, as many as the server counted; one call into the full queue is told
    within `MOST_REFUSAL_S` (p99).
    """
    words = (f"admission.max_waiting={options.queue}", "admission.max_in_flight=4096", "admission.max_queue_time=null")
    memory, flaws = list[int](), list[str]()
    with server(options, folder, *words, "admission.queue_timeout=null", sizes={}) as running:
        async with connected(running) as client:
            await asyncio.gather(*(call(client, draw_prompt(random.Random(1), 20), 4) for _ in range(64)))
            for number in range(options.rounds):
                rng, before = random.Random(number), await _refused(client)
                calls = await asyncio.gather(*(call(client, draw_prompt(rng, 60), 120) for _ in range(options.burst)))
                counted, served = await _refused(client) - before, sum(made.whole for made in calls)
                memory.append(memory_bytes(running.pid))
                flaws += flaws_of_burst(number, calls, counted, options)
                print(
                    f"round {number}: {served} served, {_told(calls)}, {counted} counted; memory {memory[-1] >> 20} MiB",
                    flush=True,
                )
            probes = await _probes(client, options)
    print(f"into the full queue, one after the other: {_told(probes)}")
    growth = (memory[-1] - memory[0]) / 2**20
    figures = f"burst: memory {growth:+.1f} MiB over {options.rounds} rounds; {_told(probes)}"
    return Found(figures, (*flaws, *flaws_of_probes(probes)))


def flaws_of_burst(number: int, calls: Sequence[Call], counted: int, options: Options) -> list[str]:
    served, refused = sum(made.whole for made in calls), sum(made.status == 503 for made in calls)
    flaws = flaws_of_counts(f"round {number}", calls, counted)
    if served < min(options.queue, len(calls)):
        flaws.append(f"round {number}: {served} were served, and the queue holds {options.queue}")
    if served + refused != len(calls):
        flaws.append(f"round {number}: {len(calls) - served - refused} calls were neither served nor refused")
    return flaws


def flaws_of_probes(probes: Sequence[Call]) -> list[str]:
    times = sorted(made.ended - made.sent for made in probes if made.status == 503)
    if not times:
        return ["no call was refused by the full queue"]
    late = quantile(times, 0.99)
    return (
        []
        if late < MOST_REFUSAL_S
        else [f"a refusal took {1000 * late:.0f} ms (p99), {1000 * MOST_REFUSAL_S:.0f} at most"]
    )


async def _probes(client: httpx.AsyncClient, options: Options, count: int = 200) -> list[Call]:
    rng, fill = random.Random(7), options.queue + MAX_RUNNING
    streams = [Call(time.monotonic()) for _ in range(2 * fill)]
    tasks = [asyncio.create_task(call(client, draw_prompt(rng, 20), 2000, made)) for made in streams]
    while sum(made.status == 503 for made in streams) < fill:
        await asyncio.sleep(0.05)
    probes = [await call(client, draw_prompt(rng, 60), 24) for _ in range(count)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return probes


def _told(calls: Sequence[Call]) -> str:
    times = sorted(1000 * (made.ended - made.sent) for made in calls if made.status == 503)
    if not times:
        return "0 refused"
    return f"{len(times)} refused after p50 {quantile(times, 0.5):.0f}, p99 {quantile(times, 0.99):.0f} ms"


# --- a long prompt ---------------------------------------------------------------------------------------------------


async def long_prompt(options: Options, folder: Path) -> Found:
    """With chunks of fixed sizes, and of a size by `target_tpot`: twice what a token takes without the prompt.

    Must be: with the target, half of the gaps beside the prompt are no longer than `MOST_OVER` times it, or what chunks of the
    smallest size take where that is more. So much is promised, since nearly all of them end in a step with a chunk. Their p99 is
    the machine's too, and is printed; for F43's bound in tokens there is `tests/unit/test_chunked.py`.
    """
    _, least = await _streams(options, folder, f"chunk {LEAST_CHUNK}", *_chunks(LEAST_CHUNK))
    base, beside = await _streams(options, folder, "chunk 256", *_chunks(256))
    target = 2 * quantile(base, 0.5)
    await _streams(options, folder, "chunk 2048", *_chunks(2048))
    alone, paced = await _streams(options, folder, f"target {1000 * target:.1f} ms", f"prefill.target_tpot={target}")
    by_size, by_time = quantile(beside, 0.99) / quantile(base, 0.99), quantile(paced, 0.99) / quantile(alone, 0.99)
    figures = (
        f"long prompt: ITL p99 {by_size:.1f} times that without it with chunks of 256, {by_time:.1f} with a target"
    )
    return Found(figures, tuple(flaws_of_gaps(paced, max(target, quantile(least, 0.5)))))


def _chunks(size: int) -> tuple[str, ...]:
    """Of one size, whatever they take."""
    return ("prefill=chunked", f"prefill.chunk_size={size}", f"prefill.long_chunk_size={size}")


def flaws_of_gaps(gaps: Sequence[float], target: float) -> list[str]:
    """`gaps`: sorted, between tokens of streams beside the prompt."""
    if not gaps:
        return ["no stream had a token while the prompt was computed"]
    half = quantile(gaps, 0.5)
    if half <= target * MOST_OVER:
        return []
    return [f"beside the prompt ITL p50 is {1000 * half:.1f} ms, and the target {1000 * target:.1f} ms"]


async def _streams(options: Options, folder: Path, name: str, *words: str) -> tuple[list[float], list[float]]:
    """Gaps between tokens, of streams alone and beside the prompt. Two long prompts come before, so that all is warm."""
    with server(options, folder, *words, f"scheduler.max_num_running_reqs={options.streams + 1}") as running:
        async with connected(running) as client:
            for _ in range(2):
                await call(client, draw_prompt(random.Random(3), 4096), 2)
            rng = random.Random(4)
            calls = [Call(time.monotonic()) for _ in range(options.streams)]
            tasks = [asyncio.create_task(call(client, draw_prompt(rng, 20), 600, made)) for made in calls]
            while not all(len(made.tokens) > 150 for made in calls):
                await asyncio.sleep(0.01)
            long = await call(client, draw_prompt(rng, 8192), 2)
            beside = _gaps(calls, long.sent, long.tokens[0])
            base = _gaps(calls, max(made.tokens[20] for made in calls), long.sent)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    print(
        f"{name:<16}ITL alone p50 {_ms(base, 0.5)} p99 {_ms(base, 0.99)}; beside the prompt p50 {_ms(beside, 0.5)} p99 "
        f"{_ms(beside, 0.99)} max {_ms(beside, 1.0)} ms; its own TTFT {long.ttft:.2f} s",
        flush=True,
    )
    return base, beside


def _gaps(calls: Sequence[Call], start: float, end: float) -> list[float]:
    return sorted(gap for c in calls for at, gap in zip(c.tokens[1:], c.gaps, strict=True) if start < at <= end)


def _ms(gaps: Sequence[float], q: float) -> str:
    return f"{1000 * quantile(gaps, q):.1f}" if gaps else "-"


PIECES: Mapping[str, Callable[[Options, Path], Awaitable[Found]]] = {
    piece.__name__: piece for piece in (rates, burst, long_prompt)
}


def parsed(arguments: Sequence[str]) -> tuple[list[str], Options]:
    names, words, own = [], [], dict[str, Any]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            names.append(argument)
        elif key in Options.__slots__ and key != "words":
            own[key] = json.loads(value)
        else:
            words.append(argument)
    return names, Options(**own, words=tuple(words))


def main(arguments: Sequence[str]) -> int:
    names, options = parsed(arguments)
    for name in names:
        if name not in PIECES:
            print(f"no piece is called {name!r}{near_matches(name, PIECES)}", file=sys.stderr)
            return 2
    found = list[Found]()
    with tempfile.TemporaryDirectory() as folder:
        for name in names or PIECES:
            print(f"--- {name}", flush=True)
            found.append(asyncio.run(_run(PIECES[name], options, Path(folder))))
    print("; ".join(piece.figures for piece in found))
    flaws = [flaw for piece in found for flaw in piece.flaws]
    for flaw in flaws:
        print(f"FAILED: {flaw}")
    return 1 if flaws else 0


async def _run(piece: Callable[[Options, Path], Awaitable[Found]], options: Options, folder: Path) -> Found:
    return await piece(options, folder)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
