"""What identifies a block: every part counts, and no two inputs have one encoding."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.prefix import ROOT_HASH, ExtraKey, PrefixNode, block_hash, encode_extra_keys, first_block_keys
from core.testing.fakes import make_request

VALUES = st.one_of(st.text(max_size=6), st.binary(max_size=6), st.integers())
KEYS = st.lists(st.builds(ExtraKey, st.text(max_size=4), VALUES), max_size=3)


def test_every_part_of_a_block_changes_its_hash() -> None:
    parent = block_hash(ROOT_HASH, [1, 2], b"")
    hashes = [
        block_hash(ROOT_HASH, [1, 2, 3], b""),
        block_hash(ROOT_HASH, [1, 3, 2], b""),
        block_hash(ROOT_HASH, [1, 2], b"x"),
        block_hash(parent, [1, 2, 3], b""),
        block_hash(parent, [1, 2, 3], b"x"),
        parent,
    ]
    assert len(set(hashes)) == len(hashes)
    assert {len(digest) for digest in hashes} == {32}
    assert block_hash(ROOT_HASH, [1, 2], b"") == parent


def test_a_hash_is_the_same_in_every_process() -> None:
    encoded = b"\0\0\0\0" + b"\x10\0\0\0" + b"\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0" + b"\1\0\0\0x"
    assert block_hash(ROOT_HASH, [1, 2], b"x") == hashlib.sha256(encoded).digest()


@given(KEYS, KEYS)
@settings(max_examples=200, deadline=None)
def test_two_lists_of_keys_never_share_an_encoding(a: list[ExtraKey], b: list[ExtraKey]) -> None:
    typed_a, typed_b = ([(key.kind, type(key.value), key.value) for key in keys] for keys in (a, b))
    assert (encode_extra_keys(a) == encode_extra_keys(b)) == (typed_a == typed_b)


def test_type_and_border_count() -> None:
    keys = [
        (ExtraKey("k", 1),),
        (ExtraKey("k", "1"),),
        (ExtraKey("k", b"1"),),
        (ExtraKey("k1", ""),),
        (ExtraKey("", "k1"),),
        (ExtraKey("k", "1"), ExtraKey("", "")),
        (ExtraKey("a", "bc"), ExtraKey("d", "")),
        (ExtraKey("a", "b"), ExtraKey("cd", "")),
        (),
    ]
    assert len({encode_extra_keys(each) for each in keys}) == len(keys)


def test_tenant_and_salt_are_kept_apart() -> None:
    owners = [{}, {"tenant": "a"}, {"cache_salt": "a"}, {"tenant": "a", "cache_salt": "a"}, {"tenant": "aa"}]
    encoded = [first_block_keys(make_request("r", [1], **owner)) for owner in owners]
    assert all(a != b for a, b in itertools.combinations(encoded, 2))


def node(tokens: list[int], parent: PrefixNode | None, extra: bytes = b"") -> PrefixNode:
    return PrefixNode(b"same hash", tokens, extra, parent)


def test_a_match_compares_the_whole_chain() -> None:
    head, other_head = node([1], None), node([2], None)
    block = node([3], head)
    assert block.matches(head, [3], b"")
    assert not block.matches(head, [4], b"")
    assert not block.matches(head, [3], b"x")
    assert not block.matches(other_head, [3], b"")
    assert not block.matches(None, [3], b"")
    assert not node([3], None).matches(head, [3], b"")


@pytest.mark.parametrize("extra", [b"", b"x"])
def test_an_equal_parent_made_later_matches_and_is_taken_over(extra: bytes) -> None:
    block = node([3], node([2], node([1], None, extra)))
    again = node([2], node([1], None, extra))
    assert block.matches(again, [3], b"")
    assert block.parent is again
    assert not block.matches(node([2], node([1], None, b"other")), [3], b"")
