"""Files that a command is asked to write."""

from __future__ import annotations

import os
from pathlib import Path

from core.errors import ConfigError


def check_writable(key: str, path: str | None) -> None:
    """Before minutes of work: raises ConfigError where nothing can be written to `path`. None: nothing is to be written."""
    if path is None:
        return
    place = Path(path)
    if place.is_dir() or not os.access(place if place.exists() else place.absolute().parent, os.W_OK):
        raise ConfigError(f"{key}={path}: it cannot be written; name a file in a folder that is there", key)


def write_text(key: str, path: str, text: str) -> None:
    """Raises ConfigError naming the key that named the file."""
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{key}={path}: {error.strerror or error}", key) from None
