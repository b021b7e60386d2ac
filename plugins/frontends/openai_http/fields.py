"""What becomes of each request field: honoured (in `schema`), refused by name (the table here), or unknown.

Nothing is silently ignored. Fields without any effect on the answer are listed in `schema.WithoutEffect`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import RequestError, near_matches


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that OpenAI or vLLM knows and this server cannot honour, unless its value asks for nothing."""

    needs: str  # what would support it
    harmless: tuple[Any, ...] = ()  # values that ask for nothing; null always does


_TOOLS = "/v1/chat/completions, and a server with a tool parser"
_FUNCTIONS = "no plugin, but OpenAI's newer fields: `tools` and `tool_choice`"
_AUDIO = "a multimodal renderer plugin and a model with audio output"

REFUSED: Mapping[str, Refused] = {
    "tools": Refused(_TOOLS, ([],)),
    "tool_choice": Refused(_TOOLS, ("none",)),
    "parallel_tool_calls": Refused(_TOOLS, (True, False)),
    "functions": Refused(_FUNCTIONS, ([],)),
    "function_call": Refused(_FUNCTIONS, ("none",)),
    "guided_whitespace_pattern": Refused("a grammar plugin that takes patterns for white space"),
    "audio": Refused(_AUDIO),
    "modalities": Refused(_AUDIO, (["text"],)),
    "prediction": Refused("a decode plugin that verifies predicted outputs"),
    "web_search_options": Refused("a frontend plugin with web search"),
    "moderation": Refused("a frontend plugin with moderation"),
    "store": Refused("a frontend plugin that stores completions", (False,)),
    "reasoning_effort": Refused("a renderer plugin for a reasoning model", ("none",)),
    "verbosity": Refused("a renderer plugin for a model with verbosity levels"),
    "prompt_cache_options": Refused("a cache plugin with explicit prompt caching"),
    "chat_template": Refused("the renderer's own setting: a template in a request is never run"),
    "documents": Refused("a renderer plugin for retrieval templates"),
    "mm_processor_kwargs": Refused("a multimodal renderer plugin"),
    "suffix": Refused("a renderer plugin with a fill-in-the-middle template"),
    "use_beam_search": Refused("a decode plugin with beam search", (False,)),
    "length_penalty": Refused("a decode plugin with beam search", (1.0,)),
    "truncate_prompt_tokens": Refused("a renderer plugin that truncates"),
    "spaces_between_special_tokens": Refused("a detokenizer plugin", (True,)),
    "prompt_embeds": Refused("a renderer plugin with prompt embeddings"),
    "kv_transfer_params": Refused("an executor plugin with KV transfer"),
}


def is_harmless(value: Any, harmless: Iterable[Any]) -> bool:
    """Equal in value and type: JSON true is not 1."""
    return value is None or any(type(value) is type(item) and value == item for item in harmless)


def check_fields(body: Mapping[str, Any], honoured: Iterable[str]) -> dict[str, Any]:
    """The honoured part of `body`. Raises RequestError for a refused or unknown field."""
    known = set(honoured)
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name not in REFUSED:
            raise _unknown(name, known)
        elif not is_harmless(value, REFUSED[name].harmless):
            needs = REFUSED[name].needs
            raise RequestError(f"`{name}` is not supported here; it needs {needs}.", param=name, code="unsupported")
    return kept


def printable(text: str) -> str:
    """A client's word for use in a message: short, no control characters."""
    return re.sub(r"[^\x20-\x7e]", "?", text)[:64]


def _unknown(name: str, known: Iterable[str]) -> RequestError:
    word = printable(name)
    message = f"Unknown field `{word}`{near_matches(word, known)}"
    return RequestError(message, param=word, code="unknown_field")
