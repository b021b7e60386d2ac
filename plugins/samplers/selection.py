"""Logits that are masked and penalised -> one token id per row: greedy rows here, random ones by `triton_draw` on a GPU that has
Triton, else by `host_draw`, which give the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch

from core.batch import SampledRow
from plugins.samplers.blocks import Blocks
from plugins.samplers.candidates import first_maximum
from plugins.samplers.columns import Columns
from plugins.samplers.draw import Ints, Streams
from plugins.samplers.host_draw import HostDraw, RandomRows
from plugins.samplers.verify import NO_TOKEN, take_rows

if TYPE_CHECKING:
    from plugins.samplers.triton_draw import TritonDraw

Draw = Callable[[Ints], Ints]  # row indices -> their token ids


class Selection:
    def __init__(self, first_candidates: int, chunk_floats: int, device: str):
        """`first_candidates` are tried first for a small top-p; `chunk_floats` bounds one temporary on the host."""
        self._chunk_floats = chunk_floats
        self._host = HostDraw(first_candidates)
        self._kernel = _kernel() if device.startswith("cuda") and find_spec("triton") is not None else None

    def select(
        self,
        logits: torch.Tensor,
        maxima: torch.Tensor,
        rows: Sequence[SampledRow],
        columns: Columns,
        bad: Collection[int],
    ) -> list[int]:
        """Ids [S]; NO_TOKEN for the rows in `bad`. `logits` [S, V] are only read; `maxima` are those of their blocks."""
        token_ids = np.full(len(rows), NO_TOKEN, dtype=np.int64)
        if len(columns.greedy):
            best = first_maximum(take_rows(logits, columns.greedy), take_rows(maxima, columns.greedy))
            token_ids[columns.greedy] = best.cpu().numpy()
        if len(columns.greedy) < len(rows):
            draws = self._on_host if self._kernel is None else partial(_on_device, self._kernel)
            for which, draw in draws(logits, maxima, columns, Streams.of_rows(rows)):
                good = which[~np.isin(which, list(bad))] if bad else which
                if len(good):
                    token_ids[good] = draw(good)
        token_ids[list(bad)] = NO_TOKEN
        ids: list[int] = token_ids.tolist()
        return ids

    def _on_host(
        self, logits: torch.Tensor, maxima: torch.Tensor, columns: Columns, streams: Streams
    ) -> Iterator[tuple[Ints, Draw]]:
        logits = logits.cpu()
        rows = RandomRows(logits, Blocks.of(logits, maxima), columns.limits, streams)
        for which, draw in (columns.weighed, self._host.weighed), (columns.ranked, self._host.ranked):
            yield which, partial(_in_parts, partial(draw, rows), max(1, self._chunk_floats // logits.shape[1]))


def _kernel() -> TritonDraw:
    from plugins.samplers.triton_draw import TritonDraw

    return TritonDraw()


def _on_device(
    kernel: TritonDraw, logits: torch.Tensor, maxima: torch.Tensor, columns: Columns, streams: Streams
) -> Iterator[tuple[Ints, Draw]]:
    which = np.union1d(columns.weighed, columns.ranked)
    yield which, partial(kernel.draw, logits, columns.limits, streams)


def _in_parts(draw: Draw, size: int, which: Ints) -> Ints:
    if len(which) <= size:
        return draw(which)
    return np.concatenate([draw(which[start : start + size]) for start in range(0, len(which), size)])
