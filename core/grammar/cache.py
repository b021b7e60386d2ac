"""What grammars have become, the latest used ones, within so many bytes: a new schema in each request fills no memory (vLLM
GHSA-hf3c-wxg2-49q9). What was refused is remembered, too. Imports no torch."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from core.request import GrammarSpec

ENTRY_BYTES = 512  # of an entry beside its artifact or text: measured as 400 to 500


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a backend made of a grammar."""

    backend: str
    data: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.data) + ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a client does not get its grammar. `until`: monotonic seconds after which it may be tried again; None: never."""

    text: str
    code: str
    until: float | None = None

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.text) + ENTRY_BYTES  # of the widest characters


def key_of(spec: GrammarSpec, backends: Sequence[str]) -> bytes:
    """Equal for what is compiled to the same: kind, source, white space, and the backends that are asked."""
    digest = hashlib.blake2b(digest_size=32)
    for part in (spec.kind, str(spec.any_whitespace), ",".join(backends), spec.source):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()


class GrammarCache:
    """Used on one event loop."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Artifact | Refusal] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes, now: float) -> Artifact | Refusal | None:
        found = self._entries.get(key)
        if isinstance(found, Refusal) and found.until is not None and now >= found.until:
            self._remove(key)
            return None
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, entry: Artifact | Refusal) -> None:
        """An entry that is larger than all of the cache is not kept."""
        self._remove(key)
        self._entries[key] = entry
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
