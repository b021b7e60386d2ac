"""What identifies the content of a KV block: its tokens, everything before them, and for whom it was computed.

A block's hash is SHA-256 over (parent hash, token ids, extra keys) (idea: vLLM's automatic prefix caching; SHA-256 and
salt because of CVE-2025-25183 and CVE-2025-46570). Extra keys enter at the first block and, through the chain, in all.
A hash only finds a candidate: `PrefixNode.matches` compares the content itself, so a collision cannot give a wrong hit.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from core.request import Request

ROOT_HASH = b""  # parent of a first block


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something beside tokens that KV depends on, or that limits who may share it.

    `kind` keeps tenant "a" apart from salt "a".
    """

    kind: str
    value: str | bytes | int

    def encode(self) -> bytes:
        """Canonical and unambiguous: kind and value with their lengths, and a letter for the value's type."""
        return _sized(self.kind.encode()) + self._type_tag() + _sized(self._value_bytes())

    def _type_tag(self) -> bytes:
        return {str: b"s", bytes: b"b", int: b"i"}[type(self.value)]

    def _value_bytes(self) -> bytes:
        if isinstance(self.value, str):
            return self.value.encode()
        return self.value if isinstance(self.value, bytes) else str(self.value).encode()


def encode_extra_keys(keys: Sequence[ExtraKey]) -> bytes:
    return struct.pack("<I", len(keys)) + b"".join(key.encode() for key in keys)


def first_block_keys(request: Request) -> bytes:
    """Extra keys of a request's first block. The tenant is always one: a salt written by a client proves nothing."""
    return encode_extra_keys((ExtraKey("tenant", request.tenant), ExtraKey("salt", request.cache_salt)))


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes) -> bytes:
    """32 bytes that name a full block. `parent` is ROOT_HASH and `extra` non-empty for a first block only."""
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.sha256(_sized(parent) + _sized(tokens) + _sized(extra)).digest()


@dataclass(slots=True, eq=False)
class PrefixNode:
    """Content of one findable block.

    A node outlives its block while descendants refer to it, so that chains stay comparable.
    """

    hash: bytes
    token_ids: list[int]  # [block_size]
    extra: bytes
    parent: PrefixNode | None

    def matches(self, parent: PrefixNode | None, token_ids: list[int], extra: bytes) -> bool:
        """Whether this is the block `token_ids` after `parent`; compares content all the way to the first block."""
        if self.token_ids != token_ids or self.extra != extra or not _same_chain(self.parent, parent):
            return False
        self.parent = parent  # equal content: next time one `is` decides
        return True


def chain_of(node: PrefixNode | None) -> list[PrefixNode]:
    """From the first block to `node`."""
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def _same_chain(a: PrefixNode | None, b: PrefixNode | None) -> bool:
    while a is not b:
        if a is None or b is None or a.token_ids != b.token_ids or a.extra != b.extra:
            return False
        a, b = a.parent, b.parent
    return True


def _sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data
