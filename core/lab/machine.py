"""What a measurement was made on."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from core.version import nonet_version


def machine() -> dict[str, str]:
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "python": platform.python_version(),
        "nonet": nonet_version(),
        "torch": version("torch"),
    }


def processor(info: str = "/proc/cpuinfo") -> str:
    """The processor's model where the system says it (Linux), else its architecture."""
    with suppress(OSError):
        for line in Path(info).read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()
