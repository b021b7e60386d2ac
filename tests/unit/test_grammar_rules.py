"""Rules as both backends read them, against a slow reading; and JSON schemas against a validator."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from core.request import GrammarSpec
from core.stages.grammar import CompiledGrammar, GrammarBackend, GrammarError
from core.testing.grammar_examples import vocabularies
from core.testing.grammar_walks import allowed, segmented
from plugins.grammars.gbnf import parse_gbnf
from plugins.grammars.json_numbers import integers
from plugins.grammars.rules import Alt, Chars, Expr, Ref, Repeat, Rules, Seq, Text, is_regular, matches, pruned

VOCABULARY = vocabularies()[0]
END = min(VOCABULARY.eos_ids)


def compiled(backend: GrammarBackend, kind: str, source: str) -> CompiledGrammar:
    return backend.load(backend.compile(GrammarSpec(kind=kind, source=source)))


def fits(grammar: CompiledGrammar, text: str, rng: random.Random) -> bool:
    ids = segmented(VOCABULARY, text, rng)
    return grammar.matcher().accept([*ids, END]) == len(ids) + 1


def derives(rules: Rules, text: str) -> bool:
    """By what is known of each rule from each place on, until nothing new is: slow, and short enough to be right."""
    known: dict[tuple[str, int], frozenset[int]] = {}

    def ends(expr: Expr, start: int) -> frozenset[int]:
        match expr:
            case Text(part):
                return frozenset({start + len(part)} if text.startswith(part, start) else ())
            case Chars(ranges):
                inside = start < len(text) and any(a <= ord(text[start]) <= b for a, b in ranges)
                return frozenset({start + 1} if inside else ())
            case Ref(name):
                return known.get((name, start), frozenset())
            case Alt(options):
                return frozenset().union(*(ends(option, start) for option in options))
            case Seq(parts):
                places = frozenset({start})
                for part in parts:
                    places = frozenset().union(*(ends(part, place) for place in places))
                return places
            case Repeat(part, least, most):
                places, found = frozenset({start}), frozenset({start} if not least else ())
                for count in range(1, (most if most is not None else least + len(text)) + 1):
                    places = frozenset().union(*(ends(part, place) for place in places))
                    found |= places if count >= least else frozenset()
                return found
        raise TypeError(expr)

    while True:
        now = {(name, at): ends(expr, at) for name, expr in rules.items() for at in range(len(text) + 1)}
        if now == known:
            return len(text) in now["root", 0]
        known = now


def random_ebnf(rng: random.Random) -> str:
    names = ["root", "a-b", "item"]

    def one(depth: int) -> str:
        kind = rng.random()
        if depth == 0 or kind < 0.35:
            return rng.choice(['"x"', '"xy"', "[x-z]", "[^x]", '"é"', '""', *names[1:], "root"])
        inner = [one(depth - 1) for _ in range(rng.randint(1, 3))]
        if kind < 0.65:
            return " ".join(inner)
        if kind < 0.85:
            return f"({' | '.join(inner)})"
        return f"({inner[0]}){rng.choice(['*', '+', '?', '{2}', '{0,2}', '{1,}'])}"

    return "\n".join(f"{name} ::= {one(3)} | {one(2)} # {name}" for name in names)


def test_ebnf_against_a_slow_reading(backend):
    rng, tried, recursive = random.Random(11), 0, 0
    for _ in range(220):
        source = random_ebnf(rng)
        try:
            grammar = compiled(backend, "ebnf", source)
        except GrammarError as error:
            assert "no text" in str(error)
            continue
        rules = parse_gbnf(source)
        tried, recursive = tried + 1, recursive + (not is_regular(pruned(rules)))
        for _ in range(10):
            text = "".join(rng.choice("xyzé\n") for _ in range(rng.randint(0, 4)))
            assert fits(grammar, text, rng) == derives(rules, text), f"{source}\nand {text!r}"
        walk(grammar, rng, lambda text, rules=rules: derives(rules, text), source)
    assert tried > 100 and recursive > 50


def walk(grammar: CompiledGrammar, rng: random.Random, holds: Any, what: str) -> None:
    """Through masks to an end, if there is one within a few tokens; every mask allows something."""
    matcher, text = grammar.matcher(), b""
    for _ in range(12):
        may = allowed(matcher, VOCABULARY)
        assert may, f"{what}\nand nothing after {text!r}"
        if may & VOCABULARY.eos_ids and (rng.random() < 0.5 or not may - VOCABULARY.eos_ids):
            assert holds(text.decode()), f"{what}\nends with {text!r}"
            return
        token_id = rng.choice(sorted(may - VOCABULARY.eos_ids))
        assert matcher.accept([token_id]) == 1
        text += VOCABULARY.tokens[token_id]


def test_bounds_of_integers():
    rng = random.Random(5)
    bounds = [None, *range(-12, 13), -1000, -999, -100, -99, 99, 100, 101, 999, 1000, 2.5, -2.5, 1e3]
    numbers = [*range(-130, 131), -1001, -1000, -999, 998, 999, 1000, 1001, 12345]
    for _ in range(400):
        low, above, high, below = (rng.choice(bounds) if rng.random() < 0.5 else None for _ in range(4))
        expr = integers(low, above, high, below)
        for number in numbers:
            inside = (low is None or number >= low) and (above is None or number > above)
            inside = inside and (high is None or number <= high) and (below is None or number < below)
            assert matches(expr, str(number)) == inside, f"{number} in {low}, >{above}, {high}, <{below}"
        assert not matches(expr, "007") and not matches(expr, "") and not matches(expr, "-")


# --- JSON schemas ---------------------------------------------------------------------------------

NAMES = ["a", "ab", "b", "é", 'a"b', "x/y", "\n"]
TEXTS = ["", "a", "b", "ab", "abc", "é", '"', "\\", "/", "x", "\n", "😀a", "c"]
NUMBERS = [-121, -120, -8, -7, -5, -1, 0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 99, 100, 101, 2.5]
PATTERNS = ["^a", "b$", "^[a-c]+$", "x", '^(a|"|\\\\)$', "^.$", "^[^a]{1,2}$"]
VALUES = [1, "a", "é", '"', None, True, [1, {"a": 2}], {"b": []}, -3, 2.5, "", "/"]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    makers = (
        [_simple, _string, _integer] if depth > 2 else [_simple, _string, _integer, _any_of, _array, _object, _object]
    )
    return rng.choice(makers)(rng, depth)


def _simple(rng: random.Random, depth: int) -> Any:
    values = {"enum": rng.sample(VALUES, rng.randint(1, 4))}
    types = {"type": rng.sample(["null", "boolean", "integer", "string"], 2)}
    return rng.choice([True, {}, {"type": "number"}, values, types, {"const": rng.choice(VALUES)}])


def _string(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    return {"type": "string", **_some(rng, minLength=rng.randint(0, 2), maxLength=rng.randint(1, 3))}


def _integer(rng: random.Random, depth: int) -> Any:
    bounds = {rng.choice(["minimum", "exclusiveMinimum"]): rng.choice([-120, -7, 0, 3, 15, 99, 2.5])}
    return {"type": "integer", **_some(rng, **bounds, maximum=rng.choice([-5, 0, 4, 17, 100, 7.5]))}


def _any_of(rng: random.Random, depth: int) -> Any:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _array(rng: random.Random, depth: int) -> Any:
    items, first = random_schema(rng, depth + 1), [random_schema(rng, depth + 1) for _ in range(2)]
    counts = _some(rng, minItems=rng.randint(0, 2), maxItems=rng.randint(0, 3))
    return {"type": "array", **_some(rng, items=rng.choice([items, False]), prefixItems=first), **counts}


def _object(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.1:
        patterns = {rng.choice(PATTERNS): random_schema(rng, depth + 1)}
        return {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    properties = {name: random_schema(rng, depth + 1) for name in rng.sample(NAMES, rng.randint(1, 3))}
    others = rng.choice([False, False, True, random_schema(rng, depth + 1)])
    required = [name for name in [*properties, *NAMES] if rng.random() < 0.2]
    rest = _some(rng, additionalProperties=others, required=list(dict.fromkeys(required)))
    return {"type": "object", **_some(rng, properties=properties), **rest}


def _some(rng: random.Random, **keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if rng.random() < 0.5}


def random_value(rng: random.Random, schema: Any, depth: int = 0) -> Any:
    """Often valid."""
    if not isinstance(schema, dict) or not schema or rng.random() < 0.1 or depth > 4:
        return rng.choice([None, True, *TEXTS, *NUMBERS, [], {}, [1], {"a": 1}])
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return random_value(rng, rng.choice(schema["anyOf"]), depth)
    if schema["type"] == "array":
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        return [random_value(rng, one, depth + 1) for one in [*first, rest, rest][: rng.randint(0, 3)]]
    if schema["type"] == "object":
        return dict(_members(rng, schema, depth))
    return rng.choice({"string": TEXTS, "integer": NUMBERS, "number": NUMBERS}.get(str(schema["type"]), VALUES))


def _members(rng: random.Random, schema: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """In the order of the schema, which is the order of a grammar."""
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in dict.fromkeys([*properties, *schema.get("required", ())]):
        if rng.random() < 0.6:
            yield name, random_value(rng, properties.get(name, others), depth + 1)
    if rng.random() < 0.4:
        yield rng.choice(["zz", "abc", "é2"]), random_value(rng, others, depth + 1)


def test_json_schemas_against_a_validator(backend):
    """What does not validate is never written, and hardly anything that validates is left out."""
    jsonschema = pytest.importorskip("jsonschema")
    left_out = num_valid = num_compiled = 0
    for seed in range(150):
        rng = random.Random(seed)
        source = random_schema(rng)
        validator = jsonschema.Draft202012Validator(source)
        try:
            grammar = compiled(backend, "json_schema", json.dumps(source))
        except GrammarError:
            continue
        num_compiled += 1
        for _ in range(10):
            value = random_value(rng, source)
            layout = rng.choice([{}, {"separators": (",", ":")}, {"indent": 1}])
            text, valid = json.dumps(value, ensure_ascii=False, **layout), validator.is_valid(value)
            written = fits(grammar, text, rng)
            assert valid or not written, f"{source} does not have {text}"
            num_valid, left_out = num_valid + valid, left_out + (valid and not written)
        for _ in range(3):
            walk(grammar, rng, lambda text, v=validator: v.is_valid(json.loads(text)), json.dumps(source))
    assert num_compiled > 120 and num_valid > 400
    assert left_out <= num_valid // 50, f"{left_out} of {num_valid}: properties in another order, and no more"
