"""Random schemas and values: after rewriting, exactly what was valid is, and a grammar lets out nothing else."""

from __future__ import annotations

import json
import warnings
from itertools import islice
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from core.grammar.schema.normalise import normalise
from core.lab.grammar_judge import ByteBackends
from core.lab.json_schema_suite import texts
from core.stages.grammar import GrammarError

NAMES = ["a", "b", "ab", "c"]
TEXTS = ["", "a", "b", "ab", "ba", "abc", "c"]
NUMBERS = [-2, -1, 0, 1, 2, 3, 5, 0.5, 1.5, 2.5, -0.5]
PATTERNS = ["a", "^a", "b$", "^a$", "^(a|b)*$", "^.b", "^$", "^[^a]*$", "^(?!ab)"]
TYPES = [
    "null",
    "boolean",
    "number",
    "integer",
    "string",
    "array",
    "object",
    ["integer", "string"],
    ["array", "object"],
]
NUM_VALUES = 40


class Maker:
    """Schemas of all keywords, and values that they may be about."""

    def __init__(self, random: Random):
        self.random = random
        self.pick = random.choice

    def value(self, depth: int = 2) -> Any:
        draw = self.random.random()
        if depth <= 0 or draw < 0.55:
            return self.pick(
                [None, True, False, self.pick(NUMBERS), self.pick(NUMBERS), self.pick(TEXTS), self.pick(TEXTS), [], {}]
            )
        if draw < 0.75:
            return [self.value(depth - 1) for _ in range(self.random.randint(0, 3))]
        return {name: self.value(depth - 1) for name in self.random.sample(NAMES, self.random.randint(0, 3))}

    def schema(self, depth: int = 3) -> Any:
        if depth <= 0:
            simple: list[Any] = [True, False, {"type": "integer"}, {"type": "string"}, {"const": self.value(0)}, {}]
            return self.pick(simple)
        found: dict[str, Any] = {}
        for _ in range(self.pick([1, 1, 2, 2, 3, 4])):
            found |= self.pick(
                [self.simple, self.simple, self.strings, self.arrays, self.objects, self.objects, self.joins]
            )(depth)
        return found

    def below(self, depth: int) -> Any:
        return self.schema(depth - 1 - self.random.randint(0, 1))

    def inside(self, depth: int) -> Any:
        """Of a value's part, where a schema may refer to itself."""
        return {"$ref": "#/$defs/d"} if self.random.random() < 0.1 else self.below(depth)

    def simple(self, _: int) -> dict[str, Any]:
        bound = self.pick(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
        return self.pick(
            [
                {"type": self.pick(TYPES)},
                {"enum": [self.value() for _ in range(self.random.randint(1, 5))]},
                {"const": self.value()},
                {bound: self.pick(NUMBERS)},
                {"multipleOf": self.pick([0.5, 1, 2, 1.5])},
            ]
        )

    def strings(self, _: int) -> dict[str, Any]:
        return self.pick(
            [
                {"pattern": self.pick(PATTERNS)},
                {"minLength": self.random.randint(0, 2)},
                {"maxLength": self.random.randint(0, 2)},
            ]
        )

    def arrays(self, depth: int) -> dict[str, Any]:
        small = self.random.randint(0, 3)
        return self.pick(
            [
                {"items": self.inside(depth)},
                {"prefixItems": [self.inside(depth) for _ in range(self.random.randint(1, 2))]},
                {"minItems": small},
                {"maxItems": small},
                {"contains": self.below(depth), "maxItems": small},
                {"contains": self.below(depth), "minContains": self.random.randint(0, 2), "maxContains": small},
                {"uniqueItems": True, "maxItems": 2},
                {"unevaluatedItems": self.pick([False, {"type": "integer"}])},
            ]
        )

    def objects(self, depth: int) -> dict[str, Any]:
        return self.pick(
            [
                {"properties": {name: self.inside(depth) for name in self.random.sample(NAMES, 2)}},
                {"properties": {name: self.inside(depth) for name in self.random.sample(NAMES, 3)}},
                {"required": self.random.sample(NAMES, self.random.randint(1, 2))},
                {"additionalProperties": self.inside(depth)},
                {"patternProperties": {one: self.below(depth) for one in self.random.sample(PATTERNS, 2)}},
                {"minProperties": self.random.randint(0, 3)},
                {"maxProperties": self.random.randint(0, 3)},
                {"propertyNames": self.pick([{"pattern": self.pick(PATTERNS)}, {"enum": NAMES[:2]}, {"maxLength": 1}])},
                {"unevaluatedProperties": self.pick([False, {"type": "integer"}])},
                {"dependentRequired": {self.pick(NAMES): self.random.sample(NAMES, 1)}},
                {"dependentSchemas": {self.pick(NAMES): self.below(depth)}},
            ]
        )

    def joins(self, depth: int) -> dict[str, Any]:
        several = [self.below(depth) for _ in range(self.random.randint(1, 3))]
        return self.pick(
            [
                {self.pick(["allOf", "anyOf", "oneOf"]): several},
                {"not": self.below(depth)},
                {"if": self.below(depth), "then": self.below(depth), "else": self.below(depth)},
            ]
        )

    def document(self) -> Any:
        schema = self.schema()
        return schema | {"$defs": {"d": self.schema(2)}} if isinstance(schema, dict) else schema


def normalised(schema: Any) -> dict[str, Any] | None:
    try:
        return normalise(schema)
    except GrammarError as refusal:
        assert len(str(refusal)) > 10
        return None


def may_be_narrower(schema: Any) -> bool:
    """`contains` looks at the first items alone."""
    return "contains" in json.dumps(schema)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_the_same_values_are_valid(seed: int) -> None:
    maker = Maker(Random(seed))
    schema = maker.document()
    found = normalised(schema)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a set in a pattern that looks like another one to a later Python
        before, after = Draft202012Validator(schema), Draft202012Validator(False if found is None else found)
        for _ in range(NUM_VALUES):
            value = maker.value(3)
            is_valid = before.is_valid(value)
            if found is not None and after.is_valid(value) != is_valid:
                assert is_valid and may_be_narrower(schema), f"{schema} and {value}: {is_valid} before, in {found}"


@pytest.fixture(scope="module")
def backends() -> ByteBackends:
    return ByteBackends(["llguidance"])


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_a_grammar_lets_nothing_else_out(backends: ByteBackends, seed: int) -> None:
    maker = Maker(Random(seed))
    schema = maker.document()
    try:
        judge = backends.judge(schema)
    except GrammarError:
        return
    validator = Draft202012Validator(schema)
    for _ in range(NUM_VALUES // 2):
        value = maker.value(2)
        for text in islice(texts(value, with_escapes=True), 40):
            assert not judge.accepts(text) or validator.is_valid(value), f"{schema} lets out {text}"
