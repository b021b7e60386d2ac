"""What a measurement was made on."""

from __future__ import annotations

import platform
from importlib.metadata import version

from core.host_cpu import cpu_flags, cpu_info, num_cores
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
    return cpu_info("model name", info) or platform.machine()


def vector_instructions() -> str:
    """The best of `VECTOR_INSTRUCTIONS` that the processor has, or none of them: ""."""
    flags = cpu_flags()
    return next((name for name in VECTOR_INSTRUCTIONS if name in flags), "")
