"""A cache that gives what is not there, or keeps what it should give back."""

from __future__ import annotations

from typing import Any

import pytest

from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.isolation.cache import GuardedCache
from core.isolation.faults import Faults, StageError
from core.request import Request
from core.testing.engines import MAX_MODEL_LEN
from core.testing.fakes import make_request
from core.testing.harness.engine_isolation import (
    NAMES,
    NUM_BLOCKS,
    VICTIM,
    Chaos,
    ChaosCompletion,
    assert_solo,
    assert_whole,
    due,
    engine_of,
    requests,
    run,
)
from plugins.schedulers.fcfs import Fcfs


class OneWriter(PagedCache):
    """Gives the victim a block of another request."""

    def allocate(self, request: Request, num_tokens: int) -> bool:
        done = super().allocate(request, num_tokens)
        others = [h.request for h in self._holdings.values() if h.request is not request and h.request.block_table]
        if due(request) and done and others:
            request.block_table[-1] = others[0].block_table[-1]
        return done


class Leaks(PagedCache):
    def free(self, request: Request, discard: bool = False) -> None:
        if request.request_id == VICTIM:
            request.block_table.clear()
        else:
            super().free(request, discard)


class FindsTooMuch(PagedCache):
    def lookup(self, request: Request) -> int:
        return super().lookup(request) + (16 if request.request_id == VICTIM else 0)


class NoDiscard(PagedCache):
    """Of a time when `free` had one argument."""

    def free(self, request: Request) -> None:  # type: ignore[override]
        super().free(request)


def cache_of(cls: type[PagedCache]) -> Any:
    return lambda: cls(PagedCache.Settings(), CacheContext(NUM_BLOCKS, MAX_MODEL_LEN))


@pytest.mark.parametrize("cls", [OneWriter, FindsTooMuch])
def test_a_cache_that_gives_what_is_not_there_costs_one_request(cls: type[PagedCache]) -> None:
    engine, sent = engine_of(Fcfs, cache=cache_of(cls)), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.error(VICTIM).startswith("cache=chaos (plugin chaos, acme-chaos 1.0): ")
    assert_whole(engine)


def test_a_cache_that_leaks_is_made_anew_when_the_engine_is_idle() -> None:
    engine, sent = engine_of(Fcfs, cache=cache_of(Leaks)), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent)
    answers.take(engine.step())
    assert [incident.group for incident in answers.incidents] == ["cache"]
    assert_whole(engine)


def test_a_cache_that_cannot_discard_is_emptied_when_a_request_fails() -> None:
    engine, sent = engine_of(Fcfs, cache=cache_of(NoDiscard), completion=ChaosCompletion(Chaos("raise"))), requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert "completion=chaos" in answers.error(VICTIM)
    assert_whole(engine)


class NoPeek(PagedCache):
    peek = None  # type: ignore[assignment]


class Peeks(PagedCache):
    found: Any = 0
    spoils = False

    def peek(self, request: Request) -> int:
        if self.spoils:
            request.block_table = [0]
        return self.found


def guarded(cls: type[PagedCache]) -> tuple[Any, GuardedCache]:
    cache = cache_of(cls)()
    return cache, GuardedCache(cache, Faults(NAMES))


def warm(cache: GuardedCache, prompt: list[int]) -> None:
    request = make_request("warm", prompt)
    cache.lookup(request)
    assert cache.allocate(request, len(prompt))
    cache.commit(request, len(prompt))
    cache.free(request)


def test_a_cache_without_peek_is_looked_into_and_left_as_it_was() -> None:
    prompt = list(range(40))
    cache, guard = guarded(NoPeek)
    warm(guard, prompt)
    request = make_request("probe", prompt)
    for _ in range(3):
        assert guard.peek(request) == 32
        assert (request.block_table, guard.num_free_blocks, guard.holdings) == ([], NUM_BLOCKS, {})
    assert guard.lookup(request) == 32
    cache.check()


@pytest.mark.parametrize("found", [-16, 17, 48, True, 16.0, None])
def test_a_peek_that_cannot_be_is_refused(found: Any) -> None:
    cache, guard = guarded(Peeks)
    cache.found = found
    with pytest.raises(StageError, match=r"peek found .* of 40 tokens"):
        guard.peek(make_request("probe", list(range(40))))


def test_a_peek_that_gives_blocks_is_refused() -> None:
    cache, guard = guarded(Peeks)
    cache.spoils = True
    with pytest.raises(StageError, match="peek changed the blocks"):
        guard.peek(make_request("probe", list(range(40))))
