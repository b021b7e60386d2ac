"""Errors that cross a seam. Each names what was wrong (field, config key, plugin, file) and the next step."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

MAX_REASON = 400  # characters of a stranger's error
MAX_TOLD = 4000  # characters of a stranger's words for a client
MAX_SHOWN = 100  # characters of a stranger's value
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


NO_TOKEN_LEFT = "the request leaves no token"  # noqa: S105
"""How a sampler begins the reason of a row that the request's own parameters have emptied: nobody's fault but theirs."""


class GenerationError(NonetError):
    """This one request failed while it ran (a plugin raised, NaN logits …).

    Where a component is to blame the message begins with its name: `sampler=chaos (plugin chaos, acme 1.0): …`.
    """

    @property
    def part(self) -> str | None:
        """The component to blame, as `core.pipeline.Part.who` writes it; None where the message names none."""
        found = _PART.match(str(self))
        return found[1] if found else None

    @property
    def conflict(self) -> str | None:
        """What the request's own parameters did not leave together, in words for its client; else None."""
        reason = str(self)[len(self.part) + 2 :] if self.part else str(self)
        return reason if reason.startswith(NO_TOKEN_LEFT) else None


class Terminated(SystemExit):
    """SIGTERM or SIGINT while something starts. What catches a plugin's own SystemExit lets this one through."""


def described(error: BaseException) -> str:
    """An error as one printable line: one that names its plugin by its text, any other with its type."""
    try:
        text = str.__str__(str(error))  # exactly a str, whose methods are nobody's
    except Terminated:
        raise
    except BaseException:  # its __str__ is a stranger's too
        text = "an error without a text"
    if isinstance(error, PluginError) and text:
        return printable(text)
    return printable(f"{type(error).__name__}: {text}").removesuffix(":")


def told(text: object) -> str:
    """A stranger's words for a client, as one printable line."""
    try:
        return printable(str.__str__(str(text)), MAX_TOLD)
    except Terminated:
        raise
    except BaseException:
        return f"a {type(text).__name__} without a text"


def shown(value: object) -> str:
    """A stranger's value in a message, as one printable line."""
    try:
        return printable(str.__str__(repr(value)), MAX_SHOWN)
    except Terminated:
        raise
    except BaseException:  # its __repr__ is a stranger's too
        return f"a {type(value).__name__}"


def printable(text: str, limit: int = MAX_REASON) -> str:
    """A stranger's words as one short line: no line breaks, control characters or lone surrogates, which have no UTF-8 form."""
    text = " ".join(text.split())
    text = text if len(text) <= limit else f"{text[:limit]}…"
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


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
