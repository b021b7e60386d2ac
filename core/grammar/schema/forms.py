"""Shapes as the schemas that grammar backends enforce truly: each case of a schema is one form, with formulas inside."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

from core.grammar.schema import automata, numbers, strings
from core.grammar.schema.array_forms import ArrayForm, array_forms
from core.grammar.schema.arrays import Array
from core.grammar.schema.formulas import Formula
from core.grammar.schema.languages import Language, Op
from core.grammar.schema.limits import refuse
from core.grammar.schema.numbers import Number
from core.grammar.schema.object_forms import ObjectForm, object_forms
from core.grammar.schema.regex_text import written
from core.grammar.schema.shapes import Constant
from core.grammar.schema.solver import Solver
from core.grammar.schema.strings import String
from core.grammar.schema.tools import Tools
from core.grammar.schema.values import as_json
from core.stages.grammar import GrammarError

MAX_NUMBER = 2**53
"""Beyond it not every integer is a float, as which backends keep bounds and values."""
MAX_STEP = 10_000
"""Automata of multiples have a state for each remainder."""


@dataclass(frozen=True, slots=True)
class SimpleForm:
    """A schema with nothing inside."""

    schema: dict[str, Any]


Form: TypeAlias = SimpleForm | ArrayForm | ObjectForm


@dataclass(slots=True)
class _Found:
    forms: list[Form] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)  # of an enum


def forms_of(solver: Solver, formula: Formula) -> list[Form]:
    """Together they are `formula`. Raises GrammarError for what no such form is."""
    tools, found = solver.tools, _Found()
    for shapes in solver.shapes(formula).values():
        for shape in shapes:
            if isinstance(shape, Constant):
                _constants(shape, found)
            elif isinstance(shape, Number):
                _numbers(shape, found)
            elif isinstance(shape, String):
                _strings(shape, tools, found)
            elif isinstance(shape, Array):
                found.forms += array_forms(shape, solver)
            else:
                found.forms += object_forms(shape, tools)
    return [SimpleForm({"enum": found.values}), *found.forms] if found.values else found.forms


def _constants(shape: Constant, found: _Found) -> None:
    if shape.values == {None}:
        found.forms.append(SimpleForm({"type": "null"}))
    elif len(shape.values) == 2:
        found.forms.append(SimpleForm({"type": "boolean"}))
    else:
        found.values += shape.values


def _numbers(shape: Number, found: _Found) -> None:
    if shape.only is not None:
        found.values += [_number(value) for value in sorted(shape.only)]
        return
    parts = numbers.without_holes(shape)
    if parts is None:
        raise GrammarError(
            "a schema for numbers that are no integers, or no multiples, without bounds is not supported"
        )
    for part in parts:
        values = part.only
        if values is None and part.step is not None and _digits(part.step) > MAX_STEP:
            values = numbers.listed(part)
            if values is None:
                raise GrammarError(f"multipleOf with more than {MAX_STEP} in its digits is not supported")
        if values is not None:
            found.values += [_number(value) for value in sorted(values)]
        else:
            found.forms.append(SimpleForm(_interval(part)))


def _digits(step: Fraction) -> int:
    """What is left of it without its decimal point."""
    scaled = step
    while scaled.denominator != 1 and scaled < MAX_STEP:
        scaled *= 10
    return math.ceil(scaled)


def _interval(shape: Number) -> dict[str, Any]:
    is_integer = shape.step is not None and shape.step.denominator == 1
    found: dict[str, Any] = {"type": "integer" if is_integer else "number"}
    if shape.low is not None:
        found["exclusiveMinimum" if shape.low_open else "minimum"] = _number(shape.low)
    if shape.high is not None:
        found["exclusiveMaximum" if shape.high_open else "maximum"] = _number(shape.high)
    if shape.step is not None and shape.step != numbers.ONE:
        found["multipleOf"] = _number(shape.step)
    return found


def _number(value: Fraction) -> int | float:
    found = as_json(value)
    if found is None or abs(value) > MAX_NUMBER:
        raise GrammarError(f"a number like {float(value):g}, of more digits than a float keeps, is not supported")
    return found


def _strings(shape: String, tools: Tools, found: _Found) -> None:
    if shape.only is not None:
        found.values += sorted(shape.only)
        return
    shape = strings.without_holes(shape, tools)
    if not strings.has_text(shape, tools):
        return
    schema: dict[str, Any] = {"type": "string"}
    if shape.low:
        schema["minLength"] = shape.low
    if shape.high is not None:
        schema["maxLength"] = shape.high
    patterns = _patterns(shape.language, tools) if shape.language is not None else []
    if patterns is None:
        return
    if len(patterns) == 1:
        schema["pattern"] = patterns[0]
    elif patterns:
        schema["allOf"] = [{"type": "string", "pattern": pattern} for pattern in patterns]
    found.forms.append(SimpleForm(schema))


def _patterns(language: Language, tools: Tools) -> list[str] | None:
    """All of them have to match; None where nothing does."""
    made, whole = tools.languages, automata.plain_form(tools.languages, language)
    parts = [whole] if whole is not None else [automata.plain_form(made, part) for part in _joined(language)]
    found = []
    for part in parts:
        if part is None:
            refuse("pattern", "#", "what it excludes is too large for a pattern of its own")
        if part is made.none:
            return None
        if part is not made.any:
            found.append(bounded_pattern(part, tools))
    return found


def _joined(language: Language) -> tuple[Language, ...]:
    return language.parts if language.op is Op.AND else (language,)


def bounded_pattern(language: Language, tools: Tools) -> str:
    pattern = written(language, tools.limits.max_pattern)
    if pattern is None:
        refuse("pattern", "#", "what it becomes is too long")
    return pattern
