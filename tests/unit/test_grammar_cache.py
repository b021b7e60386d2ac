"""Compiled grammars, the latest used ones, within so many bytes."""

from __future__ import annotations

import tracemalloc

from core.grammar.cache import ENTRY_BYTES, Artifact, GrammarCache, Refusal, key_of
from core.request import GrammarSpec


def artifact(num_bytes: int) -> Artifact:
    """One that counts as so many."""
    return Artifact("b", bytes(num_bytes - ENTRY_BYTES))


def test_the_oldest_go_when_the_bytes_are_used_up() -> None:
    cache = GrammarCache(3000)
    for name in (b"a", b"b", b"c"):
        cache.put(name, artifact(1000))
    assert cache.num_bytes == 3000 and cache.get(b"a", 0.0) is not None  # a is the latest used one now
    cache.put(b"d", artifact(1000))
    assert [cache.get(name, 0.0) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    cache.put(b"e", artifact(2500))
    assert len(cache) == 1 and cache.num_bytes == 2500
    cache.put(b"f", artifact(3001))
    assert len(cache) == 0 and cache.num_bytes == 0


def test_an_entry_is_replaced_in_place() -> None:
    cache = GrammarCache(3000)
    cache.put(b"a", artifact(2000))
    cache.put(b"a", artifact(1500))
    assert len(cache) == 1 and cache.num_bytes == 1500


def test_a_refusal_is_kept_for_as_long_as_it_says() -> None:
    cache = GrammarCache(10_000)
    cache.put(b"never", Refusal("no", "unsupported_grammar"))
    cache.put(b"soon", Refusal("slow", "grammar_timeout", until=60.0))
    assert cache.get(b"soon", 59.9) is not None
    assert cache.get(b"soon", 60.0) is None and len(cache) == 1
    assert cache.get(b"never", 1e9) is not None


def test_the_key_has_all_that_a_result_depends_on() -> None:
    spec = GrammarSpec(kind="regex", source="a")
    keys = [
        key_of(spec, ["x"]),
        key_of(spec, ["y"]),
        key_of(spec, ["x", "y"]),
        key_of(GrammarSpec(kind="ebnf", source="a"), ["x"]),
        key_of(GrammarSpec(kind="regex", source="b"), ["x"]),
        key_of(GrammarSpec(kind="regex", source="a", any_whitespace=False), ["x"]),
        key_of(GrammarSpec(kind="regexa", source=""), ["x"]),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(GrammarSpec(kind="regex", source="a", backend="x"), ["x"]) == keys[0]


def test_what_an_entry_is_said_to_take_is_what_it_takes() -> None:
    cache = GrammarCache(1 << 40)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(5000):
            key = key_of(GrammarSpec(kind="regex", source=str(number)), ["x"])
            cache.put(key, Artifact("x", bytes(100 + number % 7)))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= cache.num_bytes < 4 * taken
