"""Errors that cross a seam. Each names what was wrong (field, config key, plugin, file) and the next step."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class NonetError(Exception):
    """Base of every error that Nonet raises on purpose."""


class ConfigError(NonetError):
    """A config key, value or group is wrong. Raised before any weight is read."""


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
    """The engine failed this one request while it ran (a plugin raised, NaN logits …)."""


def near_matches(word: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?` or `; choose one of …` for an unknown `word`."""
    names = sorted(known)
    close = get_close_matches(word, names, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; choose one of: {', '.join(names)}" if names else ""
