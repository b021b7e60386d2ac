"""The block pool: counting, eviction, and a state machine over all its operations (reliability: block allocator)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.cache.block_pool import BlockPool
from core.cache.prefix import PrefixNode


def remember(pool: BlockPool, block: int, name: str) -> None:
    digest = name.encode()
    pool.remember(block, digest, PrefixNode(digest, [], b"", None))


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_double_free_raises_and_changes_nothing() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match="double free"):
        pool.release([block])
    pool.check([])
    assert pool.num_free == 4


def test_more_than_free_is_refused_as_a_whole() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(ValueError, match="1 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_blank_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    remember(pool, block, "a")
    pool.release([block])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    assert block not in pool.allocate(2)
    assert pool.find(b"a") == block
    assert pool.allocate(1) == [block]
    assert pool.find(b"a") is None
    assert pool.node(block) is None


def test_least_recently_used_content_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, "abc", strict=True):
        remember(pool, block, name)
    pool.release(blocks)  # c, the tail, is first in line; then b, a
    pool.acquire(blocks[2])
    pool.release([blocks[2]])  # used again: now last in line
    assert pool.allocate(2) == [blocks[1], blocks[0]]
    assert pool.find(b"c") == blocks[2]


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    remember(pool, block, "a")
    pool.acquire(block)
    pool.release([block])
    pool.allocate(1)
    with pytest.raises(ValueError, match="are free"):
        pool.allocate(1)
    assert pool.find(b"a") == block


def test_a_blank_block_cannot_be_shared_or_cached() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="no content"):
        pool.acquire(0)
    with pytest.raises(ValueError, match="cannot be cached"):
        remember(pool, 0, "a")


def test_one_hash_has_one_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    remember(pool, first, "a")
    with pytest.raises(ValueError, match="cannot be cached"):
        remember(pool, second, "a")
    with pytest.raises(ValueError, match="cannot be cached"):
        remember(pool, first, "b")


def cached_pool(num_blocks: int, **pins: int) -> BlockPool:
    """All blocks hold content, block 0 the oldest."""
    pool = BlockPool(num_blocks, **pins)
    for block, name in zip(pool.allocate(num_blocks), "abcdefgh", strict=False):
        remember(pool, block, name)
        pool.release([block])
    return pool


def use(pool: BlockPool, block: int, times: int) -> None:
    for _ in range(times):
        pool.acquire(block)
        pool.hit([block])
        pool.release([block])


def test_content_that_is_hit_often_is_evicted_last() -> None:
    pool = cached_pool(4, pin_hits=2, max_pinned=2)
    use(pool, 0, 2)
    use(pool, 1, 1)
    assert (pool.num_free, pool.num_cached, list(pool._pinned)) == (4, 4, [0])
    assert [pool.allocate(1) for _ in range(4)] == [[2], [3], [1], [0]], "in the end it is evicted, too"
    pool.check([[0], [1], [2], [3]])


def test_no_more_is_pinned_than_may_be_and_who_lost_its_place_has_to_earn_it_again() -> None:
    pool = cached_pool(4, pin_hits=2, max_pinned=1)
    use(pool, 0, 2)
    use(pool, 1, 2)
    assert (list(pool._pinned), pool.num_cached) == ([1], 4)
    use(pool, 0, 1)
    assert list(pool._pinned) == [1]
    assert [pool.allocate(1) for _ in range(4)] == [[2], [3], [0], [1]]


def test_hits_are_of_the_content_not_of_the_block() -> None:
    for lose in (BlockPool.forget_all, lambda pool: pool.allocate(1)):
        pool = cached_pool(1, pin_hits=2, max_pinned=1)
        use(pool, 0, 2)
        table = lose(pool) or pool.allocate(1)
        remember(pool, 0, "new")
        pool.release(table)
        assert (pool.num_cached, list(pool._pinned)) == (1, [])


@pytest.mark.parametrize("tables", [[], [[0, 0]], [[1]], [[0], [0]]], ids=str)
def test_check_sees_a_wrong_holder(tables: list[list[int]]) -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]
    pool.check([[0]])
    with pytest.raises(AssertionError):
        pool.check(tables)


def test_check_sees_a_block_twice_in_the_free_lists() -> None:
    pool = BlockPool(2)
    pool._blank.append(0)
    with pytest.raises(AssertionError, match="twice"):
        pool.check([])


class PoolMachine(RuleBasedStateMachine):
    """Tables that share blocks in any order, against the pool's own check and a model of who holds what."""

    @initialize(num_blocks=st.integers(1, 12), pin_hits=st.integers(1, 3), max_pinned=st.integers(0, 4))
    def start(self, num_blocks: int, pin_hits: int, max_pinned: int) -> None:
        self.pool = BlockPool(num_blocks, pin_hits, max_pinned)
        self.tables: list[list[int]] = []
        self.names: dict[str, int] = {}
        self.num_named = 0

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        held = {block for table in self.tables for block in table}
        free = self.pool.num_free
        assert free == self.pool.num_blocks - len(held)
        if count > free:
            with pytest.raises(ValueError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and not held & set(blocks)
        self.names = {name: block for name, block in self.names.items() if block not in blocks}
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        for block in table:
            self.pool.acquire(block)
        self.tables.append(list(table))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        held = sorted({block for table in self.tables for block in table} - set(self.names.values()))
        if held:
            block, name = data.draw(st.sampled_from(held)), f"content {self.num_named}"
            remember(self.pool, block, name)
            self.names[name] = block
            self.num_named += 1

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def find_and_hold(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        block = self.pool.find(name.encode())
        assert block == self.names[name]
        self.pool.acquire(block)
        self.pool.hit([block])
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.names.clear()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.tables)
        held = {block for table in self.tables for block in table}
        cached = set(self.names.values()) - held
        assert (self.pool.num_free, self.pool.num_cached) == (self.pool.num_blocks - len(held), len(cached))
        assert all(self.pool.find(name.encode()) == block for name, block in self.names.items())

    def teardown(self) -> None:
        for table in getattr(self, "tables", []):
            self.pool.release(table)
        if hasattr(self, "pool"):
            assert self.pool.num_free == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
