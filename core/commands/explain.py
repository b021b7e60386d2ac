"""`explain`: the nine stages, their parts and chains with class, wheel and version; who chose each, and where each value
came from, those of `process` and `plugins` included. Defaults are counted, and shown with `--all`. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from core.components import CHAINS, STAGES
from core.config.hashes import plain
from core.errors import ConfigError, near_matches
from core.pipeline import Part
from core.session import Session, inspect_session
from core.settings import SECTIONS

DEFAULT = "default"
MAX_WIDTH = 40  # characters of a value; a longer one pushes its own origin aside and no other
LABEL, NAME, CLASS = 20, 14, 52  # widths of columns
FLAGS = ("--all", "--json")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One printed line: a mapping has one for each of its keys, as `limits.connections`."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class Block:
    """One stage, part, member of a chain, or section."""

    head: str
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a part or section, as JSON has it."""

    key: str
    value: object
    path: str  # its full config key
    default: str  # the class whose default it is where nothing sets it


def run(arguments: Sequence[str]) -> int:
    flags = [word for word in arguments if word.startswith("--")]
    for flag in flags:
        if flag not in FLAGS:
            raise ConfigError(f"explain has no flag {flag}{near_matches(flag, FLAGS)}")
    session = inspect_session([word for word in arguments if word not in flags])
    if "--json" in flags:
        print(json.dumps(rows(session), indent=2))
    else:
        _print(_blocks(session), everything="--all" in flags)
        print(f"pipeline_hash {session.description.pipeline_hash}")
    return 0


def _print(blocks: Sequence[Block], everything: bool) -> None:
    shown = [[leaf for leaf in block.leaves if everything or leaf.origin != DEFAULT] for block in blocks]
    flat = [leaf for leaves in shown for leaf in leaves]
    keys = max((len(leaf.key) for leaf in flat), default=0)
    texts = max((min(len(leaf.value), MAX_WIDTH) for leaf in flat), default=0)
    for block, leaves in zip(blocks, shown, strict=True):
        print(block.head)
        for leaf in leaves:
            print(f"{'':<{LABEL}}{leaf.key:<{keys}} = {leaf.value:<{texts}}  {leaf.origin}")
    hidden = sum(len(block.leaves) for block in blocks) - len(flat)
    if hidden:
        print(f"(+{hidden} defaults; --all shows them)")


def _blocks(session: Session) -> list[Block]:
    blocks = []
    for number, part in enumerate(session.description.parts, start=1):
        component = part.provided.component
        label = f"{number} {part.group}" if part.group in STAGES else f"  {part.group}"
        head = f"{label:<{LABEL}}{component.name:<{NAME}}{component.target:<{CLASS}}{part.wheel}"
        chosen = chosen_by(session, part)
        default = chosen == session.config.provenance.root
        selected = Leaf("name", repr(component.name), DEFAULT if default else chosen)
        blocks.append(Block(head, (selected, *_leaves(session, values(part)))))
    for chain in CHAINS:
        if not session.description.chain(chain):
            chosen = session.config.provenance.choices[chain]
            origin = "" if chosen == session.config.provenance.root else chosen
            blocks.append(Block(f"  {chain:<{LABEL - 2}}{'none':<{NAME}}{origin}".rstrip(), ()))
    for name, section in sections(session).items():
        head = f"  {name:<{LABEL - 2}}{'':<{NAME}}{_class(section)}"
        blocks.append(Block(head, tuple(_leaves(session, section_values(name, section)))))
    return blocks


def _leaves(session: Session, found: Sequence[Value]) -> Iterator[Leaf]:
    for value in found:
        for name, inner in _flat("", value.value):
            origin = session.config.provenance.of(value.path + name) or DEFAULT
            yield Leaf(value.key + name, repr(inner), origin)


def _flat(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value


def chosen_by(session: Session, part: Part) -> str:
    """The file or override that selects this component, with the group's option where that has another name."""
    return session.config.provenance.choices.get(part.path, "override")


def is_default(origin: str) -> bool:
    """Whether no file and no override sets the value."""
    return origin.startswith("default of ")


def sections(session: Session) -> dict[str, BaseModel]:
    """What is set beside the config groups."""
    return {name: getattr(session.settings, name) for name in SECTIONS}


def section_values(name: str, section: BaseModel) -> list[Value]:
    found = plain(section.model_dump())
    return [Value(key, value, f"{name}.{key}", _class(section)) for key, value in found.items()]


def _class(section: BaseModel) -> str:
    return f"{type(section).__module__}:{type(section).__name__}"


def values(part: Part) -> list[Value]:
    own = part.provided.component.settings or f"{part.provided.component.target}.Settings"
    shared = type(part.shared).model_fields if part.shared is not None else {}
    found = plain(part.values)
    return [
        Value(key, value, f"{part.path}.{key}", _class(part.shared) if part.shared and key in shared else own)
        for key, value in found.items()
    ]


def rows(session: Session) -> list[dict[str, object]]:
    """For `--json`: stages, parts and members of chains, then the sections, which have no plugin."""
    out: list[dict[str, object]] = []
    for row, part in zip(session.description.rows(), session.description.parts, strict=True):
        settings = _settings(session, values(part))
        out.append({**row, "chosen_by": chosen_by(session, part), "settings": settings})
    for name, section in sections(session).items():
        settings = _settings(session, section_values(name, section))
        out.append({"stage": name, "class": _class(section), "settings": settings})
    return out


def _settings(session: Session, found: Sequence[Value]) -> dict[str, object]:
    """value and origin of each key; where a mapping has several origins, also those of the keys inside it."""
    out: dict[str, object] = {}
    for value in found:
        of = session.config.provenance.of
        origin = of(value.path) or f"default of {value.default}"
        inside = {name[1:]: of(value.path + name) or DEFAULT for name, _ in _flat("", value.value) if name}
        mixed = {"inside": inside} if len(set(inside.values())) > 1 else {}
        out[value.key] = {"value": value.value, "origin": origin, **mixed}
    return out
