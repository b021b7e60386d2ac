"""Built-in tool parsers."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION


@hookimpl
def provide_tool_parsers() -> Iterable[Component]:
    yield Component(
        "hermes",
        "plugins.tool_parsers.hermes:Hermes",
        '<tool_call>{"name": …, "arguments": {…}}</tool_call>, as Hermes and Qwen models write it',
        provides=("tools",),
        requires=("frontend.tools", "renderer.messages", "renderer.tools"),
    )
