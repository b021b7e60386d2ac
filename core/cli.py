"""The command line: `nonet <command> [options] [overrides]`. The command is stripped here, the rest is Hydra's grammar."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

from core.errors import NonetError, near_matches

COMMANDS = {
    "serve": "serve a model over HTTP: serve +preset=chat frontend.port=8123",
    "chat": "chat in the terminal: chat +preset=chat",
    "generate": 'one prompt, or a JSONL file: generate +preset=chat prompt="…" max_tokens=32 temperature=0',
    "bench": "a workload, in this process or against a server: bench workload=single +preset=chat; --help lists them",
    "simulate": "schedulers on simulated traffic: simulate scheduler=fair workload=conversation; also table, fit, compare",
    "plugins": "what is installed: plugins [list] [--json]; for authors: plugins new, check, matrix, faults",
    "explain": "the nine stages of a config, and where each value came from: explain +preset=chat",
    "doctor": "look for what commonly goes wrong on a machine",
    "models": "models in the cache: models [list | pull SOURCE | remove NAME]",
}
"""Command -> its line of help. Each lives in core/commands/<command>.py as `run(arguments) -> exit code`."""

OWN_HELP = ("simulate", "bench")
"""Commands that print their own keys."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: nonet <command> [overrides]   (or python -m core …)", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command in ("-V", "--version", "version"):
        from core.version import nonet_version  # not before: it imports as much as all the rest here

        print(f"nonet {nonet_version()}")
        return 0
    if command not in COMMANDS:
        print(f"nonet: unknown command {command!r}{near_matches(command, COMMANDS)}", file=sys.stderr)
        return 2
    if rest and rest[0] in ("-h", "--help") and command not in OWN_HELP:
        print(f"nonet {command}: {COMMANDS[command]}")
        print("`nonet explain +preset=chat` prints every key with its value; docs/configs.md has those used most.")
        return 0
    return _run(command, rest)


def _run(command: str, arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in order: each gets its own number
        if getattr(sys, name) is None:  # closed: the same as an empty input, or an output that nobody reads
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)  # or the first file of a child would have that number
            setattr(sys, name, stream)
    try:
        run = importlib.import_module(f"core.commands.{command}").run
        return int(run(arguments))
    except NonetError as error:
        print(f"nonet {command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `nonet plugins | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a closed stream
        print(f"nonet {command}: {error.strerror or error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"nonet {command}: {_missing(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _missing(error: ModuleNotFoundError) -> str:
    return f"{error.name} is not installed for {sys.executable}; run `make setup` and use .venv/bin/python, or pip install nonet"
