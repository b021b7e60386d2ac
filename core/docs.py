"""Generate docs/hooks.md from `core.hookspecs`: `python -m core.docs`, or `--check` to compare."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core import hookspecs
from core.hookspecs import API_VERSION, GROUPS, PROJECT, STAGES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "hooks.md"


def hooks() -> list[Callable[..., Any]]:
    """The hook specs in the order they stand in the file, which is request order."""
    found = [fn for _, fn in inspect.getmembers(hookspecs, inspect.isfunction) if hasattr(fn, f"{PROJECT}_spec")]
    return sorted(found, key=lambda fn: fn.__code__.co_firstlineno)


def signature(fn: Callable[..., Any]) -> str:
    return f"{fn.__name__}{inspect.signature(fn)}".replace("'", "")


def render() -> str:
    """The page as Markdown."""
    parts = [
        "# Hooks\n",
        "Generated from `core/hookspecs.py` by `make docs`; do not edit.\n",
        inspect.getdoc(hookspecs) or "",
        f"\nAPI version: {API_VERSION}. Config groups: {', '.join(f'`{g}`' for g in GROUPS)}.",
        f"The first {len(STAGES)} are the stages.\n",
        "## Component\n",
        inspect.getdoc(hookspecs.Component) or "",
    ]
    for fn in hooks():
        parts += [f"\n## `{signature(fn)}`\n", _docstring(fn)]
    return "\n".join(parts) + "\n"


def _docstring(fn: Callable[..., Any]) -> str:
    text, _, example = (inspect.getdoc(fn) or "").partition("Example::")
    return f"{text.rstrip()}\n\n```python\n{inspect.cleandoc(example)}\n```" if example else text.rstrip()


def main(arguments: Sequence[str]) -> int:
    page = render()
    if "--check" not in arguments:
        TARGET.write_text(page, encoding="utf-8")
        return 0
    if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != page:
        print(f"{TARGET} is stale; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
