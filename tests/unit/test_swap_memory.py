"""Copies of KV between the pool and host memory: bit for bit, in order, and told when a bit has changed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.cache.kv_cache import CacheSettings, KVCopy
from core.errors import ConfigError, PluginError
from core.host_memory import HostMemory, host_memory
from core.model import runner as runner_module
from core.model.swap_memory import MAX_STAGED, ChecksumError, SwapMemory, _runs
from core.session import open_session
from core.testing.batches import Share, batch_of
from core.testing.engines import engine_request
from core.testing.harness.fake_executors import FakeExecutor
from core.testing.tiny_models import make_tiny_model

NUM_BLOCKS, NUM_SWAP_BLOCKS = 90, 80
SHAPES = ((4, 2, 3), (4, 2, 1), (7,))  # of a block, by layer


def random_pool(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn((NUM_BLOCKS * shape[0], *shape[1:]), generator=made).to(dtype) for shape in SHAPES]


class SlowTwin:
    """One block of one layer at a time."""

    def __init__(self, pool: Sequence[torch.Tensor]):
        self._layers = [layer.view(NUM_BLOCKS, -1) for layer in pool]
        self._host: dict[int, list[torch.Tensor]] = {}

    def run(self, copies: Sequence[KVCopy]) -> None:
        for copy in copies:
            for device, host in zip(copy.device_blocks, copy.host_blocks, strict=True):
                if copy.direction == "out":
                    self._host[host] = [layer[device].clone() for layer in self._layers]
                else:
                    for layer, kept in zip(self._layers, self._host[host], strict=True):
                        layer[device] = kept


def random_copies(rng: random.Random) -> list[KVCopy]:
    copies, written = [], set()
    for _ in range(40):
        direction = rng.choice(["out", "in"]) if written else "out"
        count = rng.randint(1, NUM_SWAP_BLOCKS if direction == "out" else len(written))
        host = rng.sample(range(NUM_SWAP_BLOCKS) if direction == "out" else sorted(written), count)
        if rng.random() < 0.5:
            host.sort()
        written |= set(host)
        copies.append(KVCopy(direction, tuple(rng.sample(range(NUM_BLOCKS), count)), tuple(host)))
    return copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("checksums", [False, True])
def test_it_equals_its_slow_twin_bit_for_bit(dtype: torch.dtype, checksums: bool) -> None:
    for seed in range(5):
        pool, twin = random_pool(dtype, seed), random_pool(dtype, seed)
        memory, slow = SwapMemory(pool, NUM_BLOCKS, NUM_SWAP_BLOCKS, checksums), SlowTwin(twin)
        copies = random_copies(random.Random(seed))
        assert max(len(copy.host_blocks) for copy in copies) > MAX_STAGED
        memory.run(copies[:20])
        memory.run(copies[20:])
        slow.run(copies)
        for layer, expected in zip(pool, twin, strict=True):
            assert torch.equal(layer.view(torch.uint8), expected.view(torch.uint8))


def test_a_bit_that_flips_in_host_memory_is_seen() -> None:
    pool = random_pool(torch.float32)
    memory = SwapMemory(pool, NUM_BLOCKS, NUM_SWAP_BLOCKS, checksums=True)
    memory.run([KVCopy("out", (1, 2, 3), (5, 6, 7))])
    memory.rows[6, 3] ^= 4
    with pytest.raises(ChecksumError, match="host block 6 came back with the checksum"):
        memory.run([KVCopy("in", (8, 9), (5, 6))])
    memory.run([KVCopy("in", (8, 9), (5, 7))])


def test_a_block_that_went_out_again_has_a_new_checksum() -> None:
    pool = random_pool(torch.float32)
    memory = SwapMemory(pool, NUM_BLOCKS, NUM_SWAP_BLOCKS, checksums=True)
    memory.run([KVCopy("out", (1,), (5,)), KVCopy("out", (2,), (5,)), KVCopy("in", (3,), (5,))])
    assert torch.equal(pool[0].view(NUM_BLOCKS, -1)[3], pool[0].view(NUM_BLOCKS, -1)[2])


def test_measuring_takes_a_moment_also_in_tiny_memories() -> None:
    assert SwapMemory(random_pool(torch.float32), NUM_BLOCKS, 1).measure() > 0
    assert SwapMemory(random_pool(torch.float32), NUM_BLOCKS, NUM_SWAP_BLOCKS, checksums=True).measure() > 0


def test_neighbours_are_copied_together() -> None:
    assert list(_runs([3, 4, 5, 9, 1, 2])) == [(0, 3, 3), (3, 1, 9), (4, 2, 1)]
    assert list(_runs([7])) == [(0, 1, 7)]


# A real model


def run_solo(engine: Any, prompt: list[int], count: int) -> list[int]:
    engine.add([engine_request("solo", prompt, max_tokens=count)])
    found: list[int] = []
    while engine.has_work():
        found += [token for delta in engine.step().deltas for token in delta.token_ids]
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def engine_of(tiny: Path, *overrides: str) -> Any:
    from core.assembly import make_engine

    fixed = (f"model.source={tiny}", "model.dtype=float32", "executor.num_threads=1", "process.separate=false")
    session = open_session([*fixed, *overrides])
    return make_engine(session.settings, session.plugins, description=session.description)


def test_kv_of_a_real_model_comes_back_bit_for_bit_and_goes_on_as_it_would_have(tiny: Path) -> None:
    engine = engine_of(tiny, "cache.num_blocks=16", "cache.num_swap_blocks=8", "cache.swap_checksums=true")
    executor = engine._executor
    prompt = [(7 * index) % 300 + 6 for index in range(40)]
    shares = [Share("a", prompt, 0, 40, [3, 1, 2])]
    executor.submit(batch_of(shares, 16)).result()
    layers = [cache.view(16, -1) for cache in executor._runner._kv_caches]
    before = [layer[[3, 1, 2]].clone() for layer in layers]
    executor.swap([KVCopy("out", (3, 1, 2), (5, 0, 7))])
    executor.submit(batch_of([Share("b", prompt[::-1], 0, 40, [1, 2, 3])], 16)).result()
    executor.swap([KVCopy("in", (9, 10, 3), (5, 0, 7))])
    for layer, kept in zip(layers, before, strict=True):
        assert torch.equal(layer[[9, 10, 3]], kept)
    twin = engine_of(tiny, "cache.num_blocks=16")
    decode = [*prompt, 50]
    result = executor.submit(batch_of([Share("a", decode, 40, 1, [9, 10, 3])], 16)).result()
    assert result.sampled.token_ids["a"] == (run_solo(twin, decode, 1)[0],)
    engine.close()
    twin.close()


@pytest.mark.parametrize("preemption", ["swap", "auto", "recompute"])
def test_a_real_model_gives_the_same_under_each_preemption(tiny: Path, preemption: str) -> None:
    pool = ("cache.num_blocks=9", "cache.num_swap_blocks=30", "cache.swap_checksums=true")
    engine = engine_of(tiny, *pool, f"scheduler.preemption={preemption}")
    assert engine._pipeline.cache.num_swap_blocks == 30
    requests = [
        engine_request(f"r{i}", [(i * 31 + j) % 300 + 6 for j in range(9 + 6 * i)], max_tokens=40) for i in range(6)
    ]
    engine.add(requests)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    num_preempted = num_in = 0
    while engine.has_work():
        output = engine.step()
        num_preempted += output.stats.num_preemptions
        num_in += output.stats.num_swapped_in_blocks
        for delta in output.deltas:
            found[delta.request_id] += delta.token_ids
    assert num_preempted > 0
    assert (num_in > 0) == (preemption == "swap") or preemption == "auto"
    twin = engine_of(tiny, "cache.num_blocks=64")
    for request in requests:
        assert found[request.request_id] == run_solo(twin, list(request.prompt_token_ids), 40)
    engine.close()
    twin.close()


def test_a_bit_flip_between_out_and_in_costs_no_answer(tiny: Path) -> None:
    """The checksum raises, all are computed again, and operators are told."""
    pool = ("cache.num_blocks=9", "cache.num_swap_blocks=30", "cache.swap_checksums=true", "scheduler.preemption=swap")
    engine = engine_of(tiny, *pool)
    requests = [
        engine_request(f"r{i}", [(i * 31 + j) % 300 + 6 for j in range(9 + 6 * i)], max_tokens=40) for i in range(6)
    ]
    engine.add(requests)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    incidents, flips = [], 0
    while engine.has_work():
        if not flips and engine._pipeline.cache.swapped:
            engine._executor._runner.swap_memory.rows ^= 1
            flips += 1
        output = engine.step()
        incidents += output.incidents
        for delta in output.deltas:
            assert not delta.error
            found[delta.request_id] += delta.token_ids
    assert flips
    (incident,) = incidents
    assert (incident.group, incident.name) == ("executor", "local")
    assert "came back with the checksum" in incident.reason
    twin = engine_of(tiny, "cache.num_blocks=64")
    for request in requests:
        assert found[request.request_id] == run_solo(twin, list(request.prompt_token_ids), 40)
    engine.close()
    twin.close()


# Sizes


class Sized(FakeExecutor):
    """A block takes one MiB."""

    def kv_bytes_per_block(self) -> int:
        return 1 << 20


def measured(executor: Any, **cache: Any) -> HostMemory:
    who = "executor=fake (plugin acme)"
    return host_memory(executor, CacheSettings(**cache), who=who, num_kv_blocks=100, max_tokens=64, vocab_size=50)


def prepared(monkeypatch: pytest.MonkeyPatch | None = None, free: int | None = None, **cache: Any) -> HostMemory:
    executor = Sized()
    executor.allocate(100)
    if monkeypatch is not None:
        monkeypatch.setattr("core.host_memory.free_host_memory", lambda: free)
    return measured(executor, **cache)


def test_nothing_is_swapped_unless_config_says_so() -> None:
    assert (
        prepared() == HostMemory(0, None) == prepared(swap_memory=0) == prepared(swap_memory="8GiB", num_swap_blocks=0)
    )


def test_sizes_are_those_of_the_pool() -> None:
    host = prepared(swap_memory="64MiB")
    assert host.num_blocks == 64
    assert host.cost is not None
    assert host.cost.copy_s_per_block == 1e-6
    assert host.cost.prefill_s_per_token > 0
    assert prepared(swap_memory="64MiB", num_swap_blocks=7).num_blocks == 7


def test_a_fraction_is_of_the_host_memory_that_the_pool_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(monkeypatch, 300 << 20, swap_memory=0.5).num_blocks == 100
    with pytest.raises(ConfigError, match="does not hold one KV block"):
        prepared(monkeypatch, 100 << 20, swap_memory=0.5)
    with pytest.raises(ConfigError, match="cache.swap_memory=0.5 is a fraction .* cache.num_swap_blocks"):
        prepared(monkeypatch, None, swap_memory=0.5)


@pytest.mark.parametrize("value", ["-1", "lots", "2GB", -0.5, 1.5, "-1GiB"])
def test_a_size_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="swap_memory"):
        CacheSettings(swap_memory=value)


def test_an_executor_that_cannot_swap_after_all_is_named() -> None:
    with pytest.raises(PluginError, match=r"executor=fake \(plugin acme\) cannot swap KV: .*allocate_swap"):
        measured(SimpleNamespace(), num_swap_blocks=3)


@pytest.mark.parametrize("seconds", [None, -1.0, float("nan"), float("inf"), "1"])
def test_a_copy_time_that_is_none_is_refused(seconds: Any) -> None:
    class Wrong(FakeExecutor):
        def measure_swap(self) -> Any:
            return seconds

    executor = Wrong()
    executor.allocate(100)
    with pytest.raises(PluginError, match="measure_swap returned"):
        measured(executor, num_swap_blocks=3)


def test_host_memory_that_is_not_there_is_refused_before_it_is_touched(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny, "cache.num_blocks=16", "cache.num_swap_blocks=8")
    executor = engine._executor
    block = executor.kv_bytes_per_block()
    monkeypatch.setattr(runner_module, "free_host_memory", lambda: 20 * block)
    executor.allocate_swap(4)  # beside 16 blocks of the pool
    with pytest.raises(ConfigError, match=r"swapped KV: 5 blocks need .* cache.swap_memory"):
        executor.allocate_swap(5)
    engine.close()
    with pytest.raises(RuntimeError, match="allocate_swap comes first"):
        executor.swap([])
