"""What a grammar of the kind "structural_tag" says: free text, in it structures, each a JSON value between two texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from core.stages.grammar import GrammarError

Schema = dict[str, Any] | bool


class Structure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    begin: str
    schema: Schema  # of the value
    end: str


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    structures: tuple[Structure, ...]  # one at least
    triggers: tuple[str, ...]  # none is empty; with free text, each `begin` begins with one
    at_least_one: bool = False  # no free text: the output begins with a structure
    stop_after_first: bool = False  # the output ends with the first structure
    separator: str = ""  # with at_least_one, and without stop_after_first: between structures

    @property
    def has_free_text(self) -> bool:
        return not self.at_least_one

    def trigger_of(self, structure: Structure) -> str:
        """The shortest, where several begin it: free text ends there. Without free text there may be none: ""."""
        return min((one for one in self.triggers if structure.begin.startswith(one)), key=len, default="")

    def with_schemas(self, change: Callable[[Schema], Schema]) -> StructuralTag:
        """Raises GrammarError where `change` does; where there are several, it says behind which text the schema stands."""
        structures = tuple(msgspec.structs.replace(one, schema=self._changed(one, change)) for one in self.structures)
        return msgspec.structs.replace(self, structures=structures)

    def _changed(self, structure: Structure, change: Callable[[Schema], Schema]) -> Schema:
        try:
            return change(structure.schema)
        except GrammarError as error:
            if len(self.structures) == 1:
                raise
            raise GrammarError(f"behind {structure.begin[:64]!r}: {error}") from None

    def source(self) -> str:
        """As in `GrammarSpec.source`."""
        return json.dumps(msgspec.to_builtins(self), ensure_ascii=False, separators=(",", ":"))


def parse_structural_tag(source: str) -> StructuralTag:
    """Raises GrammarError for what is none."""
    try:
        value = json.loads(source)
    except RecursionError:
        raise GrammarError("the structural tag has too many levels") from None
    except ValueError as error:
        raise GrammarError(f"the structural tag is not JSON: {error}") from None
    return structural_tag(value)


def structural_tag(value: object) -> StructuralTag:
    """Of what its source says in JSON. Raises GrammarError for what is none, or can never begin."""
    try:
        tag = msgspec.convert(value, StructuralTag)
    except msgspec.ValidationError as error:
        raise GrammarError(f"the structural tag: {error}") from None
    if not tag.structures:
        raise GrammarError("the structural tag has no structures")
    if "" in tag.triggers:
        raise GrammarError("the structural tag has a trigger that is empty")
    for structure in tag.structures if tag.has_free_text else ():
        if not tag.trigger_of(structure):
            raise GrammarError(f"the structural tag has no trigger for what begins {structure.begin[:64]!r}")
    return tag
