"""A cache that gives what is not there, or keeps what it should give back."""

from __future__ import annotations

from typing import Any

import pytest

from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.request import Request
from core.testing.engines import MAX_MODEL_LEN
from core.testing.harness.engine_isolation import (
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
