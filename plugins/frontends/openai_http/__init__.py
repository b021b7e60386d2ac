"""OpenAI-compatible HTTP frontend (stage 1). `OpenAIHttp` is imported on first use: `settings` needs no web packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plugins.frontends.openai_http.frontend import OpenAIHttp

__all__ = ["OpenAIHttp"]


def __getattr__(name: str) -> Any:
    if name != "OpenAIHttp":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from plugins.frontends.openai_http.frontend import OpenAIHttp

    return OpenAIHttp
