"""The command line: `nonet <command> [options] [overrides]`. The command is stripped here, the rest is Hydra's grammar."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from core.errors import NonetError, near_matches

COMMANDS = {
    "serve": "serve a model over HTTP: serve +preset=chat frontend.port=8123",
    "chat": "chat in the terminal: chat +preset=chat",
    "generate": 'one prompt, or a JSONL file: generate +preset=chat prompt="…" max_tokens=32 temperature=0',
    "bench": "offline throughput, TTFT, TPOT and the framework's share, as JSON",
    "plugins": "what is installed: plugins [--json]",
    "explain": "the nine stages of a config, and where each value came from: explain +preset=chat",
    "doctor": "look for what commonly goes wrong on a machine",
    "models": "models in the cache: models [list | pull SOURCE | remove NAME]",
}
"""Command -> its line of help. Each lives in core/commands/<command>.py as `run(arguments) -> exit code`."""


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
    if command not in COMMANDS:
        print(f"nonet: unknown command {command!r}{near_matches(command, COMMANDS)}", file=sys.stderr)
        return 2
    if rest and rest[0] in ("-h", "--help"):
        print(COMMANDS[command])
        return 0
    return _run(command, rest)


def _run(command: str, arguments: list[str]) -> int:
    try:
        run = importlib.import_module(f"core.commands.{command}").run
        return int(run(arguments))
    except NonetError as error:
        print(f"nonet {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `nonet plugins | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
