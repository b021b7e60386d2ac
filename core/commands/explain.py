"""`explain`: the nine stages with class, wheel and version, and where each value came from, those of `process` and `plugins`
included. Reads no model, imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from core.hookspecs import STAGES
from core.pipeline import Part
from core.session import Session, open_session


def run(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    session = open_session([a for a in arguments if a != "--json"])
    if as_json:
        print(json.dumps(rows(session), indent=2))
        return 0
    for number, part in enumerate(session.description.parts, start=1):
        label = f"{number} {part.group}" if part.group in STAGES else f"  {part.group}"
        print(f"{label:<15}{part.provided.component.name:<14}{part.provided.component.target:<52}{part.wheel}")
        _print(values(session, part))
    for name, section in sections(session).items():
        print(f"  {name:<13}{'':<14}{_class(section)}")
        _print(section_values(session, name, section))
    return 0


def _print(found: Sequence[tuple[str, object, str]]) -> None:
    for key, value, origin in found:
        print(f"{'':<15}  {key} = {value!r:<30} {origin}")


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
