"""The words of a command line as Hydra takes them: parsed one by one, known roots and options only. Imports no torch.

A group takes one option: `scheduler=fcfs`. A chain takes any number: `observers=[prometheus,jsonl]` selects exactly these (so
`observers=[]` none), `+observers=[jsonl]` adds to what files select, `observers.jsonl.path=x` sets a value and adds the member
where it is not selected, `~observers.jsonl` takes it out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from core.components import CHAINS, GROUPS
from core.config.files import FREE_GROUPS, ConfigFiles, one_line
from core.errors import ConfigError
from core.other_names import unknown_component
from core.plugins import Plugins
from core.settings import SECTIONS

KEYS = (*GROUPS, *CHAINS, *SECTIONS)
"""What a config may hold at its top level."""
ROOTS = (*KEYS, *FREE_GROUPS)
"""What the key of an override may begin with."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a command line changes."""

    overrides: tuple[Override, ...]  # keys with a dot force their way in, so that no file need list them
    added: Mapping[str, tuple[str, ...]]  # chain -> options that join what files select
    listed: Mapping[str, tuple[str, ...]]  # chain -> options that stand for all that files select

    def members(self, chain: str) -> frozenset[str]:
        """Those that it sets a value of: `observers.jsonl.path=x`."""
        keys = [o.key_or_group.split(".") for o in self.overrides if not o.is_delete()]
        return frozenset(key[1] for key in keys if key[0] == chain and len(key) > 1)


def parsed(words: Sequence[str]) -> list[Override]:
    """Raises ConfigError naming the word and the form."""
    parser = OverridesParser.create()
    found = []
    for text in words:
        if text.startswith("-") or ("=" not in text and not text.startswith("~")):
            raise ConfigError(
                f"cannot read the override {text!r}: write key=value, as in frontend.port=8123 or +preset=chat"
            )
        try:
            found += parser.parse_overrides([_with_quoted_source(text)])
        except HydraException as error:
            raise ConfigError(
                f"cannot read the override {text!r}: {one_line(error)}; quote values with special characters"
            ) from None
    return found


def _with_quoted_source(text: str) -> str:
    """`pypi:name==1.2` and `~/x` are no values in Hydra's grammar, and a shell takes away the quotes that make them some."""
    return re.sub(r"^(\+{0,2}model\.source)=([^'\"\\]+)$", r"\1='\2'", text)


def is_known(override: Override) -> bool:
    return override.key_or_group.split(".")[0] in ROOTS and override.package is None


def changes(overrides: Sequence[Override], files: ConfigFiles, plugins: Plugins) -> Changes:
    """Check roots and options, of which all are known. Raises ConfigError with near matches."""
    taken: list[Override] = []
    added: dict[str, tuple[str, ...]] = {}
    listed: dict[str, tuple[str, ...]] = {}
    for override in overrides:
        key = override.key_or_group
        if override.is_sweep_override() and key not in (*GROUPS, *CHAINS):
            raise ConfigError(
                f"{override.input_line}: a list is written {key}=[a,b], and a text with commas in quotes", key
            )
        if "." in key:
            taken.append(override if override.is_delete() else replace(override, type=OverrideType.FORCE_ADD))
        elif key in CHAINS and (override.is_add() or override.is_force_add()):
            added[key] = (*added.get(key, ()), *_several(override, files, plugins))
        elif key in CHAINS:
            names = _several(override, files, plugins)
            listed[key] = tuple(names)
            taken.append(replace(override, type=OverrideType.CHANGE, _value=names))
        elif key in GROUPS:
            taken.append(replace(override, type=OverrideType.CHANGE, _value=_one(override, files, plugins)))
        elif key in FREE_GROUPS:
            taken.append(replace(override, type=OverrideType.ADD, _value=_presets(override, files, plugins)))
        else:
            raise ConfigError(f"{key} is a section; set one key of it, as in {key}.<key>=<value>", key)
    for chain in CHAINS:
        _refuse_twice(chain, (*listed.get(chain, ()), *added.get(chain, ())))
    return Changes(tuple(taken), added, listed)


def _one(override: Override, files: ConfigFiles, plugins: Plugins) -> str:
    group, choice = override.key_or_group, override.value()
    if override.is_delete() or not isinstance(choice, str):
        word = override.input_line or group
        known = ", ".join(files.options(group))
        raise ConfigError(f"{word} selects nothing; choose one of: {known}, as in {group}=<name>", group)
    _check_option(group, choice, files, plugins)
    return choice


def _several(override: Override, files: ConfigFiles, plugins: Plugins) -> list[str]:
    """The options of a chain; `~observers` is none."""
    chain, choice = override.key_or_group, override.value()
    if override.is_delete() and choice is None:
        return []
    names = [choice] if isinstance(choice, str) else choice
    if override.is_delete() or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{override.input_line}: {chain} takes a list of names, as in {chain}=[a,b], or {chain}=[] for none; "
            f"values are written {chain}.<name>.<key>=…, and ~{chain}.<name> takes one out",
            chain,
        )
    for name in names:
        _check_option(chain, str(name), files, plugins)
    _refuse_twice(chain, [str(name) for name in names])
    return [str(name) for name in names]


def _refuse_twice(chain: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{chain}: {name!r} is selected twice; name it once", chain)


def _presets(override: Override, files: ConfigFiles, plugins: Plugins) -> str | list[str]:
    group, choice = override.key_or_group, override.value()
    names = [choice] if isinstance(choice, str) else choice
    if override.is_delete() or not isinstance(names, list) or not names:
        known = ", ".join(files.options(group))
        raise ConfigError(
            f"{override.input_line} selects nothing; choose one of: {known}, as in +{group}=<name>", group
        )
    for name in names:
        _check_option(group, str(name), files, plugins)
    return choice if isinstance(choice, str) else [str(name) for name in names]


def _check_option(group: str, name: str, files: ConfigFiles, plugins: Plugins) -> None:
    known = files.options(group)
    if name not in known:
        raise ConfigError(f"{unknown_component(group, name, known)}{plugins.failures()}", group)
