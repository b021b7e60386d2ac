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
    "reasoning_effort": Refused("/v1/chat/completions, and a chat template that has it", ("none",)),
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

_PROCESSOR = 'send it as `logits_processors`: {"%s": {"%s": …}}'
ELSEWHERE: Mapping[str, str] = {
    **{f"xtc_{name}": _PROCESSOR % ("xtc", name) for name in ("probability", "threshold")},
    **{f"mirostat_{name}": _PROCESSOR % ("mirostat", name) for name in ("tau", "eta")},
    "mirostat": _PROCESSOR % ("mirostat", "tau"),
    **dict.fromkeys(("typical_p", "typical", "typ_p"), _PROCESSOR % ("typical", "mass")),
    **{
        f"dry_{name}": _PROCESSOR % ("dry", name)
        for name in ("multiplier", "base", "allowed_length", "sequence_breakers")
    },
    "dry_penalty_last_n": _PROCESSOR % ("dry", "last_n"),
    "vllm_xargs": "what a plugin reads is sent as `logits_processors`, by its name",
    "ebnf": 'send it as `guided_grammar`, or `structured_outputs`: {"grammar": …}',
    "grammar": 'send it as `guided_grammar`, or `structured_outputs`: {"grammar": …}',
    "regex": 'send it as `guided_regex`, or `structured_outputs`: {"regex": …}',
    "json_schema": "send it as `guided_json`, or in `response_format`",
    "structural_tag": 'send it as `structured_outputs`: {"structural_tag": …}, or `response_format`',
    "best_of": "/v1/completions has it; a chat draws `n` choices and tells them all",
}
"""Fields of vLLM, SGLang, llama.cpp and the other endpoint -> how the same is asked for here."""


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
    if name in ELSEWHERE:
        return RequestError(f"Unknown field `{name}`: {ELSEWHERE[name]}.", param=name, code="unknown_field")
    message = f"Unknown field `{word}`{near_matches(word, known)}"
    return RequestError(message, param=word, code="unknown_field")
