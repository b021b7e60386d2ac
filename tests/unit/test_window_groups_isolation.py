"""A cache whose groups of layers are wrong costs the request that it is wrong for; each block has one writer over all groups."""

from __future__ import annotations

from typing import Any

import pytest

from core.cache.kv_cache import CacheContext
from core.cache.paged import PagedCache
from core.engine import Engine
from core.isolation.cache import GuardedCache
from core.isolation.faults import Faults, StageError
from core.kv_layout import KVLayout
from core.request import GroupTable, Request
from core.testing.engines import MAX_MODEL_LEN
from core.testing.fakes import make_request
from core.testing.harness.engine_isolation import (
    NUM_BLOCKS,
    VICTIM,
    assert_solo,
    assert_whole,
    due,
    engine_of,
    requests,
    run,
)
from core.testing.harness.fake_executors import FakeExecutor
from plugins.schedulers.fcfs import Fcfs

LAYOUT = KVLayout((None, 24, 24), 256)
CONTEXT = CacheContext(NUM_BLOCKS, MAX_MODEL_LEN, 0, LAYOUT.windows, LAYOUT.max_step_tokens)


def tables_of(request: Request, *tables: GroupTable) -> None:
    request.group_tables = tuple(tables) + request.group_tables[len(tables) :]


class Wrong(PagedCache):
    """Right, until the victim is due."""

    def slide(self, request: Request, start: int, end: int) -> None:
        super().slide(request, start, end)
        if due(request):
            self.strike(request)

    def strike(self, request: Request) -> None:
        raise NotImplementedError


class GivesAnothers(Wrong):
    def strike(self, request: Request) -> None:
        table = request.group_tables[0]
        others = [h.request for h in self._holdings.values() if h.request is not request and h.request.group_tables]
        if others:
            tables_of(request, GroupTable(table.first, (*table.blocks[:-1], others[0].group_tables[1].blocks[-1])))


class GivesTwice(Wrong):
    def strike(self, request: Request) -> None:
        request.group_tables = (request.group_tables[1], request.group_tables[1])


class GivesTooFew(Wrong):
    def strike(self, request: Request) -> None:
        table = request.group_tables[0]
        tables_of(request, GroupTable(table.first, table.blocks[:-1]))


class TakesTheWindow(Wrong):
    def strike(self, request: Request) -> None:
        table = request.group_tables[0]
        tables_of(request, GroupTable(table.first + 1, table.blocks[1:]))


class TakesAGroup(Wrong):
    def strike(self, request: Request) -> None:
        request.group_tables = request.group_tables[:1]


class Invents(Wrong):
    def strike(self, request: Request) -> None:
        table = request.group_tables[0]
        tables_of(request, GroupTable(table.first, (*table.blocks[:-1], NUM_BLOCKS)))


class LeavesNone(Wrong):
    def strike(self, request: Request) -> None:
        request.group_tables = None  # type: ignore[assignment]


class Reorders(Wrong):
    def strike(self, request: Request) -> None:
        table = request.group_tables[0]
        if len(table.blocks) > 2:
            tables_of(request, GroupTable(table.first, (table.blocks[1], table.blocks[0], *table.blocks[2:])))


class Raises(Wrong):
    pass


def engine_with_groups(scheduler: type[Fcfs] = Fcfs, cache: type[PagedCache] = PagedCache) -> Engine:
    return engine_of(
        scheduler,
        cache=lambda: cache(PagedCache.Settings(), CONTEXT),
        executor=FakeExecutor(windows=LAYOUT.windows),
        layout=LAYOUT,
    )


@pytest.mark.parametrize(
    "cls",
    [GivesAnothers, GivesTwice, GivesTooFew, TakesTheWindow, TakesAGroup, Invents, LeavesNone, Reorders, Raises],
)
def test_wrong_group_tables_cost_one_request(cls: type[Wrong]) -> None:
    engine = engine_with_groups(cache=cls)
    sent = requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert answers.error(VICTIM).startswith("cache=chaos (plugin chaos, acme-chaos 1.0): ")
    assert_whole(engine)


def test_an_engine_with_groups_gives_what_each_request_gives_alone() -> None:
    engine = engine_with_groups()
    sent = requests()
    answers = run(engine, sent)
    assert_solo(answers, sent)
    assert_whole(engine)


class PutsItsOwn(Fcfs):
    """A scheduler that meddles with what the cache gave."""

    def schedule(self) -> Any:
        plan = super().schedule()
        for part in plan.scheduled:
            if due(part.request):
                part.request.group_tables = tuple(
                    GroupTable(table.first, table.blocks) for table in part.request.group_tables
                )
        return plan


def test_a_scheduler_that_puts_group_tables_of_its_own_costs_one_request() -> None:
    engine = engine_with_groups(scheduler=PutsItsOwn)
    sent = requests()
    answers = run(engine, sent)
    assert_solo(answers, sent, but=VICTIM)
    assert "it put other group tables in place of the cache's" in answers.error(VICTIM)
    assert_whole(engine)


class FindsLess(PagedCache):
    def lookup(self, request: Request) -> int:
        found = super().lookup(request)
        if found:
            table = request.group_tables[0]
            tables_of(request, GroupTable(table.first + 1, table.blocks[1:]))
        return found


class FindsTwice(PagedCache):
    def lookup(self, request: Request) -> int:
        found = super().lookup(request)
        if found:
            request.group_tables = (request.group_tables[1], request.group_tables[1])
        return found


@pytest.mark.parametrize("cls", [FindsLess, FindsTwice])
def test_what_lookup_finds_has_its_window_in_all_groups(cls: type[PagedCache]) -> None:
    cache = GuardedCache(cls(PagedCache.Settings(), CONTEXT), Faults(), 0, LAYOUT.windows)
    first, again = make_request("a", range(100)), make_request("b", range(100))
    assert cache.lookup(first) == 0 and cache.allocate(first, 100)
    cache.slide(first, 0, 100)
    cache.commit(first, 100)
    cache.free(first)
    with pytest.raises(StageError, match="group table"):
        cache.lookup(again)


def test_allocate_may_not_touch_group_tables() -> None:
    class Touches(PagedCache):
        def allocate(self, request: Request, num_tokens: int) -> bool:
            request.group_tables = ()
            return super().allocate(request, num_tokens)

    cache = GuardedCache(Touches(PagedCache.Settings(), CONTEXT), Faults(), 0, LAYOUT.windows)
    request = make_request("a", range(100))
    assert cache.allocate(request, 16)
    cache.slide(request, 0, 16)
    with pytest.raises(StageError, match="allocate changed the group tables"):
        cache.allocate(request, 32)


@pytest.mark.parametrize(("name", "answer"), [("num_missing", None), ("num_needed", 1), ("num_needed", "7")])
def test_counts_that_cannot_be_are_the_caches_fault(name: str, answer: object) -> None:
    inner = PagedCache(PagedCache.Settings(), CONTEXT)
    setattr(inner, name, lambda *_: answer)
    cache = GuardedCache(inner, Faults(), 0, LAYOUT.windows)
    request = make_request("a", range(100))
    with pytest.raises(StageError, match=name):
        cache.num_needed(100) if name == "num_needed" else cache.num_missing(request, 100)


def test_a_cache_of_before_counts_as_it_did() -> None:
    """API 1.1: neither `num_needed` nor `num_missing`."""

    class Old(PagedCache):
        num_needed = num_missing = None  # type: ignore[assignment]

        def allocate(self, request: Request, num_tokens: int) -> bool:
            request.block_table.extend(self._pool.allocate(-(-num_tokens // 16) - len(request.block_table)))
            return True

    cache = GuardedCache(Old(PagedCache.Settings(), CacheContext(20, 1024)), Faults())
    request = make_request("a", range(100))
    assert (cache.num_needed(100), cache.num_missing(request, 100)) == (7, 7 - 20)
    cache.allocate(request, 100)
    assert cache.num_missing(request, 116) == 1 - 13
