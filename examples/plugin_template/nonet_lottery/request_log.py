"""One JSON line per ended request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.outputs import RequestRecord

LOG_VARIABLE = "NONET_LOTTERY_LOG"
"""Environment variable that names the file; without it, `lottery-requests.jsonl` in the working directory."""


def append(record: RequestRecord) -> None:
    path = Path(os.environ.get(LOG_VARIABLE, "lottery-requests.jsonl"))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row(record)) + "\n")


def row(record: RequestRecord) -> dict[str, object]:
    """Times in seconds since arrival; null where there was no token."""
    return {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "finish_reasons": [str(reason) for reason in record.finish_reasons],
        "prompt_tokens": record.usage.prompt_tokens,
        "completion_tokens": record.usage.completion_tokens,
        "queue_s": record.timings.queue,
        "ttft_s": record.timings.ttft,
        "e2e_s": record.timings.e2e,
    }
