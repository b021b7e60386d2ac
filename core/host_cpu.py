"""The processor that this process runs on, as Linux tells of it; elsewhere nothing is known."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_info(key: str, info: str = "/proc/cpuinfo") -> str:
    """What the first core says of `key`; empty where it says nothing."""
    try:
        text = Path(info).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key and value.strip()), "")


def cpu_flags() -> frozenset[str]:
    """Names of instruction sets, as Linux has them."""
    return frozenset(cpu_info("flags").split())


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
