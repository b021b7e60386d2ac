"""Files that a command is asked to write."""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigError


def write_text(key: str, path: str, text: str) -> None:
    """Raises ConfigError naming the key that named the file."""
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{key}={path}: {error.strerror or error}", key) from None
