"""Arguments that describe a request rather than the config: `prompt="…" max_tokens=32`. They never meet Hydra's grammar,
so a prompt may hold quotes, commas and equal signs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.config.files import CONFIG_DIR
from core.config.overrides import ROOTS
from core.errors import ConfigError

TEXTS = ("prompt", "guided_regex", "guided_grammar")
"""Fields that are texts, whatever they begin with."""


@dataclass(frozen=True, slots=True)
class SplitArguments:
    overrides: list[str]
    request: dict[str, Any]


def split(arguments: Sequence[str]) -> SplitArguments:
    """A word without a dot that is no config group is a request field; lists and objects are written as JSON.

    The keys of the section `structured_outputs` have a dot: what is given to its name alone is the field of that name.
    """
    overrides, request = [], {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals and not argument.startswith("~"):
            raise ConfigError(f'{argument!r}: write key=value, such as prompt="…", max_tokens=32 or +preset=chat')
        is_field = key == "structured_outputs" or key not in (*ROOTS, CONFIG_DIR[:-1])
        if equals and key.isidentifier() and is_field:
            request[key] = _value(key, value)
        else:
            overrides.append(argument)
    return SplitArguments(overrides, request)


def _value(key: str, text: str) -> Any:
    if key in TEXTS:
        return text
    if not text.startswith(("[", "{")):
        return None if text == "null" else text
    try:
        return json.loads(text)
    except ValueError as error:
        example = """'{"regex": "[0-9]+"}'""" if text.startswith("{") else """'["a", "b"]'"""
        raise ConfigError(f"{key}: {text!r} is not JSON: {error}; write it as in {key}={example}") from None
