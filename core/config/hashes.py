"""Values as plain JSON that is the same in every process, and a short hash of it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_jsonable_python

NUM_HEX_DIGITS = 16


def plain(value: object) -> Any:
    """`value` as JSON has it. A set is sorted: its order differs between processes. pydantic's secrets stay masked."""
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=_canonical)
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return to_jsonable_python(value, fallback=_kind)


def digest(value: object) -> str:
    """The first hex digits of SHA-256 over canonical JSON: keys sorted, no spaces, ASCII only. Secrets are not part of it."""
    return hashlib.sha256(_canonical(plain(value)).encode()).hexdigest()[:NUM_HEX_DIGITS]


def _kind(value: object) -> str:
    """An object that is no value: only its type is the same everywhere."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
