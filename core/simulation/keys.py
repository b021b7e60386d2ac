"""The plain words of `simulate` and its commands: checked, and named in errors as they are typed; and printed with `--help`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from core.config.keys import fields_of, validated
from core.errors import ConfigError, near_matches

S = TypeVar("S", bound=BaseModel)

_PLACE: Final = "given"  # stands where a config would name a section; nobody typed it, so no error keeps it
_KEY: Final = re.compile(rf"config key '{_PLACE}\.([^']+)'(:?)")
_WHOLE: Final = f"config key '{_PLACE}': "  # of what several keys say together
_ALL: Final = re.compile(r" \(got \{.*\)$")  # and all of them with it
_WIDTH, _LINE = 26, 118  # characters of a key with its default, and of a line


def checked(model: type[S], values: object) -> S:
    """`model(**values)`. Raises ConfigError that names keys as they are typed."""
    try:
        return validated(model, values, _PLACE)
    except ConfigError as error:
        text = _KEY.sub(_as_typed, str(error)).replace("Value error, ", "")
        text = _ALL.sub("", text.removeprefix(_WHOLE)) if text.startswith(_WHOLE) else text
        key = error.key.removeprefix(_PLACE).removeprefix(".")
        raise ConfigError(text, key, unknown=error.unknown) from None


def _as_typed(found: re.Match[str]) -> str:
    return f"{found[1]}:" if found[2] else f"key {found[1]!r}"


def check_known(values: Iterable[str], models: Sequence[type[BaseModel]], also: Sequence[str] = ()) -> None:
    """Raises ConfigError for a key that none of the models has. `also`: words that may have been meant."""
    known = [key for model in models for key in fields_of(model)]
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {key!r}{near_matches(key, [*known, *also])}", key)


def chosen(model: type[S], values: Mapping[str, Any]) -> S:
    """What of `values` is the model's. Raises ConfigError naming the key."""
    return checked(model, {key: value for key, value in values.items() if key in fields_of(model)})


def described_keys(model: type[BaseModel]) -> list[str]:
    """A line or more per key: what it is where nobody says anything, and what it does."""
    lines = []
    for name, field in model.model_fields.items():
        head = f"  {field.alias or name}={default_text(field)}"
        about = textwrap.wrap(field.description or "", _LINE - _WIDTH) or [""]
        lines += [f"{head:<{_WIDTH}}{about[0]}" if len(head) < _WIDTH else head]
        lines += [f"{'':<{_WIDTH}}{text}" for text in (about[1:] if len(head) < _WIDTH else about)]
    return [line.rstrip() for line in lines]


def default_text(field: FieldInfo) -> str:
    """As it would be typed; … where there is none."""
    if field.is_required():
        return "…"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)
