"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from core.version import nonet_version

VECTOR_INSTRUCTIONS = ("avx512_bf16", "avx512_vnni", "avx512f", "avx2")
"""Best first, as Linux has them."""


def machine() -> dict[str, str]:
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "instructions": vector_instructions(),
        "cores": str(num_cores()),
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


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def vector_instructions() -> str:
    """The best of `VECTOR_INSTRUCTIONS` that the processor has, or none of them: ""."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    flags = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    return next((name for name in VECTOR_INSTRUCTIONS if name in flags), "")
