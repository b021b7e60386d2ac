"""What a stream of a tool parser says of a text."""

from __future__ import annotations

from collections.abc import Iterable

from core.stages.tool_parser import ToolStream


def told(stream: ToolStream, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)])."""
    content, calls = "", list[list[str]]()
    for parsed in [*map(stream.push, pieces), stream.finish()]:
        content += parsed.content
        for delta in parsed.tool_calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]
