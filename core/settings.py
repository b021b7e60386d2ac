"""The root settings: a composed config, checked key by key, as frozen pydantic models. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from core.client import EngineProcessSettings
from core.components import CHAINS, GROUPS, Provided, closed_model, import_target
from core.config.keys import validated
from core.errors import ConfigError, near_matches
from core.memory import num_bytes
from core.model.sources import DEFAULT_SOURCE
from core.plugins import MAX_START_TIMEOUT_S, START_TIMEOUT_VARIABLE, OnFailure, default_start_timeout

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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda, or one card, as cuda:1"
    )
    max_model_len: int | None = Field(default=None, ge=1, description="context length in tokens; null: the model's own")
    served_name: str | None = None
    cache_dir: str | None = Field(
        default=None, description="where downloaded models lie; null: the user's cache folder"
    )


def _listed(value: object) -> object:
    """`plugins.disable=acme` is `[acme]`."""
    return (value,) if isinstance(value, str) else value


class PluginSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    disable: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(
        default=(), description="plugins or distributions that are not loaded; [all]: built-ins only"
    )
    on_failure: OnFailure = Field(
        default="refuse", description="a plugin that cannot be loaded: refuse to start, or go on without it"
    )
    start_timeout: float = Field(
        default_factory=default_start_timeout,
        gt=0,
        le=MAX_START_TIMEOUT_S,
        description=f"seconds that loading one plugin may take; {START_TIMEOUT_VARIABLE} says it for all commands",
    )
    quarantine_after: int = Field(
        default=3,
        ge=1,
        description="failures after which an observer, logits processor, parser or grammar backend is switched off",
    )
    block_timeout: float = Field(
        default=5.0, gt=0, description="seconds after which a call of a plugin counts as blocked, and is reported"
    )
    render_timeout: float = Field(
        default=60.0, gt=0, description="seconds after which rendering a prompt is given up, and its request fails"
    )


class StructuredOutputSettings(BaseModel):
    """What a client's grammar may cost, and how its forced tokens are made."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    jump_forward: bool = Field(
        default=True, description="tokens that a grammar forces come without forward passes of their own"
    )
    any_whitespace: bool = Field(
        default=True,
        description="white space between the parts of JSON, in bounds; false: none, whatever a request says",
    )
    max_bytes: int = Field(
        default=65_536, ge=1, description="of a schema, regular expression or grammar, as it is sent"
    )
    max_depth: int = Field(
        default=64, ge=1, le=512, description="levels of a schema, and of brackets in other grammars"
    )
    max_nodes: int = Field(default=4096, ge=1, description="objects and lists of a schema")
    max_choices: int = Field(default=1024, ge=1, description="values of one enum, options of one anyOf, choices")
    max_pattern: int = Field(default=512, ge=1, description="bytes of one regular expression")
    max_repeat: int = Field(default=1024, ge=1, description="of a counted repetition in a pattern: a{1,1024}")
    compile_timeout: float = Field(
        default=1.5,
        gt=0,
        le=60,
        description="seconds for one grammar, however many backends are asked",
    )
    compile_memory: str = Field(
        default="2GiB", description="of the process that compiles; it is replaced when it needs more"
    )
    max_queued: int = Field(
        default=256,
        ge=1,
        description="grammars that wait to be compiled; more are refused with 503, of who has most first",
    )
    cache_memory: str = Field(default="64MiB", description="of compiled grammars that are kept, in the front")

    @field_validator("compile_memory", "cache_memory")
    @classmethod
    def _is_size(cls, text: str) -> str:
        num_bytes(text)
        return text


class ProcessSettings(EngineProcessSettings):
    """How front and engine live together. Times in seconds."""

    separate: bool = Field(default=True, description="engine in a process of its own")
    drain_timeout: float = Field(default=0.0, ge=0, description="what running requests get after SIGTERM")


SECTIONS: Mapping[str, type[BaseModel]] = {
    "process": ProcessSettings,
    "plugins": PluginSettings,
    "structured_outputs": StructuredOutputSettings,
}
"""What a config holds beside its groups and chains."""


class Settings(BaseModel):
    """Everything a pipeline is made from: one Selection per config group, and any number per chain, in order."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    groups: dict[str, Selection]
    chains: dict[str, tuple[Selection, ...]] = Field(default_factory=dict)
    model: ModelSettings = ModelSettings()
    plugins: PluginSettings = PluginSettings()
    process: ProcessSettings = ProcessSettings()
    structured_outputs: StructuredOutputSettings = StructuredOutputSettings()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Check a composed config. Raises ConfigError naming the key, with near matches."""
        known = {*GROUPS, *CHAINS, *SECTIONS}
        for key in config:
            if key not in known:
                raise ConfigError(f"unknown config key {key!r}{near_matches(str(key), known)}", key)
        refuse_targets(config)
        groups = {group: _selection(group, config.get(group)) for group in GROUPS}
        model_values = groups["model"].values
        own = {key: model_values.pop(key) for key in MODEL_KEYS if key in model_values}
        sections: dict[str, Any] = {
            name: validated(section, config.get(name) or {}, name) for name, section in SECTIONS.items()
        }
        return cls(
            groups=groups,
            chains={chain: _selections(chain, config.get(chain, {})) for chain in CHAINS},
            model=validated(ModelSettings, own, "model"),
            **sections,
        )

    def located(self, path: Path) -> Settings:
        """The same with `model.source` as a place on this machine, so that another process need not fetch it again."""
        model = self.model.model_copy(update={"source": str(path.absolute())})
        return self.model_copy(update={"model": model})

    def for_process(self, model: Path, left_out: tuple[str, ...]) -> str:
        """As JSON for another process of this machine, which has the plugins that this one has: what was left out here is not
        tried again there."""
        plugins = self.plugins.model_copy(update={"disable": left_out})
        return self.located(model).model_copy(update={"plugins": plugins}).to_json()

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls.model_validate(json.loads(text))


def _selection(group: str, section: object) -> Selection:
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(
            f"config key {group!r}: a mapping from key to value (got {section!r}); a file selects a component in its "
            f"defaults: `- override /{group}: …`",
            group,
        )
    if section is None or not isinstance(section.get("name"), str):
        raise ConfigError(
            f"config group {group!r} selects nothing; add `- {group}: …` to the defaults or pass {group}=…", group
        )
    values = {str(k): v for k, v in section.items() if k != "name"}
    return Selection(name=section["name"], values=values)


def _selections(chain: str, section: object) -> tuple[Selection, ...]:
    if section is None:
        raise ConfigError(
            f"config key {chain!r}: null would drop all that other files select; for none, write `- override /{chain}: []` in "
            f"a file's defaults, or {chain}=[] on the command line",
            chain,
        )
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"config key {chain!r}: a mapping from name to values (got {section!r}); a file lists members in its "
            f"defaults: `- override /{chain}: [a, b]`",
            chain,
        )
    return tuple(_member(chain, str(name), values) for name, values in section.items())


def _member(chain: str, name: str, values: object) -> Selection:
    if values is not None and not isinstance(values, Mapping):
        key = f"{chain}.{name}"
        raise ConfigError(
            f"config key {key!r}: a mapping from key to value, {{}} for the defaults (got {values!r})", key
        )
    return Selection(name=name, values={str(k): v for k, v in (values or {}).items()})


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


def settings_class(provided: Provided) -> type[BaseModel]:
    """The class that the values of a component are checked by. Raises PluginError where it is missing or lax."""
    path = provided.component.settings or f"{provided.component.target}.Settings"
    if provided.component.settings is not None:
        found = import_target(provided, path)
    else:
        found = getattr(import_target(provided, provided.component.target), "Settings", None)
    return closed_model(provided, path, found, "the values of a component are one")
