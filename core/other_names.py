"""What is said of a component that there is not. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from core.errors import near_matches

NOUNS: Mapping[str, str] = {
    "grammars": "grammar backend",
    "logits_processors": "logits processor",
    "observers": "observer",
}
"""Of the chains, whose names are plurals."""

ELSEWHERE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "tool_parser": {
        **dict.fromkeys(("qwen", "qwen2", "qwen25", "qwen2_5", "qwen3"), ("hermes", "qwen3_coder")),
        **dict.fromkeys(("qwen3_xml", "qwen_coder"), ("qwen3_coder",)),
        **dict.fromkeys(("llama3", "llama31", "llama3_1", "llama"), ("llama3_json",)),
        **dict.fromkeys(("llama4", "llama4_json", "llama4_pythonic"), ("pythonic",)),
        **dict.fromkeys(("openai", "gpt_oss", "gpt-oss", "gptoss"), ("harmony",)),
    },
    "reasoning_parser": {
        **dict.fromkeys(("qwen3", "qwen3-thinking", "qwen3_thinking", "qwen", "qwq"), ("think",)),
        **dict.fromkeys(("deepseek_r1", "deepseek-r1", "deepseek", "deepseek_v3", "glm45"), ("think",)),
        **dict.fromkeys(("openai", "openai_gptoss", "gpt_oss", "gpt-oss", "gptoss"), ("harmony",)),
    },
    "grammars": {"guidance": ("llguidance",)},
}
"""Names that vLLM and SGLang have for what is called otherwise here, by group."""


def unknown_component(group: str, name: str, known: Iterable[str]) -> str:
    """`no tool_parser is called 'qwen'; did you mean hermes, qwen3_coder?`"""
    names = list(known)
    meant = [one for one in ELSEWHERE.get(group, {}).get(name.casefold(), ()) if one in names]
    hint = f"; did you mean {', '.join(meant)}?" if meant else near_matches(name, names)
    return f"no {NOUNS.get(group, group)} is called {name!r}{hint or '; there is none'}"
