"""Checks that consist of pieces: each prints its table, and the last line has the figures of all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Literal, TypeVar

from core.errors import near_matches

T = TypeVar("T")
Size = Literal["quick", "full"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a piece found, in a few words with figures."""

    good: bool
    figures: str
    left_out: tuple[str, ...] = ()  # bounds that nothing was held against


def sized(arguments: Sequence[str]) -> tuple[list[str], Size]:
    """The pieces that a command line names, and how much each is to do: `--quick` is a smoke test."""
    names = [word for word in arguments if word != "--quick"]
    return names, "quick" if len(names) < len(arguments) else "full"


def given(pieces: Mapping[str, Callable[[T], Outcome]], value: T) -> dict[str, Callable[[], Outcome]]:
    """The same pieces, which have what they need."""
    return {name: _with(piece, value) for name, piece in pieces.items()}


def _with(piece: Callable[[T], Outcome], value: T) -> Callable[[], Outcome]:
    @wraps(piece)
    def run() -> Outcome:
        return piece(value)

    return run


def main(arguments: Sequence[str], pieces: Mapping[str, Callable[[], Outcome]], about: str) -> int:
    """Runs the pieces that `arguments` name, all of them without names. Exit code 1 where one fails, 2 for an unknown name."""
    if any(word in ("-h", "--help") for word in arguments):
        print("\n".join(["usage: [PIECE …], or all of them:", *_listed(pieces)]))
        return 0
    unknown = [name for name in arguments if name not in pieces]
    if unknown:
        near = near_matches(unknown[0], {*pieces, "--help", "--quick"} if unknown[0].startswith("-") else pieces)
        print(f"no piece is called {unknown[0]!r}{near}", file=sys.stderr)
        return 2
    started = time.monotonic()
    outcomes = []
    for name in arguments or pieces:
        print(f"--- {name}: {_line(pieces[name])}", flush=True)
        outcomes.append(pieces[name]())
    good = all(outcome.good for outcome in outcomes)
    figures = "; ".join(outcome.figures if outcome.good else f"FAILED: {outcome.figures}" for outcome in outcomes)
    left_out = ", ".join(bound for outcome in outcomes for bound in outcome.left_out)
    without = f"; without its bounds: {left_out}" if left_out else ""
    print(f"{about} {'ok' if good else 'FAILED'} in {time.monotonic() - started:.0f} s: {figures}{without}")
    return int(not good)


def _listed(pieces: Mapping[str, Callable[[], Outcome]]) -> list[str]:
    return [f"  {name:<16}{_line(piece)}" for name, piece in pieces.items()]


def _line(piece: Callable[[], Outcome]) -> str:
    return " ".join((piece.__doc__ or "").partition("\n\n")[0].split())
