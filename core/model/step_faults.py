"""What an executor may tell of the components that it runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

from core.outputs import PluginIncident

P = ParamSpec("P")
T = TypeVar("T")


class StepFaults(Protocol):
    """Where an executor in the engine's process may tell which of the components that it runs did wrong. Groups: "model", …

    All of it may be left alone. The engine checks every result itself, and what a step raises; without this it only knows
    less: who held up a long step, and whether the model or the sampler made NaN.
    """

    @property
    def blocked_s(self) -> float:
        """Seconds, so far, in calls that were told as blocked: a caller of such a call is not blocked as well."""
        ...

    def call(self, group: str, request_id: str | None, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`method(…)`, timed; what it raises comes out as an error that names the component. `request_id`: for whom it works."""
        ...

    def watch(self, group: str, seconds: float) -> None:
        """A call that was not made by `call` took so long. An incident where that is more than `plugins.block_timeout`."""
        ...

    def note(self, group: str, reason: str) -> None:
        """The component did wrong: an incident."""
        ...

    def who(self, group: str) -> str:
        """The component by name, for a request's error: model=native (plugin models, nonet 1.0)."""
        ...

    def named_in(self, text: str) -> bool:
        """Whether an error names a component already."""
        ...

    def take_incidents(self) -> Sequence[PluginIncident]:
        """What was told since the last call, to go into `StepResult.incidents`."""
        ...


class NoFaults:
    """The `StepFaults` of an executor on its own. It keeps nothing."""

    blocked_s = 0.0

    def call(self, group: str, request_id: str | None, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return method(*args, **kwargs)

    def watch(self, group: str, seconds: float) -> None:
        """Nothing is told."""

    def note(self, group: str, reason: str) -> None:
        """Nothing is told."""

    def who(self, group: str) -> str:
        return group

    def named_in(self, text: str) -> bool:
        return False

    def take_incidents(self) -> Sequence[PluginIncident]:
        return ()
