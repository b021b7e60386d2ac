"""Built-in frontends."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION


@hookimpl
def provide_frontends() -> Iterable[Component]:
    yield Component(
        "openai_http",
        "plugins.frontends.openai_http:OpenAIHttp",
        "OpenAI-compatible HTTP with streaming",
        settings="plugins.frontends.openai_http.settings:Settings",
        provides=("openai", "tools"),
    )
    yield Component(
        "chat_cli",
        "plugins.frontends.chat_cli:ChatCli",
        "a terminal chat",
        settings="plugins.frontends.chat_settings:ChatSettings",
        requires=("renderer.messages",),
    )
    yield Component("offline", "plugins.frontends.offline:Offline", "one prompt, or a JSONL file")
