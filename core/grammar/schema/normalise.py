"""Any JSON schema of draft 2020-12 as one in the subset that grammar backends enforce truly."""

from __future__ import annotations

from typing import Any

from core.grammar.schema.keywords import Formats
from core.grammar.schema.limits import Budget, Limits
from core.grammar.schema.reading import Reader
from core.grammar.schema.writing import Writer
from core.stages.grammar import GrammarError

DEFAULT_LIMITS = Limits()


def normalise(schema: Any, *, formats: Formats = "annotation", limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """A schema for the same values.

    What is in it, `core.stages.grammar.SCHEMA_KEYWORDS` says. Properties stand in the order of the schema's keywords.

    Two keywords leave valid values out: items that `contains` is about are looked for among the first ones only, where any
    number of others may stand between them; and `formats` that are checked are checked by patterns, which for some formats do
    not have all of their texts. Nothing invalid is ever let in. Raises GrammarError, which names the keyword and a JSON
    pointer to it, for what is no schema, what is not supported, and what no value satisfies.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema must be an object or a boolean")
    try:
        reader = Reader(schema, Budget(limits), formats)
        return Writer(reader.solver).write(reader.root)
    except RecursionError:
        raise GrammarError("a schema that is nested so deeply is not supported") from None
