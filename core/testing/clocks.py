"""A trap for components that read a clock of their own, or sleep, where the context gives them a clock."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

import pytest

CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")


def trap_clocks(patch: pytest.MonkeyPatch, component: type, *more: str) -> list[str]:
    """From now on reading a clock, or calling `time.<more>`, raises; the list returned grows by each name, also when the
    error is swallowed.

    Covers the module `time`, what modules of the component's package imported from it, and `datetime.now`.
    """
    called: list[str] = []
    for name in (*CLOCKS, *more):
        original = getattr(time, name)
        trap = _trap(called, f"time.{name}")
        patch.setattr(time, name, trap)
        for module, key in _references(component, original):
            patch.setattr(module, key, trap)
    real = datetime.datetime
    traps = {name: staticmethod(_trap(called, f"datetime.{name}")) for name in ("now", "utcnow", "today")}
    trapped = type("datetime", (real,), traps)
    for module, key in _references(component, real):
        patch.setattr(module, key, trapped)
    patch.setattr(datetime, "datetime", trapped)
    return called


def _trap(called: list[str], name: str) -> Callable[..., NoReturn]:
    def trap(*_: object, **__: object) -> NoReturn:
        called.append(name)
        raise AssertionError(f"{name}() was called; use the clock of the context")

    return trap


def _references(component: type, value: object) -> Iterator[tuple[ModuleType, str]]:
    """Names of modules of the component's package, and of its base classes, that are bound to `value`."""
    package = component.__module__.partition(".")[0]
    bases = {cls.__module__ for cls in component.__mro__}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name.partition(".")[0] == package or name in bases):
            found: dict[str, Any] = dict(vars(module))
            yield from ((module, key) for key, bound in found.items() if bound is value and module is not datetime)
