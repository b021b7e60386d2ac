"""The hooks: what this package adds to Nonet. Read before config is known, so nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from core.hookspecs import Component, hookimpl

NONET_API = "1.1"  # the version of the contract that this was written for; later ones of 1 take it too


@hookimpl
def provide_schedulers() -> Iterable[Component]:
    """Makes `scheduler=lottery` a choice. The class is imported only when config selects it."""
    yield Component("lottery", "nonet_lottery.lottery:Lottery", "who holds more tickets is admitted sooner")


@hookimpl
def provide_observers() -> Iterable[Component]:
    """Makes `observers=[prometheus,lottery_log]` possible: of observers any number is chosen."""
    yield Component("lottery_log", "nonet_lottery.request_log:LotteryLog", "a JSON line per ended request")


@hookimpl
def provide_config_packages() -> Iterable[str]:
    """Puts our YAML on the config search path: scheduler/lottery.yaml and preset/lottery.yaml."""
    yield "nonet_lottery.configs"
