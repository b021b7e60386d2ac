"""`chat`: talk to the model in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from core.commands.terminal import run_in_terminal


def run(arguments: Sequence[str]) -> int:
    return run_in_terminal("chat_cli", arguments)
