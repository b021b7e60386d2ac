"""The root settings: a composed config, checked key by key, as frozen pydantic models. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.client import EngineProcessSettings
from core.errors import ConfigError, near_matches
from core.hookspecs import GROUPS
from core.model.sources import DEFAULT_SOURCE

S = TypeVar("S", bound=BaseModel)

MODEL_KEYS = ("source", "dtype", "device", "max_model_len", "served_name", "cache_dir")
"""Keys of the config group `model` that the pipeline itself reads; the others belong to the model plugin."""


class Selection(BaseModel):
    """What a config group selected: a component by name, and its values."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    values: dict[str, Any] = Field(default_factory=dict)


class ModelSettings(BaseModel):
    """Which model, and how it is kept. Shared by all model plugins."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: str = Field(default=DEFAULT_SOURCE, description="a path, hf:org/name or pypi:distribution==version")
    dtype: str = Field(default="auto", pattern="^(auto|float32|bfloat16|float16)$")
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    max_model_len: int | None = Field(default=None, ge=1, description="context length in tokens; null: the model's own")
    served_name: str | None = None
    cache_dir: str | None = Field(
        default=None, description="where downloaded models lie; null: the user's cache folder"
    )


class PluginSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    enable: tuple[str, ...] = Field(default=(), description="third-party plugins whose observers may run")
    disable: tuple[str, ...] = Field(
        default=(), description="plugins or distributions that are not loaded; [all]: built-ins only"
    )


class ProcessSettings(EngineProcessSettings):
    """How front and engine live together. Times in seconds."""

    separate: bool = Field(default=True, description="engine in a process of its own")
    drain_timeout: float = Field(default=0.0, ge=0, description="what running requests get after SIGTERM")


class Settings(BaseModel):
    """Everything a pipeline is made from. `groups` holds one Selection per config group."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    groups: dict[str, Selection]
    model: ModelSettings = ModelSettings()
    plugins: PluginSettings = PluginSettings()
    process: ProcessSettings = ProcessSettings()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Check a composed config. Raises ConfigError naming the key, with near matches."""
        known = {*GROUPS, "plugins", "process"}
        for key in config:
            if key not in known:
                raise ConfigError(f"unknown config key {key!r}{near_matches(str(key), known)}")
        refuse_targets(config)
        groups = {group: _selection(group, config.get(group)) for group in GROUPS}
        model_values = groups["model"].values
        own = {key: model_values.pop(key) for key in MODEL_KEYS if key in model_values}
        return cls(
            groups=groups,
            model=validated(ModelSettings, own, "model"),
            plugins=validated(PluginSettings, config.get("plugins") or {}, "plugins"),
            process=validated(ProcessSettings, config.get("process") or {}, "process"),
        )

    def located(self, path: Path) -> Settings:
        """The same with `model.source` as a place on this machine, so that another process need not fetch it again."""
        model = self.model.model_copy(update={"source": str(path.absolute())})
        return self.model_copy(update={"model": model})

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls.model_validate(json.loads(text))


def _selection(group: str, section: object) -> Selection:
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise ConfigError(
            f"config group {group!r} selects nothing; add `- {group}: …` to the defaults or pass {group}=…"
        )
    values = {str(k): v for k, v in section.items() if k != "name"}
    return Selection(name=section["name"], values=values)


def refuse_targets(node: object, path: str = "") -> None:
    """`_target_` would let a config file import and call anything; components are chosen by name instead."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            here = f"{path}.{key}" if path else str(key)
            if key in ("_target_", "_partial_", "_args_"):
                raise ConfigError(
                    f"{here}: {key} is not allowed; select a component with `name: …` from a registered plugin"
                )
            refuse_targets(value, here)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            refuse_targets(value, f"{path}[{index}]")


def validated(model: type[S], values: Mapping[str, Any], path: str, also: tuple[str, ...] = ()) -> S:
    """`model(**values)`, with errors that name the full config key and the near matches (`also`: more legal keys)."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(model, problem, path, also) for problem in error.errors())) from None


def _explain(model: type[BaseModel], problem: Any, path: str, also: tuple[str, ...]) -> str:
    key = ".".join([path, *map(str, problem["loc"])])
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        return f"unknown config key {key!r}{near_matches(str(problem['loc'][0]), {*model.model_fields, *also, 'name'})}"
    return f"config key {key!r}: {problem['msg']} (got {problem.get('input')!r})"
