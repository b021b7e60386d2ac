"""Control tokens in the texts of a structural tag."""

from __future__ import annotations

from core.stages.grammar import GrammarError, Vocabulary


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
