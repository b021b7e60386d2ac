"""Built-in tool parsers."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION

_FORMATS = {
    "hermes": (
        "hermes:Hermes",
        '<tool_call>{"name": …, "arguments": {…}}</tool_call>, as Hermes and Qwen models write it',
    ),
    "llama3_json": ("llama3_json:Llama3Json", '{"name": …, "parameters": {…}}, as Llama 3.1 to 3.3 write it'),
    "mistral": ("mistral:Mistral", '[TOOL_CALLS][{"name": …, "arguments": {…}}], or [TOOL_CALLS]name{…}'),
    "pythonic": ("pythonic:Pythonic", '[f(a=1), g(b="x")], as Llama 3.2 and 4 write it'),
    "harmony": ("harmony:Harmony", "messages to functions in the channels of gpt-oss"),
    "qwen3_coder": ("qwen3_coder:Qwen3Coder", "tags for the function and each parameter, as Qwen 3 Coder writes it"),
}


@hookimpl
def provide_tool_parsers() -> Iterable[Component]:
    for name, (target, summary) in _FORMATS.items():
        yield Component(
            name,
            f"plugins.tool_parsers.{target}",
            summary,
            provides=("tools", "grammar"),
            requires=("frontend.tools", "renderer.messages", "renderer.tools"),
        )
