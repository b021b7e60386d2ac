"""The words of a command that has options of its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence


def words_of(arguments: Sequence[str]) -> list[str]:
    """`--group=x` as two words."""
    return [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
