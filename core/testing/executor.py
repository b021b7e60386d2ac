"""What every executor must do, as tests::

class TestMine(ExecutorContract):
    component = Mine
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from core.batch import ModelBatch
from core.cache.kv_cache import KVCopy
from core.errors import ConfigError
from core.model.interface import Executor
from core.request import EngineRequest
from core.scheduling.policy import QueueSettings
from core.testing.batches import Share, batch_of
from core.testing.contract import Contract
from core.testing.engines import engine_request, make_engine
from core.testing.fake_loop import fcfs
from core.testing.fakes import VOCAB_SIZE
from core.testing.toy_model import BLOCK_SIZE, ROOFLINE, Toy, ids_of, toy_next, toy_output

NUM_BLOCKS = 40
MAX_STEPS = 2000


def prefill_of(name: str, ids: list[int], block: int) -> ModelBatch:
    """The whole prompt `ids` in one step, in one block."""
    return batch_of([Share(name, ids, 0, len(ids), [block])], BLOCK_SIZE)


class ExecutorContract(Contract):
    def make_executor(self, toy: Toy | None = None, num_blocks: int = NUM_BLOCKS) -> Executor:
        executor: Executor = self.make((toy or Toy()).context())
        executor.allocate(num_blocks)
        return executor

    def test_it_says_where_and_with_what_it_runs(self) -> None:
        toy = Toy()
        executor = self.make_executor(toy)
        assert executor.dtype == "float32", "the dtype that config asked for"
        assert executor.device.partition(":")[0] == "cpu"
        assert toy.devices == [executor.device], "one sampler, for the device of the model"
        executor.close()

    def test_it_knows_the_size_of_a_block_and_what_is_free(self) -> None:
        executor = self.make_executor()
        assert executor.kv_bytes_per_block() == BLOCK_SIZE * 4, "one float32 per slot of the toy model's only layer"
        free = executor.free_memory()
        assert free is None or free > 0
        executor.close()

    def test_what_the_model_says_of_the_machine_is_passed_on_or_not_at_all(self) -> None:
        executor = self.make_executor()
        measure = getattr(executor, "roofline", None)  # optional
        assert measure is None or measure() in (None, ROOFLINE)
        executor.close()

    def test_a_pool_that_does_not_fit_is_refused_with_its_size(self) -> None:
        executor = self.make_executor(num_blocks=1)
        with pytest.raises(ConfigError, match=str(10**13)):
            executor.allocate(10**13)
        executor.close()

    def test_tokens_are_those_of_a_solo_run(self) -> None:
        """In an engine that mixes prompts in chunks with decodes, shares prefixes, preempts and aborts."""
        toy = Toy()
        executor = self.make(toy.context())
        limits = QueueSettings(max_num_scheduled_tokens=64, max_num_running_reqs=8)
        engine = make_engine(fcfs, limits, executor, num_blocks=NUM_BLOCKS, chunk_size=24, budget=64)
        head = [index % VOCAB_SIZE for index in range(40)]
        requests = [engine_request(f"r{i}", [*head[: i * 5 % 41], i, i + 1], 20 + i % 7) for i in range(12)]
        found: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for step in range(MAX_STEPS):
            engine.add(requests[step : step + 1])
            if step == 9:
                engine.abort(["r3"])
            for delta in engine.step().deltas:
                found[delta.request_id] += delta.token_ids
            if step > len(requests) and not engine.has_work():
                break
        self.assert_complete(requests, found)
        assert {"r0", "r3"} <= set(toy.sampler.forgotten), "the sampler is told of ends and aborts"
        executor.close()

    def assert_complete(self, requests: list[EngineRequest], found: Mapping[str, list[int]]) -> None:
        for request in requests:
            expected = toy_output(request.prompt_token_ids, request.params.max_tokens)
            if request.request_id == "r3":
                expected = expected[: len(found["r3"])]
            assert found[request.request_id] == expected, f"{request.request_id} is not what it is alone"

    def test_every_submission_has_the_result_of_its_own_batch(self) -> None:
        executor = self.make_executor()
        prompts = {name: [index + 1, 2, 3] for index, name in enumerate("abcd")}
        steps = {
            name: executor.submit(prefill_of(name, ids, index)) for index, (name, ids) in enumerate(prompts.items())
        }
        for name, ids in prompts.items():
            assert ids_of(steps[name].result()) == {name: (toy_next(ids),)}
        executor.close()

    def test_a_result_can_be_read_again(self) -> None:
        executor = self.make_executor()
        step = executor.submit(prefill_of("a", [1, 2, 3], 0))
        assert ids_of(step.result()) == ids_of(step.result()) == {"a": (toy_next([1, 2, 3]),)}
        executor.close()

    def test_ids_in_flight_are_filled_in(self) -> None:
        """A step may be submitted before the id that is its input is known to the scheduler."""
        executor = self.make_executor()
        first = executor.submit(prefill_of("a", [1, 2, 3], 4))
        decode = batch_of([Share("a", [1, 2, 3, -1], 3, 1, [4])], BLOCK_SIZE)
        second = executor.submit(replace(decode, token_sources={0: "a"}))
        expected = toy_output([1, 2, 3], 2)
        assert ids_of(first.result()) == {"a": (expected[0],)}
        assert ids_of(second.result()) == {"a": (expected[1],)}
        executor.close()

    def test_a_request_is_where_its_row_is(self) -> None:
        """Rows of the logits are not requests: some shares have none, and the order is the batch's."""
        executor = self.make_executor()
        shares = [
            Share("chunk", [9] * 20, 0, 10, [0, 1], logits="none"),
            Share("b", [4, 5], 0, 2, [2]),
            Share("all", [7, 8, 6], 0, 3, [3], logits="all"),
        ]
        found = ids_of(executor.submit(batch_of(shares, BLOCK_SIZE)).result())
        assert found == {"b": (toy_next([4, 5]),), "all": (toy_next([7, 8, 6]),)}
        executor.close()

    def test_a_failed_step_raises_from_its_result_and_can_be_run_again(self) -> None:
        toy = Toy()
        executor = self.make_executor(toy)

        def fault(batch: ModelBatch) -> None:
            raise RuntimeError("the toy model was told to fail")

        toy.model.fault = fault
        step = executor.submit(prefill_of("a", [1, 2, 3], 0))
        with pytest.raises(Exception, match="told to fail"):
            step.result()
        toy.model.fault = None
        again = executor.submit(prefill_of("a", [1, 2, 3], 0))
        assert ids_of(again.result()) == {"a": (toy_next([1, 2, 3]),)}
        executor.close()

    def test_unknown_ids_are_forgotten_quietly(self) -> None:
        executor = self.make_executor()
        executor.submit(prefill_of("a", [1, 2, 3], 0)).result()
        executor.forget(["a", "a", "nobody"])
        executor.forget([])
        executor.close()

    # Host memory, of those who provide `swap`

    def make_swapping(self, num_swap_blocks: int = 8, checksums: bool = True) -> Executor:
        self.needs("swap")
        executor = self.make_executor()
        executor.allocate_swap(num_swap_blocks, checksums)
        return executor

    def next_of(self, executor: Executor, ids: list[int], block: int) -> tuple[int, ...]:
        """What comes after `ids`, all but the last of which are in `block` already."""
        decode = batch_of([Share("a", ids, len(ids) - 1, 1, [block])], BLOCK_SIZE)
        return ids_of(executor.submit(decode).result())["a"]

    @pytest.mark.parametrize("checksums", [False, True])
    def test_kv_that_went_to_host_memory_comes_back_anywhere(self, checksums: bool) -> None:
        executor = self.make_swapping(checksums=checksums)
        prompts = [[index + 1, 2, 3] for index in range(3)]
        for index, ids in enumerate(prompts):
            executor.submit(prefill_of("a", ids, index)).result()
        executor.swap([KVCopy("out", (0, 1, 2), (7, 3, 4))])
        for block in range(10):
            executor.submit(prefill_of("b", [9] * BLOCK_SIZE, block)).result()
        executor.swap([KVCopy("in", (8, 0, 5), (7, 3, 4))])
        for block, ids in zip((8, 0, 5), prompts, strict=True):
            assert self.next_of(executor, [*ids, 4], block) == (toy_next([*ids, 4]),)
        executor.close()

    def test_copies_are_made_in_order_after_the_steps_before(self) -> None:
        executor = self.make_swapping()
        executor.submit(prefill_of("a", [1, 2, 3], 0))
        executor.submit(prefill_of("b", [4, 5, 6], 1))
        turns = [
            KVCopy("out", (0,), (0,)),
            KVCopy("out", (1,), (1,)),
            KVCopy("in", (1,), (0,)),
            KVCopy("in", (0,), (1,)),
        ]
        executor.swap([*turns, KVCopy("out", (1,), (0,)), KVCopy("in", (6,), (0,))])
        assert self.next_of(executor, [4, 5, 6, 7], 0) == (toy_next([4, 5, 6, 7]),)
        for block in (1, 6):
            assert self.next_of(executor, [1, 2, 3, 7], block) == (toy_next([1, 2, 3, 7]),)
        executor.close()

    def test_a_checksum_tells_of_kv_that_never_went_out(self) -> None:
        executor = self.make_swapping()
        executor.swap([])
        with pytest.raises(Exception, match="checksum"):
            executor.swap([KVCopy("in", (0,), (5,))])
        executor.close()

    def test_host_memory_that_does_not_fit_is_refused_with_its_size(self) -> None:
        executor = self.make_swapping()
        with pytest.raises(ConfigError, match=str(10**13)):
            executor.allocate_swap(10**13)
        executor.close()

    def test_it_knows_how_long_a_copy_takes(self) -> None:
        executor = self.make_swapping()
        seconds = executor.measure_swap()
        assert type(seconds) is float
        assert 0 <= seconds < 60
        self.make_swapping(num_swap_blocks=1).measure_swap()
        executor.close()

    def test_swapped_requests_have_the_tokens_of_a_solo_run(self) -> None:
        """In an engine that has blocks for two of twelve requests."""
        self.needs("swap")
        executor = self.make(Toy().context())
        limits = QueueSettings(max_num_scheduled_tokens=64, max_num_running_reqs=8)
        engine = make_engine(fcfs, limits, executor, num_blocks=9, num_swap_blocks=20, chunk_size=24, budget=64)
        head = [index % VOCAB_SIZE for index in range(40)]
        requests = [engine_request(f"s{i}", [*head[: i * 5 % 41], i, i + 1], 30 + i) for i in range(12)]
        found: dict[str, list[int]] = {request.request_id: [] for request in requests}
        num_in = num_out = 0
        engine.add(requests)
        for _ in range(MAX_STEPS):
            output = engine.step()
            num_out += output.stats.num_swapped_out_blocks
            num_in += output.stats.num_swapped_in_blocks
            for delta in output.deltas:
                found[delta.request_id] += delta.token_ids
            if not engine.has_work():
                break
        self.assert_complete(requests, found)
        assert num_out, "nothing was swapped"
        assert num_in, "nothing came back"
        executor.close()
