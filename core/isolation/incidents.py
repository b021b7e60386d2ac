"""What components did wrong while they ran: the latest of each, for `Front.incidents`, `/health` and `/plugins`."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable

import msgspec

from core.isolation.faults import ComponentName, Tally
from core.outputs import PluginIncident

log = logging.getLogger("nonet.incidents")


class Incidents:
    """Kept by the front: its own components', counted here, and those that the engine tells of. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._front: dict[ComponentName, Tally] = {}
        self._engine: dict[tuple[str, str], PluginIncident] = {}
        self._engine_lost = False

    def failed(
        self,
        part: ComponentName,
        reason: str,
        *,
        quarantine_after: float = math.inf,
        error: BaseException | None = None,
    ) -> None:
        """Count a failure of a component of the front."""
        with self._lock:
            tally = self._front.setdefault(part, Tally(part, log, quarantine_after))
        tally.failed(reason, error)

    def of(self, part: ComponentName) -> PluginIncident | None:
        """The latest of a component of the front."""
        tally = self._front.get(part)
        return None if tally is None else tally.latest

    def take(self, incidents: Iterable[PluginIncident]) -> None:
        """Of the engine. Those of an engine that was lost are forgotten when the next one says anything."""
        with self._lock:
            if self._engine_lost:
                self._engine.clear()
                self._engine_lost = False
            for incident in incidents:
                self._engine[incident.group, incident.name] = incident

    def lose_engine(self) -> None:
        self._engine_lost = True

    def latest(self) -> tuple[PluginIncident, ...]:
        """One of each component: a logits processor may fail in the engine, and here with a request's parameters."""
        with self._lock:
            found = dict(self._engine)
            for tally in self._front.values():
                if (incident := tally.latest) is not None:
                    key = incident.group, incident.name
                    found[key] = _together(found[key], incident) if key in found else incident
            return tuple(found.values())


def _together(engine: PluginIncident, front: PluginIncident) -> PluginIncident:
    """What it was switched off for is told before what has come since."""
    told = engine if engine.quarantined else front
    return msgspec.structs.replace(told, failures=engine.failures + front.failures)
