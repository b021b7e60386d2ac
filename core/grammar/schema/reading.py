"""Schemas of a document as formulas, one level at a time: what is inside stays a formula until it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from core.grammar.schema import arrays
from core.grammar.schema.arrays import Array
from core.grammar.schema.formulas import Formula
from core.grammar.schema.keywords import Formats, Schema, asserted, contains, refuse_other_dialects, with_names
from core.grammar.schema.limits import Budget, malformed
from core.grammar.schema.literals import literal
from core.grammar.schema.objects import Object
from core.grammar.schema.references import Document, Location
from core.grammar.schema.solver import Solver
from core.grammar.schema.unevaluated import unevaluated
from core.grammar.schema.words import (
    ARRAY_KEYWORDS,
    CONTAINS_KEYWORDS,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
    STRING_KEYWORDS,
)

JOINED = (
    "$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas",
    "enum", "format", "if", "not", "oneOf", "propertyNames", "type", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
TYPED = (*OBJECT_KEYWORDS, *ARRAY_KEYWORDS, *STRING_KEYWORDS, *NUMBER_KEYWORDS)
KEYWORDS = frozenset((*JOINED, *TYPED, *CONTAINS_KEYWORDS))
"""What says something about values; all else is dropped."""


class Reader:
    def __init__(self, schema: Any, budget: Budget, formats: Formats):
        self._document = Document(schema)
        self._formats = formats
        self.solver = Solver(budget, self.unfold)
        self._unfolded: dict[Formula, list[Formula]] = {}
        self._known: dict[tuple[object, ...], Formula] = {}  # by key of a location

    @property
    def root(self) -> Formula:
        return self.formula(self._document.root)

    def formula(self, location: Location) -> Formula:
        """Schemas that only refer to another one are that one."""
        seen = set[tuple[object, ...]]()
        while isinstance(location.schema, dict) and location.key not in seen | self._known.keys():
            if [key for key in location.schema if key in KEYWORDS] != ["$ref"]:
                break
            seen.add(location.key)
            location = self._document.referred(location, location.schema["$ref"])
        found = self._known.get(location.key) or self.solver.formulas.schema(location)
        self._known |= dict.fromkeys(seen, found)
        return found

    def below(self, parent: Location, schema: Any, *path: str) -> Formula:
        return self.formula(self._document.below(parent, schema, *path))

    def schema_of(self, formula: Formula) -> Schema:
        assert formula.location is not None
        return Schema(formula.location, self.solver.tools, self.below)

    def unfold(self, formula: Formula) -> list[Formula]:
        """The formulas that all must hold for the schema of `formula`, in the order of its keywords."""
        found = self._unfolded.get(formula)
        if found is None:
            schema = self.schema_of(formula)
            refuse_other_dialects(schema)
            parts = [*self._typed(schema), *self._joined(schema)]
            first = next((key for key in schema.raw if key in TYPED), "type")
            order = {key: at for at, key in enumerate(schema.raw)}
            parts.sort(key=lambda part: order.get(first if part[0] == "type" else part[0], -1))
            found = self._unfolded[formula] = [part for _, part in parts] + unevaluated(self, formula, schema)
        return found

    def _typed(self, schema: Schema) -> Iterator[tuple[str, Formula]]:
        """Each with the keyword that says where it stands."""
        formulas = self.solver.formulas
        if "type" in schema.raw or any(key in schema.raw for key in TYPED):
            yield "type", formulas.of_shapes(asserted(schema, self._formats))
        if "contains" in schema.raw:
            yield "contains", self._contains(schema)
        if "const" in schema.raw:
            yield "const", literal(self.solver.tools, schema.raw["const"])
        if "enum" in schema.raw:
            values = schema.listed("enum")
            yield "enum", literal(self.solver.tools, *values)
        if "propertyNames" in schema.raw:
            yield "propertyNames", self._property_names(schema)

    def _contains(self, schema: Schema) -> Formula:
        tools = self.solver.tools
        found = arrays.containing(Array((), tools.formulas.true, where=schema.where), contains(schema), tools)
        tidied = arrays.tidy(found, tools, (found,))
        return tools.formulas.of_shapes({**self.solver.everything, "array": () if tidied is None else (tidied,)})

    def _property_names(self, schema: Schema) -> Formula:
        formulas = self.solver.formulas
        names = schema.formula(schema.raw["propertyNames"], "propertyNames")
        outside = self.solver.shapes(formulas.negated(names)).get("string", ())
        shape = with_names(Object(where=schema.where), outside, self.solver.tools)  # type: ignore[arg-type]
        return formulas.of_shapes({**self.solver.everything, "object": (shape,)})

    def _joined(self, schema: Schema) -> Iterator[tuple[str, Formula]]:
        raw, formulas = schema.raw, self.solver.formulas
        joins: dict[str, Callable[..., Formula]] = {
            "allOf": formulas.all_of, "anyOf": formulas.any_of, "oneOf": formulas.one_of,
        }  # fmt: skip
        for keyword, join in joins.items():
            if keyword in raw:
                yield from ((keyword, part) for part in self._options(schema, keyword, join))
        if "not" in raw:
            yield "not", formulas.negated(schema.formula(raw["not"], "not"))
        if "if" in raw:
            yield "if", self._if(schema)
        yield from (("$ref", one) for one in self.references(schema))
        for keyword in ("dependentSchemas", "dependentRequired", "dependencies"):
            yield from ((keyword, one) for one in self.dependencies(schema, keyword))

    def references(self, schema: Schema) -> list[Formula]:
        document, found = self._document, list[Location]()
        if "$ref" in schema.raw:
            found.append(document.referred(schema.location, schema.raw["$ref"]))
        if "$dynamicRef" in schema.raw:
            found.append(document.dynamically_referred(schema.location, schema.raw["$dynamicRef"]))
        return [self.formula(one) for one in found]

    def _options(self, schema: Schema, keyword: str, join: Callable[..., Formula]) -> list[Formula]:
        options = self.options(schema, keyword)
        return options if keyword == "allOf" else [join(*options)]

    def options(self, schema: Schema, keyword: str) -> list[Formula]:
        options = [schema.formula(one, keyword, str(at)) for at, one in enumerate(schema.listed(keyword))]
        if not options:
            malformed(keyword, schema.where, "a list with one schema at least")
        return options

    def _if(self, schema: Schema) -> Formula:
        formulas, raw = self.solver.formulas, schema.raw
        condition = schema.formula(raw["if"], "if")
        then, otherwise = (schema.formula(raw[key], key) if key in raw else formulas.true for key in ("then", "else"))
        if then is otherwise:
            return then
        no = formulas.negated(condition)
        return formulas.any_of(formulas.all_of(condition, then), formulas.all_of(no, otherwise))

    def has(self, schema: Schema, name: str) -> Formula:
        """Of objects with this property."""
        shape = Object(required=(name,), where=schema.where)
        return self.solver.formulas.of_shapes({"object": (shape,)})

    def dependencies(self, schema: Schema, keyword: str) -> Iterator[Formula]:
        formulas = self.solver.formulas
        for name, then in schema.mapping(keyword).items():
            if isinstance(then, list):
                names = schema.names(keyword, then)
                shape = Object(required=names, where=schema.where)
                needed = formulas.of_shapes({"object": (shape,)}) if names else formulas.true
            else:
                needed = schema.formula(then, keyword, name)
            has = self.has(schema, name)
            yield formulas.any_of(formulas.negated(has), formulas.all_of(has, needed))
