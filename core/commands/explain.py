"""`explain`: the nine stages with class, wheel and version, and where each value came from. Reads no model, imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

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
        for key, value, origin in values(session, part):
            print(f"{'':<15}  {key} = {value!r:<30} {origin}")
    return 0


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


def _origin(key: str, default: str, origins: object) -> str:
    assert isinstance(origins, dict)
    inside = [
        origin for name, origin in origins.items() if name == key or name.startswith(f"{key}.")
    ]  # a mapping's keys
    return ", ".join(dict.fromkeys(inside)) or f"default of {default}"


def rows(session: Session) -> list[dict[str, object]]:
    out: list[dict[str, object]] = []
    for row, part in zip(session.description.rows(), session.description.parts, strict=True):
        row["settings"] = {key: {"value": value, "origin": origin} for key, value, origin in values(session, part)}
        out.append(row)
    return out
