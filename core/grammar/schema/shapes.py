"""Sets of values, by kind.

Shapes are closed under intersection and complement (a complement is a list of shapes), so that any schema is a list of shapes
for each kind, with formulas for what is inside (the idea of rewriting to such a form: Attouche et al., "Witness generation for
JSON Schema", 2022; Habib et al., "Finding data compatibility bugs with JSON subschemas", 2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from core.grammar.schema import numbers, strings
from core.grammar.schema.arrays import Array
from core.grammar.schema.numbers import Number
from core.grammar.schema.objects import Object
from core.grammar.schema.strings import String
from core.grammar.schema.tools import Tools

KINDS = ("null", "boolean", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class Constant:
    """Null, true and false: of kinds with few values."""

    values: frozenset[bool | None]


NULL = Constant(frozenset((None,)))
BOOLEAN = Constant(frozenset((True, False)))

Shape: TypeAlias = Constant | Number | String | Array | Object
Shapes: TypeAlias = Mapping[str, tuple[Shape, ...]]
"""By kind: a value is in the set when it is in one of its kind's shapes."""


def all_shapes(tools: Tools) -> dict[str, tuple[Shape, ...]]:
    return {
        "null": (NULL,),
        "boolean": (BOOLEAN,),
        "number": (numbers.ANY,),
        "string": (strings.ANY,),
        "array": (Array((), tools.formulas.true),),
        "object": (Object(),),
    }
