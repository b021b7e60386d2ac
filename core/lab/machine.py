"""What a measurement was made on."""

from __future__ import annotations

import platform
from importlib.metadata import version

from core.version import nonet_version


def machine() -> dict[str, str]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "nonet": nonet_version(),
        "torch": version("torch"),
    }
