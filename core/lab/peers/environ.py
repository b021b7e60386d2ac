"""What processes of peers are started with: both cores, nothing fetched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

NUM_THREADS = os.cpu_count() or 1
MAX_MODEL_LEN = 4096  # tokens of a sequence
MAX_NUM_SEQS = 32
SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "peers"


def environ() -> Mapping[str, str]:
    """vLLM leaves a core to its front by default, which is half of two."""
    more = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    return {**os.environ, **more}
