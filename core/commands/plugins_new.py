"""`plugins new NAME --stage STAGE [--dir FOLDER]`: write a complete, tested plugin package. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.authoring.kinds import KINDS
from core.authoring.scaffold import kind_of, write_package
from core.commands.words import words_of
from core.errors import ConfigError

USAGE = f"usage: plugins new NAME --stage STAGE [--dir FOLDER]; STAGE is one of {', '.join(KINDS)}"


def run(arguments: Sequence[str]) -> int:
    name, options = _parsed(arguments)
    group = kind_of(options["--stage"]).group
    target = write_package(name, group, Path(options.get("--dir", ".")))
    module = name.replace("-", "_")
    print(f"{target}: a plugin for `{group}`; {target}/{module}/{group}.py is where to start")
    print(f"next: pip install -e '{target}[dev]' && pytest {target} && nonet plugins check {name}")
    return 0


def _parsed(arguments: Sequence[str]) -> tuple[str, dict[str, str]]:
    names, options = [], {}
    words = iter(words_of(arguments))
    for word in words:
        if word in ("--stage", "--dir"):
            options[word] = next(words, "")
        elif word.startswith("-"):
            raise ConfigError(f"unknown argument {word!r}; {USAGE}")
        else:
            names.append(word)
    if len(names) != 1 or not options.get("--stage") or options.get("--dir") == "":
        raise ConfigError(USAGE)
    return names[0], options
