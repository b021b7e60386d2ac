"""What components did wrong while they ran: the latest of each, for `Front.incidents`, `/health` and `/plugins`."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable

from core.isolation.faults import ComponentName
from core.outputs import PluginIncident

log = logging.getLogger("nonet.incidents")


class Incidents:
    """Kept by the front: its own components', counted here, and those that the engine tells of. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._front: dict[ComponentName, PluginIncident] = {}
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
        """Count a failure of a component of the front. `error` is logged with its traceback."""
        log.error("%s: %s", part.who, reason, exc_info=error)
        with self._lock:
            before = self._front.get(part)
            failures = 1 + (before.failures if before is not None else 0)
            self._front[part] = PluginIncident(
                group=part.group,
                name=part.name,
                plugin=part.plugin,
                reason=reason,
                failures=failures,
                quarantined=failures >= quarantine_after,
            )

    def of(self, part: ComponentName) -> PluginIncident | None:
        """The latest of a component of the front."""
        return self._front.get(part)

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
        with self._lock:
            return (*self._engine.values(), *self._front.values())
