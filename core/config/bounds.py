"""How much one YAML file of a stranger's may hold. Looked at event by event, before anything is built of it. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from core.errors import ConfigError

MAX_BYTES = 1 << 18
MAX_NODES = 20_000  # with each alias as large as what it stands for: nine lines of aliases can stand for 10**9 nodes
MAX_DEPTH = 50

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_bounds(path: Path) -> None:
    """Raises ConfigError where a file is too large to be a config, YAMLError where it is no YAML, OSError."""
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes, which is too large for a config")
    count = _Count()
    for event in yaml.parse(path.read_bytes(), Loader=_LOADER):
        count.take(event)
        if count.nodes > MAX_NODES:
            what = f"{MAX_NODES} values, an alias (*) counted as what it stands for"
            raise ConfigError(f"{path} has more than {what}, which is too large for a config")
        if len(count.open) > MAX_DEPTH:
            raise ConfigError(f"{path} has more than {MAX_DEPTH} levels, which is too deep for a config")


class _Count:
    """The nodes of a document so far."""

    def __init__(self) -> None:
        self.nodes = 0
        self.open: list[tuple[str | None, int]] = []  # mappings and lists: anchor, nodes before it
        self._sizes: dict[str | None, int] = {}  # of nodes with an anchor

    def take(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            self.nodes += self._sizes.get(event.anchor, MAX_NODES + 1)  # what stands in itself has no end
        elif isinstance(event, yaml.CollectionStartEvent):
            self.open.append((event.anchor, self.nodes))
            self.nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = self.open.pop()
            self._sizes[anchor] = self.nodes - before
        elif isinstance(event, yaml.ScalarEvent):
            self._sizes[event.anchor] = 1
            self.nodes += 1
