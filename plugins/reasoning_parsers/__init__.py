"""Built-in reasoning parsers."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import API_VERSION, Component, hookimpl

NONET_API = API_VERSION


@hookimpl
def provide_reasoning_parsers() -> Iterable[Component]:
    yield Component(
        "think",
        "plugins.reasoning_parsers.think:Think",
        "<think>…</think> before the answer, as DeepSeek R1, Qwen 3 and many others write it",
        provides=("reasoning",),
    )
    yield Component(
        "harmony",
        "plugins.reasoning_parsers.harmony:Harmony",
        "the channels of gpt-oss: analysis is reasoning, final and commentary are told",
        provides=("reasoning",),
    )
