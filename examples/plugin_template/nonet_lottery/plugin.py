"""The hooks: what this package adds to Nonet. Read before config is known, so nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from core.hookspecs import Component, hookimpl

from nonet_lottery import request_log

if TYPE_CHECKING:
    from core.outputs import RequestRecord


@hookimpl
def provide_schedulers() -> Iterable[Component]:
    """Makes `scheduler=lottery` a choice. The class is imported only when config selects it."""
    yield Component("lottery", "nonet_lottery.lottery:Lottery", "who holds more tickets is admitted sooner")


@hookimpl
def provide_config_packages() -> Iterable[str]:
    """Puts our YAML on the config search path: scheduler/lottery.yaml and preset/lottery.yaml."""
    yield "nonet_lottery.configs"


@hookimpl
def request_finished(record: RequestRecord) -> None:
    """An observer. It runs only when the user says `plugins.enable=[lottery]`."""
    request_log.append(record)
