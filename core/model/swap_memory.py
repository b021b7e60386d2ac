"""Host memory for KV blocks, and the copies between it and the KV pool."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from core.cache.kv_cache import KVCopy
from core.errors import ConfigError

MAX_STAGED = 64  # blocks gathered on the device at a time
MAX_STAGED_ON_CPU = 8  # little enough for one thread: a barrier of many takes longer than the copy
MEASURED_BLOCKS = 16


class ChecksumError(RuntimeError):
    """KV that came back from host memory is not what went out."""


class SwapMemory:
    """`num_blocks` rows, one for each host block, with its KV of all layers one after the other.

    On CUDA the memory is pinned and copies are only enqueued, on the stream of the forward passes: a later step finds them
    done. Each layer's blocks are gathered or scattered by one index operation, and between them lies one copy for each run of
    neighbouring host blocks. Needs KV tensors whose first axis is made of blocks (`attention.blocks_first`).
    """

    def __init__(self, kv_caches: Sequence[Tensor], num_device_blocks: int, num_blocks: int, checksums: bool = False):
        blocks = [cache.view(num_device_blocks, -1).view(torch.uint8) for cache in kv_caches]
        unit = _widest(block.shape[1] for block in blocks)  # bytes one by one would take several times as long
        self._layers = [block.view(unit) for block in blocks]  # [num_device_blocks, a block's units], views of the pool
        self._device = self._layers[0].device
        self._is_cuda = self._device.type == "cuda"
        self._max_staged = MAX_STAGED if self._is_cuda else MAX_STAGED_ON_CPU
        self._checksums: dict[int, int] | None = {} if checksums else None  # by host block
        widths = [layer.shape[1] for layer in self._layers]
        try:
            self.rows = torch.empty((num_blocks, sum(widths)), dtype=unit, pin_memory=self._is_cuda)
        except (RuntimeError, MemoryError) as error:
            raise swap_does_not_fit(num_blocks, num_blocks * sum(widths) * unit.itemsize, None) from error
        self._parts = torch.split(self.rows, widths, 1)  # of each layer

    @torch.inference_mode()
    def run(self, copies: Sequence[KVCopy]) -> None:
        """In their order. Raises ChecksumError."""
        for copy in copies:
            move = self._out if copy.direction == "out" else self._in
            for start in range(0, len(copy.host_blocks), self._max_staged):
                end = start + self._max_staged
                move(list(copy.device_blocks[start:end]), list(copy.host_blocks[start:end]))

    def measure(self) -> float:
        """Seconds per block and direction. Writes over the first blocks of both memories."""
        count = min(MEASURED_BLOCKS, len(self.rows), len(self._layers[0]))
        blocks = tuple(range(count))
        copies = (KVCopy("out", blocks, blocks), KVCopy("in", blocks, blocks))
        seconds = []
        for _ in range(3):  # the first one touches the memory
            started = time.perf_counter()
            self.run(copies)
            if self._is_cuda:
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:]) / (2 * count)

    def _out(self, device: list[int], host: list[int]) -> None:
        if self._is_cuda:
            staged = self._gathered(device)
            for first, count, row in _runs(host):
                self.rows[row : row + count].copy_(staged[first : first + count], non_blocking=True)
        else:
            sources, targets = torch.tensor(device), torch.tensor(host)
            for layer, part in zip(self._layers, self._parts, strict=True):
                part.index_copy_(0, targets, layer.index_select(0, sources))
        if self._checksums is not None:
            self._checksums.update(zip(host, _checksums(self._gathered(device)), strict=True))

    def _in(self, device: list[int], host: list[int]) -> None:
        targets = torch.tensor(device, device=self._device)
        for layer, part in zip(self._layers, self._fetched(host), strict=True):
            layer.index_copy_(0, targets, part)
        if self._checksums is not None:
            self._compare(host, _checksums(self._gathered(device)), self._checksums)

    def _gathered(self, device: list[int]) -> Tensor:
        """Device blocks over all layers, as rows on the device."""
        indices = torch.tensor(device, device=self._device)
        return torch.cat([layer.index_select(0, indices) for layer in self._layers], 1)

    def _fetched(self, host: list[int]) -> Iterator[Tensor]:
        """Host blocks on the device, layer by layer."""
        if not self._is_cuda:
            sources = torch.tensor(host)
            yield from (part.index_select(0, sources) for part in self._parts)
            return
        staged = torch.empty((len(host), self.rows.shape[1]), dtype=self.rows.dtype, device=self._device)
        for first, count, row in _runs(host):
            staged[first : first + count].copy_(self.rows[row : row + count], non_blocking=True)
        yield from torch.split(staged, [part.shape[1] for part in self._parts], 1)

    def _compare(self, host: list[int], found: list[int], known: dict[int, int]) -> None:
        for block, checksum in zip(host, found, strict=True):
            if known.get(block) != checksum:
                wanted = f"{known[block]:08x}" if block in known else "never written"
                raise ChecksumError(
                    f"KV of host block {block} came back with the checksum {checksum:08x}, and went out with {wanted}"
                )


def swap_does_not_fit(num_blocks: int, needed: int, free: int | None) -> ConfigError:
    known = "an unknown amount" if free is None else f"{free / 2**20:.0f} MiB"
    return ConfigError(
        f"swapped KV: {num_blocks} blocks need {needed / 2**20:.0f} MiB, but {known} of host memory is free; "
        "lower cache.swap_memory or cache.num_swap_blocks"
    )


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring rows as (index of the first, how many, the first)."""
    first = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index] != rows[index - 1] + 1:
            yield first, index - first, rows[first]
            first = index


def _widest(sizes: Iterable[int]) -> torch.dtype:
    """The largest integer type that all sizes, in bytes, are multiples of."""
    found = list(sizes)
    units = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(unit for unit in units if not any(size % unit.itemsize for size in found))


def _checksums(rows: Tensor) -> list[int]:
    return [zlib.crc32(row.numpy()) for row in rows.cpu()]
