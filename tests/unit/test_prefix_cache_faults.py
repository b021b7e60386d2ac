"""F53: colliding hashes, and a tree of prompts of four tenants in a pool that is always full. A ledger that knows nothing
of hashes says who wrote each block; outputs are those of a run without a cache (`assert_right_output`)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

import pytest

from core.batch import SchedulerOutput
from core.cache.paged import PagedCache
from core.cache.prefix import block_hash
from core.request import Request
from core.stages.prefill import Chunked, PrefillContext
from core.testing.fake_loop import BLOCK_SIZE, fake_engine
from core.testing.fakes import FakeEngine, Limits, assert_right_output, make_request

LIMITS = Limits(max_num_scheduled_tokens=512, max_num_running_reqs=16)
Owner = tuple[str, str]  # tenant and salt


def eight_bits(parent: bytes, token_ids: Sequence[int], extra: bytes) -> bytes:
    return hashlib.sha256(block_hash(parent, token_ids, extra)).digest()[:1]


class Ledger:
    """Who wrote each block, and whose blocks each request was given as found. Reads each plan before it is run."""

    def __init__(self, engine: FakeEngine) -> None:
        schedule = engine.scheduler.schedule

        def noted() -> SchedulerOutput:
            self._take(output := schedule())
            return output

        engine.scheduler.schedule = noted  # type: ignore[method-assign]
        self._writers: dict[int, Owner] = {}
        self._seen: set[str] = set()
        self.num_own = 0
        self.num_foreign = 0

    def _take(self, output: SchedulerOutput) -> None:
        for part in output.scheduled:
            request = part.request
            owner = request.tenant, request.cache_salt
            if request.request_id not in self._seen:
                self._seen.add(request.request_id)
                for block in request.block_table[: request.num_cached_tokens // BLOCK_SIZE]:
                    self.num_own += self._writers[block] == owner
                    self.num_foreign += self._writers[block] != owner
            first = part.start // BLOCK_SIZE
            for block in request.block_table[first : (part.start + part.num_tokens - 1) // BLOCK_SIZE + 1]:
                self._writers[block] = owner


def engine_of(num_blocks: int) -> FakeEngine:
    prefill = Chunked(Chunked.Settings(chunk_size=256), PrefillContext(LIMITS.max_num_scheduled_tokens))
    return fake_engine(num_blocks, LIMITS, prefill=prefill)


def run(engine: FakeEngine, requests: Iterator[Request]) -> Ledger:
    """At most 16 at a time."""
    ledger = Ledger(engine)
    for request in requests:
        engine.add(request)
        while len(engine.requests) >= 16:
            engine.step()
    engine.drain()
    for request in engine.ended.values():
        assert_right_output(request)
    return ledger


@pytest.mark.parametrize("num_prompts", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_f53_a_hash_of_eight_bits_gives_no_wrong_hit(num_prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 256 hashes nearly every lookup collides, and still no request reads a block of another prompt (bug K1)."""
    monkeypatch.setattr(PagedCache, "hash_block", staticmethod(eight_bits))
    rng = random.Random(0)
    stems = [[rng.randrange(50) for _ in range(BLOCK_SIZE)] for _ in range(12)]

    def prompts() -> Iterator[Request]:
        for index in range(num_prompts):
            prompt = [token for stem in rng.choices(stems, k=rng.randint(1, 3)) for token in stem]
            tenant = f"t{rng.randrange(2)}"
            yield make_request(f"r{index}", [*prompt, rng.randrange(50)], 2, seed=index, tenant=tenant)

    engine = engine_of(200)
    ledger = run(engine, prompts())
    assert len(engine.ended) == num_prompts
    assert ledger.num_foreign == 0 and ledger.num_own > num_prompts // 20


def tree(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that share heads with earlier ones, cut anywhere."""
    prompts: list[list[int]] = [[]]
    for _ in range(count):
        parent = rng.choice(prompts[-200:])
        head = parent[: rng.randint(0, len(parent))]
        prompts.append([*head, *(rng.randrange(50) for _ in range(rng.randint(1, 48)))][:200])
    return prompts[1:]


@pytest.mark.parametrize("pin_hits", [None, 2])
def test_f53_a_tree_of_prompts_with_four_tenants_in_a_full_pool(
    pin_hits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(53)
    settings = PagedCache.Settings(pin_hits=pin_hits)
    monkeypatch.setattr(PagedCache, "Settings", lambda **values: settings.model_copy(update=values))
    owners = [("a", ""), ("a", "salt"), ("b", ""), ("b", "salt"), ("c", "salt"), ("d", "")]

    def requests() -> Iterator[Request]:
        for index, prompt in enumerate(tree(rng, 1000)):
            tenant, salt = rng.choice(owners)
            yield make_request(f"r{index}", prompt, rng.randint(1, 8), seed=index, tenant=tenant, cache_salt=salt)

    engine = engine_of(400)
    fullness: list[float] = []
    pool = engine.cache._pool  # type: ignore[attr-defined]
    evict, evicted = pool._evict, []

    def counted() -> int:
        fullness.append(1 - len(pool._blank) / pool.num_blocks)
        evicted.append(evict())
        return evicted[-1]

    pool._evict = counted
    ledger = run(engine, requests())
    assert len(engine.ended) == 1000
    assert ledger.num_foreign == 0 and ledger.num_own > 100
    assert len(evicted) > 400 and min(fullness) >= 0.9
    assert bool(pool._pinned) == (pin_hits is not None)
