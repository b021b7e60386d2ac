"""Grammars that engines have died of, through a real process with the built-in backend: refused with a reason, or compiled."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from core.errors import RequestError
from core.front.grammars import Grammars
from core.lab.grammar_load import _told, grammar_front, memory_bytes, unique_grammars
from core.lab.hostile_grammars import FAMILIES, NUM_GRAMMARS, Hostile, hostile_grammars
from core.request import GrammarSpec

TINY = Path(__file__).resolve().parents[1] / "data" / "gguf" / "tiny-h128-Q4_0.gguf"
PARAM = "response_format"
MAX_BYTES = 400 * 2**20  # of the process that compiles
MAX_GROWTH = 64 * 2**20  # of ours, which holds answers only
SUBSET = hostile_grammars()[::17]  # 59, of each family

in_module = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars() -> AsyncIterator[Grammars]:
    async with grammar_front([f"model.source={TINY}", "grammars=[llguidance]"]) as (found, _):
        yield found


async def code_of(grammars: Grammars, kind: str, source: object) -> str:
    text = source if isinstance(source, str) else json.dumps(source)
    told = await _told(grammars, Hostile("one", GrammarSpec(kind=kind, source=text)))
    return told.code


def test_there_are_a_thousand_and_the_same_each_time() -> None:
    once, again = hostile_grammars(), hostile_grammars()
    assert len(once) == NUM_GRAMMARS == len({one.name for one in once}) and once == again
    assert len({(one.spec.kind, one.spec.source) for one in once}) >= NUM_GRAMMARS - 5
    assert {one.name.split()[0] for one in SUBSET} >= FAMILIES.keys()


@in_module
async def test_each_is_refused_or_compiled_and_the_front_goes_on(grammars: Grammars) -> None:
    before = memory_bytes(os.getpid())
    for hostile in SUBSET:
        told = await _told(grammars, hostile)
        assert told.code not in ("GenerationError", "EngineDeadError", "OverloadedError"), told
        told.message.encode()
    sound = GrammarSpec(kind="regex", source="[a-z]{3}")
    assert (await grammars.compiled(sound, PARAM)).artifact
    assert all(memory_bytes(pid) < MAX_BYTES for pid in grammars.compiler_pids)
    assert memory_bytes(os.getpid()) - before < MAX_GROWTH


REFUSED = {"unsupported_grammar", "invalid_grammar", "too_large", "grammar_timeout", "grammar_memory"}
ROWS = {
    "L12 an unknown type": ("json_schema", {"properties": {"reason": {"type": "stsring"}}}),
    "L12 a type that is no text": ("json_schema", {"type": True}),
    "L12 one of the types": ("json_schema", {"type": ["string", "weird"]}),
    "L12 a list": ("json_schema", []),
    "L12 a number": ("json_schema", 3),
    "L13 60,000 groups": ("ebnf", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "L13 a deep regex": ("regex", "(" * 100_000 + "a" + ")" * 100_000),
    "L13 a deep schema": ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    "L13 a deep choice": ("choice", "[" * 100_000 + "]" * 100_000),
    "L14 a plus alone": ("json_schema", {"type": "string", "pattern": "^+[a-z]$"}),
    "L14 a count alone": ("json_schema", {"type": "string", "pattern": "^{2}times$"}),
    "L14 look-behind": ("json_schema", {"type": "string", "pattern": "(?<=x)a"}),
    "L14 an open class": ("json_schema", {"type": "string", "pattern": "[.*"}),
    "L14 an open group": ("json_schema", {"type": "string", "pattern": "(a"}),
    "L15 root is root": ("ebnf", "root ::= root"),
    "L15 a reference to itself": ("json_schema", {"$ref": "#"}),
    "L16 no root": ("ebnf", 'rout::="route"'),
    "L16 nothing": ("ebnf", ""),
    "L16 a megabyte": ("ebnf", "x" * 1_000_000),
    "L18 a huge enum": ("json_schema", {"enum": [f"{n:050}" for n in range(10_000)]}),
    "L18 2,000 options": ("json_schema", {"anyOf": [{"const": n} for n in range(2_000)]}),
    "L18 a huge count": ("regex", "a{1,100000}"),
}


@in_module
@pytest.mark.parametrize("row", ROWS)
async def test_a_reported_grammar_is_refused_with_its_field(grammars: Grammars, row: str) -> None:
    kind, source = ROWS[row]
    assert await code_of(grammars, kind, source) in REFUSED


@in_module
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("ebnf", 'root ::= a\na ::= root "x" | "y"'),
        ("ebnf", 'root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"'),
        ("json_schema", {"properties": {"value": {"type": "integer"}, "next": {"$ref": "#"}}, "type": "object"}),
        ("json_schema", {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1000}),
    ],
)
async def test_recursion_and_counts_that_are_useful_work(grammars: Grammars, kind: str, source: object) -> None:
    assert await code_of(grammars, kind, source) == "compiled"


@in_module
async def test_new_grammars_fill_no_memory(grammars: Grammars) -> None:
    """L17, a small part of it: the whole is `check_structured unique`."""
    seen = []
    for number, spec in zip(range(600), unique_grammars(), strict=False):
        await grammars.compiled(grammars.bounded(spec, PARAM), PARAM)
        if number in (199, 599):
            seen.append(max(map(memory_bytes, grammars.compiler_pids)))
    assert seen[1] - seen[0] < 16 * 2**20
    assert grammars.figures.cached_bytes < 600 * 8192


@in_module
async def test_why_is_told_in_one_line_that_names_the_field(grammars: Grammars) -> None:
    with pytest.raises(RequestError) as caught:
        await grammars.compiled(GrammarSpec(kind="regex", source="(?<=x)a"), PARAM)
    message = caught.value.message
    assert message.startswith(f"{PARAM}: no grammar backend takes this regular expression: llguidance: ")
    assert message.isprintable() and caught.value.param == PARAM
