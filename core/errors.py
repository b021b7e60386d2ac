"""Errors that cross a seam. Each names what was wrong (field, config key, plugin, file) and the next step."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_PART = re.compile(r"(\w+=[\w.-]{1,128} \(plugin [\w.+:, -]{1,256}\)): ")


class NonetError(Exception):
    """Base of every error that Nonet raises on purpose."""


class ConfigError(NonetError):
    """A config key, value or group is wrong. Raised before any weight is read.

    `key` is the dotted config key in question, and `unknown` says that there is no such key.
    """

    def __init__(self, message: str, key: str = "", *, unknown: bool = False):
        super().__init__(message)
        self.key = key
        self.unknown = unknown


class PluginError(NonetError):
    """A plugin cannot be loaded, selected or built; the message names plugin, distribution and reason."""


class ModelFileError(NonetError):
    """A model file is missing, truncated, malformed or of an unsupported kind; names file and field."""


class RequestError(NonetError):
    """A request field is wrong or unsupported; becomes one HTTP 4xx.

    `param` is the request field, `code` a stable machine-readable word, `status` the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class OverloadedError(NonetError):
    """The server is past its limits; becomes 503 with Retry-After (seconds)."""

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class EngineDeadError(NonetError):
    """The engine process died or stopped answering; every pending call receives this once."""


class GenerationError(NonetError):
    """This one request failed while it ran (a plugin raised, NaN logits …).

    Where a component is to blame the message begins with its name: `sampler=chaos (plugin chaos, acme 1.0): …`.
    """

    @property
    def part(self) -> str | None:
        """The component to blame, as `core.pipeline.Part.who` writes it; None where the message names none."""
        found = _PART.match(str(self))
        return found[1] if found else None


class Terminated(SystemExit):
    """SIGTERM while something starts. What catches a plugin's own SystemExit lets this one through."""


def near_matches(word: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?` or `; choose one of …` for an unknown `word`."""
    names = sorted(known)
    folded: dict[str, list[str]] = {}  # a word in the wrong case is near
    for name in names:
        folded.setdefault(name.casefold(), []).append(name)
    close = [name for key in get_close_matches(word.casefold(), folded, n=3, cutoff=0.5) for name in folded[key]]
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; choose one of: {', '.join(names)}" if names else ""
