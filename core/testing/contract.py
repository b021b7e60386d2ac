"""What every contract suite is: checks on one component, which the suite builds as assembly does.

A plugin's own test is three lines, the same for every config group::

    class TestLottery(SchedulerContract):
        component = Lottery

`python -m core plugins check` runs the same suites on what is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel


class Contract:
    """Base of the suites. Checks of an optional capability run where `provides` has its word."""

    component: ClassVar[Any]
    """The class under test: `Settings` in it, and `__init__(self, settings, context)`."""
    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Values under which it is checked; what is left out keeps its default."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """As in its `core.hookspecs.Component`."""

    def make(self, context: object, **settings: Any) -> Any:
        """`component(settings, context)`, with `settings` above the class's own. Override where that is not enough."""
        values = self.component.Settings.model_validate({**self.settings, **settings})
        made: list[tuple[BaseModel, dict[str, Any]]] = self.__dict__.setdefault("_made", [])
        made.append((values, values.model_dump()))
        return self.component(values, context)

    def needs(self, *words: str) -> None:
        """Skip the check unless the component provides these words."""
        missing = sorted(set(words) - self.provides)
        if missing:
            pytest.skip(f"it does not provide {', '.join(missing)}")

    @pytest.fixture(autouse=True)
    def _settings_stay(self) -> Iterator[None]:
        yield
        self.assert_settings_stay()

    def assert_settings_stay(self) -> None:
        """After each check: settings are frozen, and so are the lists and mappings in them."""
        for values, before in self.__dict__.get("_made", ()):
            after = values.model_dump()
            assert after == before, f"the component changed its settings from {before} to {after}"
