"""`plugins faults`: what a failing plugin of each stage does to 32 running requests, as a table.

Runs on a tiny model made on the fly, unless `model.source=…` names one. Takes a few minutes: each block is 5 s. Exit code 1
where a cell is not as promised.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from core.errors import ConfigError, near_matches

USAGE = "usage: plugins faults [--stage GROUP …] [--kind KIND …] [--block SECONDS] [--json] [overrides]"
VALUED = ("--stage", "--kind", "--block")
FLAGS = ("--json",)


@dataclass(frozen=True, slots=True)
class Arguments:
    groups: tuple[str, ...]
    kinds: tuple[str, ...]
    block_s: float
    overrides: tuple[str, ...]
    as_json: bool


def run(arguments: Sequence[str]) -> int:
    from core.lab.fault_table import as_table, check_config, fault_table
    from core.lab.quiet import quiet
    from core.testing.sweeper import swept_folder
    from core.testing.tiny_models import make_tiny_model

    asked = parsed(arguments)
    overrides = list(asked.overrides)
    check_config(overrides, asked.groups)
    print(
        "each cell is an engine with a plugin that fails, seconds to half a minute; all take some minutes",
        file=sys.stderr,
    )
    with swept_folder("nonet-faults-") as (folder, _), quiet():
        if not any(override.startswith("model.source=") for override in overrides):
            overrides.append(f"model.source={make_tiny_model(Path(folder) / 'tiny')}")
        cells = asyncio.run(fault_table(overrides, asked.groups, asked.kinds, asked.block_s))
    if asked.as_json:
        print(json.dumps([{**asdict(cell), "problem": cell.problem} for cell in cells], indent=2, ensure_ascii=False))
    else:
        print(as_table(cells))
    return int(any(cell.problem for cell in cells))


def parsed(arguments: Sequence[str]) -> Arguments:
    """Without --stage all stages, without --kind all kinds. Raises ConfigError with what was meant, or with the usage."""
    from core.lab.fault_table import GROUPS
    from core.testing.harness.faulty import KINDS

    given: dict[str, list[str]] = {word: [] for word in VALUED}
    overrides: list[str] = []
    words = iter(_split(arguments))
    for word in words:
        if word in VALUED:
            given[word].append(_value(word, next(words, "")))
        elif word.startswith("-") and word not in FLAGS:
            raise ConfigError(f"unknown argument {word!r}{near_matches(word, (*VALUED, *FLAGS))}; {USAGE}")
        elif word not in FLAGS:
            overrides.append(word)
    for word, known in (("--stage", GROUPS), ("--kind", KINDS)):
        for value in given[word]:
            if value not in known:
                raise ConfigError(f"{word}: there is no {value!r}{near_matches(value, known)}")
    return Arguments(
        groups=tuple(group for group in GROUPS if not given["--stage"] or group in given["--stage"]),
        kinds=tuple(kind for kind in KINDS if not given["--kind"] or kind in given["--kind"]),
        block_s=_seconds(given["--block"][-1] if given["--block"] else "5"),
        overrides=tuple(overrides),
        as_json="--json" in arguments,
    )


def _split(arguments: Sequence[str]) -> list[str]:
    """`--stage=x` as two words."""
    return [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]


def _value(word: str, value: str) -> str:
    if not value or value.startswith("--"):
        raise ConfigError(f"{word} needs a value; {USAGE}")
    return value


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 600:
        raise ConfigError(f"--block={text}: seconds that a call blocks, 0.1 to 600")
    return seconds
