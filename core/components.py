"""The config groups, and a component together with the plugin that provides it. Imports neither pluggy nor torch.

`core.hookspecs` has what an author writes, `core.plugins` finds it; what is here may be known wherever a pipeline runs.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from core.errors import PluginError, Terminated, described

if TYPE_CHECKING:
    from core.hookspecs import Component

STAGES = ("frontend", "renderer", "admission", "scheduler", "prefill", "decode", "sampler", "detokenizer", "completion")
"""The nine words, in request order."""

PARTS = ("model", "attention", "quant", "cache", "executor", "tool_parser", "reasoning_parser", "predictor")
"""What the stages use, one of each."""

CHAINS = ("grammars", "logits_processors", "observers")
"""Groups of which config selects any number, as a mapping from name to values."""

GROUPS = STAGES + PARTS
"""Config groups that exactly one component is chosen from."""


def hook_of(group: str) -> str:
    """The hook that provides components for a group: provide_schedulers, provide_observers …"""
    return f"provide_{group}" if group in CHAINS else f"provide_{group}s"


Status = Literal["loaded", "disabled", "failed"]


def who(group: str, name: str, plugin: str) -> str:
    """A component for messages: sampler=chaos (plugin chaos, acme-chaos 1.0). `core.errors.GenerationError.part` reads it."""
    return f"{group}={name} (plugin {plugin})"


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin as found. `reason` says why it is not loaded; `warnings`, what its author should mend all the same."""

    name: str
    distribution: str
    version: str
    status: Status
    reason: str = ""
    builtin: bool = False
    components: tuple[tuple[str, Component], ...] = ()  # (group, component)
    config_packages: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    api: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def wheel(self) -> str:
        return f"{self.distribution} {self.version}"

    @property
    def who(self) -> str:
        """For messages: lottery (nonet-lottery 0.1.0)."""
        return f"{self.name} ({self.wheel})"

    @property
    def text(self) -> str:
        """Within the name of a component: lottery, nonet-lottery 0.1.0."""
        return f"{self.name}, {self.wheel}"

    def failed(self, reason: str) -> PluginRecord:
        """The same, providing nothing."""
        return replace(self, status="failed", reason=reason, components=(), config_packages=(), hooks=())


@dataclass(frozen=True, slots=True)
class Provided:
    """A component together with the plugin that provides it."""

    group: str
    component: Component
    plugin: PluginRecord

    @property
    def who(self) -> str:
        """For messages: sampler=chaos (plugin chaos, acme-chaos 1.0)."""
        return who(self.group, self.component.name, self.plugin.text)


def import_target(provided: Provided, path: str) -> Any:
    """Import "package.module:Name" of a component. Raises PluginError naming plugin, wheel and cause."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Terminated, KeyboardInterrupt):
        raise
    except BaseException as error:  # a stranger's code may raise anything
        raise PluginError(f"{provided.who}: cannot import {path!r}: {described(error)}") from error


def closed_model(provided: Provided, path: str, found: object, purpose: str) -> type[BaseModel]:
    """What was found at a component's `path`, as a pydantic model that is frozen and refuses unknown keys.

    Raises PluginError where it is none. `purpose`: what such a model is for, as "the values of a component are one".
    """
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise PluginError(f"{provided.who}: {path} is no pydantic model; {purpose}")
    if not found.model_config.get("frozen") or found.model_config.get("extra") != "forbid":
        raise PluginError(
            f'{provided.who}: {path} must be frozen and refuse unknown keys: ConfigDict(frozen=True, extra="forbid")'
        )
    return found
