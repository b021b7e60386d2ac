"""What a structural tag says: free text, in it structures that a trigger begins, each a JSON value between two texts."""

from __future__ import annotations

from typing import Any

import msgspec

from core.stages.grammar import GrammarError, Vocabulary


class Structure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    begin: str
    schema: Any  # a JSON schema
    end: str = ""


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    structures: tuple[Structure, ...]
    triggers: tuple[str, ...]
    at_least_one: bool = False  # no free text before the first
    stop_after_first: bool = False  # the output ends with the first
    separator: str = ""  # with at_least_one, and without stop_after_first: between structures, where no free text is

    @property
    def has_free_text(self) -> bool:
        return not self.at_least_one

    def trigger_of(self, structure: Structure) -> str:
        """The shortest, where several begin it: free text ends there. Without free text there may be none: ""."""
        return min((one for one in self.triggers if structure.begin.startswith(one)), key=len, default="")


def parse_structural_tag(source: str) -> StructuralTag:
    """Raises GrammarError for what is none, or cannot be begun."""
    try:
        tag = msgspec.json.decode(source, type=StructuralTag)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"structural tag: {error}") from error
    if not tag.structures:
        raise GrammarError("structural tag: there are no structures")
    if "" in tag.triggers:
        raise GrammarError("structural tag: a trigger is empty")
    for structure in tag.structures if tag.has_free_text else ():
        if not any(structure.begin.startswith(trigger) for trigger in tag.triggers):
            raise GrammarError(f"structural tag: no trigger begins {structure.begin!r}")
    return tag


def special_parts(text: str, vocabulary: Vocabulary) -> list[str | int]:
    """`text` in parts: plain text, and ids of control tokens whose spelling stands in it.

    Raises GrammarError for one that ends a sequence: nothing could follow.
    """
    found: list[str | int] = [text]
    for token_id in sorted(vocabulary.special_ids, key=lambda one: -len(vocabulary.tokens[one])):
        spelling = vocabulary.tokens[token_id].decode("utf-8", "replace")
        if spelling and any(isinstance(part, str) and spelling in part for part in found):
            if token_id in vocabulary.eos_ids:
                raise GrammarError(f"structural tag: {spelling} ends the output, and cannot stand in {text!r}")
            found = [piece for part in found for piece in _split(part, spelling, token_id)]
    return found


def _split(part: str | int, spelling: str, token_id: int) -> list[str | int]:
    if isinstance(part, int):
        return [part]
    pieces: list[str | int] = []
    for text in part.split(spelling):
        pieces += [token_id, *([text] if text else [])]
    return pieces[1:]
