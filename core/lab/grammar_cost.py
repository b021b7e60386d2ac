"""What a grammar costs per token, and what jump-forward gives back: the same streams with and without, in turns."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from msgspec.structs import replace

from core.front.front import Front
from core.lab.grammar_load import ONE_PROCESS
from core.progress import no_progress
from core.request import GrammarSpec, SamplingParams
from core.session import open_session, start_front
from core.stages.frontend import GenerateRequest
from core.stages.renderer import TokenPrompt

NUM_STREAMS = 8
PROMPT = tuple(range(100, 140))

# An array that does not end within the tokens of a stream: each has as many tokens as one without a grammar.
ENDLESS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
# Mostly names that the schema has: what remains to be said is a few digits and words.
HEAVY: dict[str, Any] = {
    "type": "object",
    "properties": {
        f"measurement_of_sensor_{number:02}": {
            "type": "object",
            "properties": {
                "temperature_in_degrees": {"type": "integer", "minimum": 0, "maximum": 99},
                "state_of_the_battery": {"enum": ["nearly empty", "half full", "completely full"]},
                "needs_maintenance_soon": {"type": "boolean"},
            },
            "required": ["temperature_in_degrees", "state_of_the_battery", "needs_maintenance_soon"],
            "additionalProperties": False,
        }
        for number in range(6)
    },
    "additionalProperties": False,
}
HEAVY_TOKENS = 400  # more than it has
HEAVY["required"] = list(HEAVY["properties"])


@dataclass(frozen=True, slots=True)
class GrammarCost:
    """Milliseconds per token of a stream, medians over the rounds."""

    plain: float
    constrained: float
    heavy: float
    ratios: tuple[float, ...]  # constrained over plain, of each round
    speedups: tuple[float, ...]  # plain over heavy, likewise

    @classmethod
    def of(cls, plain: Sequence[float], constrained: Sequence[float], heavy: Sequence[float]) -> GrammarCost:
        """From seconds per token of each round."""
        return cls(
            plain=1e3 * median(plain),
            constrained=1e3 * median(constrained),
            heavy=1e3 * median(heavy),
            ratios=tuple(one / base for one, base in zip(constrained, plain, strict=True)),
            speedups=tuple(base / one for one, base in zip(heavy, plain, strict=True)),
        )

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def speedup(self) -> float:
        return median(self.speedups)

    def __str__(self) -> str:
        spread = f"{min(self.ratios):.3f} to {max(self.ratios):.3f}"
        return (
            f"{NUM_STREAMS} streams, ms per token: no grammar {self.plain:.2f}, JSON schema {self.constrained:.2f} "
            f"({self.ratio:.3f}x, rounds {spread}), a schema with many names {self.heavy:.2f} ({self.speedup:.2f} times as fast)"
        )


@asynccontextmanager
async def _front(overrides: Sequence[str]) -> AsyncIterator[Front]:
    session = open_session([*overrides, *ONE_PROCESS, "cache.enable_prefix_caching=false"])
    front = await start_front(session, no_progress)
    try:
        yield front
    finally:
        await front.close()


async def measure(overrides: Sequence[str], num_rounds: int, num_tokens: int) -> GrammarCost:
    """Rounds alternate, so that a machine that changes its pace changes it for all."""
    kinds: Mapping[str, SamplingParams] = {
        "plain": SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=1.0),
        "constrained": _constrained(ENDLESS, num_tokens),
        "heavy": _constrained(HEAVY, HEAVY_TOKENS),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    async with _front(overrides) as front:
        for number in range(num_rounds + 1):
            for name, params in kinds.items():
                took = await _round(front, f"{name}{number}", params)
                if number:  # the first compiles, and warms up
                    times[name].append(took)
    return GrammarCost.of(**times)


def _constrained(schema: object, max_tokens: int) -> SamplingParams:
    grammar = GrammarSpec(kind="json_schema", source=json.dumps(schema), any_whitespace=False)
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, grammar=grammar)


async def _round(front: Front, name: str, params: SamplingParams) -> float:
    """Seconds per token of a stream, from the first token on."""
    streams = [_stream(front, f"{name}-{index}", params, index) for index in range(NUM_STREAMS)]
    return median(await asyncio.gather(*streams))


async def _stream(front: Front, request_id: str, params: SamplingParams, seed: int) -> float:
    prompt = TokenPrompt([*PROMPT, 200 + seed])
    seeded = replace(params, seed=seed)
    request = GenerateRequest(request_id=request_id, prompt=prompt, params=seeded, max_tokens=params.max_tokens)
    started, num_tokens, num_first = 0.0, 0, 0
    async with aclosing(front.generate(request)) as outputs:
        async for output in outputs:
            num_tokens += sum(len(one.token_ids) for one in output.outputs)
            if not started and num_tokens:
                started, num_first = time.perf_counter(), num_tokens
    return (time.perf_counter() - started) / max(num_tokens - num_first, 1)
