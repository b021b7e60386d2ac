"""Bounds and multiples through the backends: what is accepted validates, and no plain decimal of a valid number is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from core.lab.grammar_judge import ByteBackends, Judge
from core.stages.grammar import GrammarError
from plugins.grammars.json_numbers import for_llguidance

BOUNDS = (-10, -1.5, -1, -0.5, -0.25, 0, 0.05, 0.25, 0.5, 0.55, 1, 10, 10.05, 100)
PLAIN = sorted(
    {json.dumps(bound) for bound in BOUNDS}
    | {"-11", "-9.9", "-1.6", "-1.25", "-1.4", "-0.75", "-0.3", "-0.2", "-0.1", "0.01", "0.04", "0.06", "0.1", "0.2", "0.24"}
    | {"0.26", "0.3", "0.51", "0.54", "0.56", "0.75", "0.9", "1.1", "2", "9.99", "10.04", "10.06", "10.5", "11", "99.5", "101"}
)  # fmt: skip
OTHERS = (
    "-0",
    "-0.0",
    "0.0",
    "0.00",
    "0.50",
    "10.0",
    "1.0",
    "00",
    "-",
    "1.",
    ".5",
    "+1",
    "01",
    "0e0",
    "1e0",
    "1E-1",
    "5e-1",
)
JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


@pytest.fixture(scope="module")
def llguidance() -> ByteBackends:
    return ByteBackends(["llguidance"])


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backends(request: pytest.FixtureRequest) -> ByteBackends:
    pytest.importorskip(request.param)
    return ByteBackends([request.param])


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    if not JSON_NUMBER.fullmatch(text):
        return False
    value, says = Fraction(text), {name: Fraction(str(it)) for name, it in schema.items() if name != "type"}
    if value < says.get("minimum", value) or value > says.get("maximum", value):
        return False
    if value <= says.get("exclusiveMinimum", value - 1) or value >= says.get("exclusiveMaximum", value + 1):
        return False
    return value % says.get("multipleOf", value or 1) == 0 and (schema["type"] == "number" or value.denominator == 1)


def bounded(type_: str, step: float | None) -> Iterator[dict[str, Any]]:
    lows = [{}, *({name: bound} for bound in BOUNDS for name in ("minimum", "exclusiveMinimum"))]
    highs = [{}, *({name: bound} for bound in BOUNDS for name in ("maximum", "exclusiveMaximum"))]
    more = {} if step is None else {"multipleOf": step}
    for low, high in product(lows, highs):
        if not low or not high or min(low.values()) <= max(high.values()):
            yield {"type": type_, **low, **high, **more}


def check(judge: Judge, schema: dict[str, Any], valid: set[str]) -> None:
    found = {text for text in (*PLAIN, *OTHERS) if judge.accepts(text)}
    assert found <= valid, f"{schema} accepts {sorted(found - valid)}"
    assert valid & set(PLAIN) <= found, f"{schema} leaves out {sorted(valid & set(PLAIN) - found)}"


@pytest.mark.parametrize(("type_", "step"), [("number", None), ("number", 0.25), ("number", 0.05), ("integer", None)])
def test_bounds(backends: ByteBackends, type_: str, step: float | None) -> None:
    for schema in bounded(type_, step):
        valid = {text for text in (*PLAIN, *OTHERS) if is_valid(text, schema)}
        try:
            judge = backends.judge(schema)
        except GrammarError as error:
            assert not valid or "supported" in str(error)
            continue
        check(judge, schema, valid)


@pytest.mark.parametrize("step", [None, 0.25, 0.05])
def test_llguidance_refuses_no_plain_bounds(llguidance: ByteBackends, step: float | None) -> None:
    for schema in bounded("number", step):
        if any(is_valid(text, schema) for text in PLAIN):
            llguidance.judge(schema)


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0." + "0" * 200 + "1"], ["0", "-0", "0.0", "0.51"]),
        ({"exclusiveMinimum": 100, "maximum": 100.3}, ["100.000001", "100.3"], ["100", "100.0", "99", "100.31"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.001"], ["0", "-0", "-0.0", "0.1", "-0.6"]),
        ({"minimum": 0, "maximum": 12.345}, ["0.0", "12", "12.3", "12.34", "12.345"], ["12.35", "12.346", "13"]),
        ({"minimum": -5, "maximum": 0}, ["-5.0", "0", "0.0"], ["0.1", "-5.1"]),
        ({"minimum": 1e-200, "maximum": 1.5e-60}, ["0." + "0" * 100 + "2"], ["0", "0." + "0" * 58 + "1", "0." + "0" * 201 + "1"]),
        ({"maximum": 0.10000000000000009}, ["0.1", "-7"], ["0.1000000000000001", "0.11"]),
        ({"minimum": 0.10000000000000009}, ["0.2", "0.101"], ["0.1", "0.10000000000000008"]),
        ({"maximum": -5e-324}, ["-0.1", "-7"], ["0", "-0", "-0.0"]),
        ({"multipleOf": 0.125}, ["0.125", "0.25", "-0.5", "3", "3.0"], ["0.1", "0.3", "0.12"]),
    ],
)  # fmt: skip
def test_numbers(llguidance: ByteBackends, schema: dict[str, Any], texts: list[str], others: list[str]) -> None:
    for at, judge in enumerate(
        map(llguidance.judge, ({"type": "number", **schema}, {"items": {"type": "number", **schema}}))
    ):
        written = "[{}]" if at else "{}"
        assert [text for text in texts if not judge.accepts(written.format(text))] == []
        assert [text for text in others if judge.accepts(written.format(text))] == []


def test_bounds_that_normalising_makes(llguidance: ByteBackends) -> None:
    then = {"if": {"multipleOf": 0.25}, "then": {"type": "array"}, "exclusiveMinimum": -5, "maximum": 10}
    judge = llguidance.judge({"items": then})
    assert judge.accepts("[0.3, 9.9]") and judge.accepts('[[], ["a"]]')
    assert not any(map(judge.accepts, ("[1]", "[0]", "[-4.75]", "[10]", "[1.0]", "[0.30, 0.5]")))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"const": 0.10000000000000009}, "constants with so many digits"),
        ({"enum": ["a", [{"a": 1e-60}]]}, "constants with so many digits"),
        ({"type": "number", "minimum": 0, "maximum": 5e-324}, "a bound like"),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.0000000000000002}, "so close to each other"),
    ],
)
def test_what_llguidance_would_misread(llguidance: ByteBackends, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        llguidance.judge(schema)


def test_constants_that_it_reads_right(llguidance: ByteBackends) -> None:
    values = [3.141592653589793, 0.1, -1e-22, 1.5, 123456789012345.6, 0.000123456789012345]
    judge = llguidance.judge({"enum": values})
    assert all(judge.accepts(format(Decimal(str(value)), "f")) for value in values)
    assert not judge.accepts("3.141592653589794") and not judge.accepts("0.2")


def test_what_stays() -> None:
    for schema in ({"type": "integer", "maximum": 0.25}, {"type": "number"}, {"maximum": 0.25}, {"enum": [0.5]}):
        assert for_llguidance(schema) == schema
    plain = {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}
    assert for_llguidance(plain) == plain
    assert for_llguidance({"type": "number", "maximum": 0.25, "$defs": {"a": True}}).keys() == {"anyOf", "$defs"}
