"""`observers: lottery_log`. One JSON line per ended request."""

from __future__ import annotations

import json
from pathlib import Path

from core.observers import ObserverContext
from core.outputs import RequestRecord, StepStats
from pydantic import BaseModel, ConfigDict


class LotteryLog:
    """Who is told of each step and each ended request. Runs in a thread of its own: it can slow no request down."""

    class Settings(BaseModel):
        """Values a user may set, as `observers.lottery_log.<key>=<value>`."""

        model_config = ConfigDict(frozen=True, extra="forbid")
        path: Path = Path("lottery-requests.jsonl")

    def __init__(self, settings: Settings, context: ObserverContext):
        self._path = settings.path

    def step_finished(self, stats: StepStats) -> None:
        """One engine step has ended; nothing to write."""

    def request_finished(self, record: RequestRecord) -> None:
        """A request has ended, in whatever way (also abort and error)."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row(record)) + "\n")

    def close(self) -> None:
        """The server ends; nothing is held back."""


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
