"""`explain`: the nine stages with class, wheel and version, and where each value came from, those of `process` and `plugins`
included. Defaults are counted, and shown with `--all`. Reads no model, imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from core.hookspecs import STAGES
from core.pipeline import Part
from core.session import Session, open_session

DEFAULT = "default"
MAX_WIDTH = 40  # characters of a value; a longer one pushes its own origin aside and no other


@dataclass(frozen=True, slots=True)
class Leaf:
    """One printed line: a mapping has one for each of its keys, as `limits.connections`."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class Block:
    """One stage, part or section."""

    head: str
    leaves: tuple[Leaf, ...]


def run(arguments: Sequence[str]) -> int:
    session = open_session([a for a in arguments if a not in ("--json", "--all")])
    if "--json" in arguments:
        print(json.dumps(rows(session), indent=2))
    else:
        _print(_blocks(session), everything="--all" in arguments)
    return 0


def _print(blocks: Sequence[Block], everything: bool) -> None:
    shown = [[leaf for leaf in block.leaves if everything or leaf.origin != DEFAULT] for block in blocks]
    flat = [leaf for leaves in shown for leaf in leaves]
    keys = max((len(leaf.key) for leaf in flat), default=0)
    texts = max((min(len(leaf.value), MAX_WIDTH) for leaf in flat), default=0)
    for block, leaves in zip(blocks, shown, strict=True):
        print(block.head)
        for leaf in leaves:
            print(f"{'':<15}{leaf.key:<{keys}} = {leaf.value:<{texts}}  {leaf.origin}")
    hidden = sum(len(block.leaves) for block in blocks) - len(flat)
    if hidden:
        print(f"(+{hidden} defaults; --all shows them)")


def _blocks(session: Session) -> list[Block]:
    blocks = []
    origins = session.config.origins
    for number, part in enumerate(session.description.parts, start=1):
        component = part.provided.component
        label = f"{number} {part.group}" if part.group in STAGES else f"  {part.group}"
        head = f"{label:<15}{component.name:<14}{component.target:<52}{part.wheel}"
        blocks.append(Block(head, tuple(_leaves(part.group, values(session, part), origins))))
    for name, section in sections(session).items():
        found = section_values(session, name, section)
        blocks.append(Block(f"  {name:<13}{'':<14}{_class(section)}", tuple(_leaves(name, found, origins))))
    return blocks


def _leaves(group: str, found: Sequence[tuple[str, object, str]], origins: Mapping[str, str]) -> Iterator[Leaf]:
    for key, value, origin in found:
        for name, inner in _flat(key, value):
            own = DEFAULT if is_default(origin) else _leaf_origin(group, name, origins)
            yield Leaf(name, repr(inner), own)


def _flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value


def _leaf_origin(group: str, name: str, origins: Mapping[str, str]) -> str:
    """Of one key of a mapping: what set it, and what set the mapping as a whole, which may have held it."""
    full = f"{group}.{name}"
    inside = [found for key, found in origins.items() if f"{key}.".startswith(f"{full}.")]
    around = [found for key, found in origins.items() if key.startswith(f"{group}.") and full.startswith(f"{key}.")]
    return ", ".join(dict.fromkeys([*inside, *around])) or DEFAULT


def is_default(origin: str) -> bool:
    """Whether no file and no override sets the value."""
    return origin.startswith("default of ")


def sections(session: Session) -> dict[str, BaseModel]:
    """What is set beside the config groups."""
    return {"process": session.settings.process, "plugins": session.settings.plugins}


def section_values(session: Session, name: str, section: BaseModel) -> list[tuple[str, object, str]]:
    """(key, value, origin), as `values` has them."""
    found = section.model_dump(mode="json")
    return [(k, v, _origin(f"{name}.{k}", _class(section), session.config.origins)) for k, v in found.items()]


def _class(section: BaseModel) -> str:
    return f"{type(section).__module__}:{type(section).__name__}"


def values(session: Session, part: Part) -> list[tuple[str, object, str]]:
    """(key, value, origin) of one part; the origin of a value that no file and no override sets is its class."""
    found = part.settings.model_dump(mode="json")
    defaults = part.provided.component.settings or f"{part.provided.component.target}.Settings"
    own = [(key, value, defaults) for key, value in found.items()]
    if part.group == "model":
        shared = session.settings.model.model_dump(mode="json")
        own = [(key, value, "core.settings:ModelSettings") for key, value in shared.items()] + own
    origins = session.config.origins
    return [(key, value, _origin(f"{part.group}.{key}", default, origins)) for key, value, default in own]


def _origin(key: str, default: str, origins: Mapping[str, str]) -> str:
    inside = [
        origin for name, origin in origins.items() if name == key or name.startswith(f"{key}.")
    ]  # a mapping's keys
    return ", ".join(dict.fromkeys(inside)) or f"default of {default}"


def rows(session: Session) -> list[dict[str, object]]:
    """For `--json`: the stages and parts, then the sections, which have no plugin."""
    out: list[dict[str, object]] = []
    for row, part in zip(session.description.rows(), session.description.parts, strict=True):
        out.append({**row, "settings": _settings(values(session, part))})
    for name, section in sections(session).items():
        found = section_values(session, name, section)
        out.append({"stage": name, "class": _class(section), "settings": _settings(found)})
    return out


def _settings(found: Sequence[tuple[str, object, str]]) -> dict[str, object]:
    return {key: {"value": value, "origin": origin} for key, value, origin in found}
