"""Steps of the CPU runtime that are begun before they are asked for."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.cpu import library
from plugins.cpu.library import NoNativeCodeError, load
from plugins.cpu.packing import pack
from plugins.cpu.program import Norm, OpList, Program, pointers
from plugins.cpu.records import Format, StepRecord

WIDTH, VOCAB = 32, 512
SAME = {5: 5 + VOCAB // 2, 7: 7 + VOCAB // 2}  # rows of the head that are equal, in the shares of two threads


def head() -> Tensor:
    """Row i is largest for itself, and so is its equal."""
    weight = torch.nn.functional.normalize(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1)))
    for low, high in SAME.items():
        weight[high] = weight[low]
    return weight.contiguous()


@dataclass
class Steps:
    """A program of an embedding and a head: each token's best successor is itself, or its equal of the lower id."""

    num_threads: int
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        ops = OpList()
        x, rows = ops.floats(WIDTH), ops.rows(WIDTH, Format.FLOAT32)
        matrix = ops.matrix(pack(head(), None, Format.FLOAT32))
        ops.embed_tied(matrix, 1.0, x)
        ops.logits(x, Norm(torch.ones(WIDTH), 1e-6), rows, matrix, None)
        self.program = Program(load(), self.num_threads, ops, Format.FLOAT32)

    def run(self, ids: list[int], position: int, most_ahead: int = 8) -> list[int]:
        count, block = len(ids), 16
        best, peaks = torch.full((count,), -1), torch.empty(count)
        given = torch.tensor(ids)
        positions, starts = torch.full((count,), position), torch.arange(count + 1, dtype=torch.int32)
        table = torch.arange(count * 4, dtype=torch.int32).view(count, 4)
        slots = table[:, position // block].long() * block + position % block
        wanted, tables, slot_rows = torch.arange(count), pointers([table]), pointers([slots])
        caches = (ctypes.c_void_p * 1)(0)
        self.program.run(
            StepRecord(
                num_tokens=count,
                num_requests=count,
                num_logits=count,
                num_columns=4,
                token_ids=given.data_ptr(),
                positions=positions.data_ptr(),
                query_start=starts.data_ptr(),
                tables=ctypes.cast(tables, ctypes.POINTER(ctypes.c_void_p)),
                slots=ctypes.cast(slot_rows, ctypes.POINTER(ctypes.c_void_p)),
                wanted=wanted.data_ptr(),
                caches=ctypes.cast(caches, ctypes.POINTER(ctypes.c_void_p)),
                best=best.data_ptr(),
                peaks=peaks.data_ptr(),
                block_size=block,
                most_ahead=most_ahead,
            )
        )
        return best.tolist()

    @property
    def counts(self) -> tuple[int, int]:
        return self.program.ahead.begun, self.program.ahead.used


def test_the_lowest_of_equal_logits_wins_whoever_computes_the_step() -> None:
    steps = Steps(2)
    assert steps.run([5, 7, 9], 0) == [5, 7, 9]
    time.sleep(0.05)  # the other thread has the whole step by now, and begins with the upper half
    assert steps.run([5, 7, 9], 1) == [5, 7, 9]
    assert steps.counts == (2, 1)
    assert [Steps(num).run([5 + VOCAB // 2, 7], 0) for num in (1, 2, 3)] == [[5, 7]] * 3


def test_what_was_begun_is_used_or_dropped() -> None:
    steps = Steps(2)
    ways: list[tuple[list[int], int, bool]] = [
        ([5, 9], 0, False),
        ([5, 9], 1, True),
        ([5, 11], 2, False),  # another token than the best
        ([5, 11], 4, False),  # another position
        ([5], 5, False),  # one has ended
        ([5, 9, 200], 6, False),  # others came
        ([5, 9, 200], 7, True),
    ]
    for number, (ids, position, is_used) in enumerate(ways):
        before = steps.counts[1]
        assert steps.run(ids, position) == ids
        assert (steps.counts[1] > before) == is_used, number
    assert steps.run([5], 63) == [5] and steps.run([5], 64 - 16) == [5]


@pytest.mark.parametrize("num_threads, most_ahead", [(1, 8), (2, 0), (2, 1)])
def test_nothing_is_begun_without_a_thread_for_it_or_for_too_many(num_threads: int, most_ahead: int) -> None:
    steps = Steps(num_threads)
    assert [steps.run([5, 9], position, most_ahead) for position in range(4)] == [[5, 9]] * 4
    assert steps.counts == (0, 0)


def test_nothing_is_begun_behind_the_end_of_a_block_table() -> None:
    steps = Steps(2)
    assert steps.run([5], 63) == [5]
    assert steps.counts == (0, 0)


def test_programs_share_a_team() -> None:
    first, second = Steps(2), Steps(2)
    assert first.run([5], 0) == [5]
    assert second.run([9, 11], 0) == [9, 11]  # in place of what the first had begun
    assert first.run([5], 1) == [5] and first.counts == (2, 0)
    second.program.settle()
    second.program.settle()
    assert second.run([9, 11], 1) == [9, 11]


def test_programs_of_two_threads_take_turns() -> None:
    wrong: list[object] = []

    def work(tokens: list[int]) -> None:
        steps = Steps(2)
        wrong.extend(found for position in range(400) if (found := steps.run(tokens, position % 60)) != tokens)

    threads = [threading.Thread(target=work, args=(tokens,)) for tokens in ([5], [9, 11], [7, 200, 300])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_program_that_goes_with_a_step_begun_leaves_the_team_to_others() -> None:
    for _ in range(20):
        assert Steps(2).run([5], 0) == [5]


def test_a_cache_folder_that_cannot_be_written_is_no_end(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("cache") / "file"
    place.write_text("")
    monkeypatch.setattr(library, "default_cache_dir", lambda: place)
    with pytest.raises(NoNativeCodeError, match="cannot be kept"):
        library._kept("portable")
