"""Where each value of a composed config came from, and who chose each component. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from core.components import CHAINS, GROUPS
from core.config.files import ROOT, Composition, ConfigFiles
from core.config.overrides import Changes

OVERRIDE = "override"


@dataclass(frozen=True, slots=True)
class Provenance:
    """`values`: dotted leaf -> the file that set it last, or "override".
    `choices`: group, chain (its list), or chain.member -> who chose it.

    A file is named for people, with the wheel that ships it: `configs/preset/chat.yaml (nonet 0.1.0)`.
    """

    values: Mapping[str, str]
    choices: Mapping[str, str]
    empty: frozenset[str]  # leaves that are empty mappings: they say nothing of keys inside
    root: str  # the file whose choices are the defaults

    def of(self, key: str) -> str:
        """Who set this key: itself, or what is inside it (several), or the mapping around it; "" where nobody did."""
        if key in self.values:
            return self.values[key]
        inside = [origin for name, origin in self.values.items() if name.startswith(f"{key}.")]
        if inside:
            return ", ".join(dict.fromkeys(inside))
        around = key.rpartition(".")[0]
        while "." in around and around not in self.values:
            around = around.rpartition(".")[0]
        return "" if around in self.empty else self.values.get(around, "")


def trace(composition: Composition, files: ConfigFiles, changes: Changes) -> Provenance:
    """Replay the composition: the last file, or override, that sets a leaf is where its value came from."""
    replay = _Replay()
    for default in composition.defaults.defaults:
        values = _loaded(files, str(default.config_path))
        replay.put(values, default.package or "", files.where(str(default.config_path)))
    for override in changes.overrides:
        if "." in override.key_or_group and override.is_delete():
            replay.drop(override.key_or_group)
        elif "." in override.key_or_group:
            replay.put(override.value(), override.key_or_group, OVERRIDE)
    choices = {**_members(composition, files, changes, replay.first), **_groups(composition, files, replay.values)}
    return Provenance(replay.values, choices, frozenset(replay.empty), files.where(ROOT))


class _Replay:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.empty: set[str] = set()
        self.first: dict[str, str] = {}  # group.key -> who set it, or a key inside it, first

    def put(self, node: object, path: str, origin: str) -> None:
        for leaf, value in _leaves(node, path):
            self.values[leaf] = origin
            self.first.setdefault(".".join(leaf.split(".")[:2]), origin)
            if value == {}:
                self.empty.add(leaf)
            else:
                self.empty.discard(leaf)

    def drop(self, key: str) -> None:
        for name in [name for name in self.values if name == key or name.startswith(f"{key}.")]:
            del self.values[name]


def _groups(composition: Composition, files: ConfigFiles, values: Mapping[str, str]) -> dict[str, str]:
    """Who chose each group's option; where something else than the option's file sets the name, who did that."""
    choices = {}
    for default in composition.defaults.defaults:
        group, _, option = str(default.config_path).partition("/")
        if group in GROUPS and default.override_key == group:
            chooser = _chooser(composition, files, group)
            named = values.get(f"{group}.name", chooser)
            other = "" if _loaded(files, f"{group}/{option}").get("name") == option else f" ({group}={option})"
            choices[group] = f"{chooser}{other}" if named == files.where(f"{group}/{option}") else named
    return choices


def _members(
    composition: Composition, files: ConfigFiles, changes: Changes, first: Mapping[str, str]
) -> dict[str, str]:
    """Who chose each member of the chains: who lists the option that brings it, or who set a value of it first."""
    choices = {key: origin for key, origin in first.items() if key.split(".")[0] in CHAINS}
    choices |= {chain: _chooser(composition, files, chain) for chain in CHAINS}
    for default in composition.defaults.defaults:
        chain, _, option = str(default.config_path).partition("/")
        if chain in CHAINS:
            added = option in changes.added.get(chain, ())
            parent = files.where(default.parent) if default.parent not in (None, ROOT) else ""
            chooser = OVERRIDE if added else parent or _chooser(composition, files, chain)
            for member in members_of(files, chain, option):
                choices[f"{chain}.{member}"] = chooser
    return choices


def members_of(files: ConfigFiles, chain: str, option: str) -> tuple[str, ...]:
    """The members that one option of a chain brings: most often itself."""
    return tuple(map(str, _loaded(files, f"{chain}/{option}")))


def _loaded(files: ConfigFiles, config_path: str) -> dict[Any, Any]:
    loaded = files.load(config_path)
    values = OmegaConf.to_container(loaded.config, resolve=False) if loaded is not None else {}
    return values if isinstance(values, dict) else {}


def _chooser(composition: Composition, files: ConfigFiles, group: str) -> str:
    metadata = composition.defaults.overrides.override_metadata.get(group)
    if metadata is None:
        return files.where(ROOT)
    return OVERRIDE if metadata.external_override else files.where(str(metadata.containing_config_path))


def _leaves(node: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, node
