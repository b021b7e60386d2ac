"""`observers: chaos_ledger`. What the books of a run are compared with."""

from __future__ import annotations

import json

from chaos_plugin import LedgerSettings

from core.observers import ObserverContext
from core.outputs import RequestRecord, StepStats


class Ledger:
    Settings = LedgerSettings

    def __init__(self, settings: LedgerSettings, context: ObserverContext):
        self._path = settings.path

    def step_finished(self, stats: StepStats) -> None:
        pass

    def request_finished(self, record: RequestRecord) -> None:
        line = {
            "id": record.request_id,
            "reasons": [str(reason) for reason in record.finish_reasons],
            "prompt_tokens": record.usage.prompt_tokens,
            "completion_tokens": record.usage.completion_tokens,
        }
        with self._path.open("a", encoding="utf-8") as ledger:
            ledger.write(json.dumps(line) + "\n")

    def close(self) -> None:
        pass
