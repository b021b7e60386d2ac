"""Model batches from plain numbers, for tests of models, attention backends and executors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from core.batch import ModelBatch, SampledRow, SamplingMetadata
from core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Share:
    """One request's part of a batch: positions [start, start + num_tokens) of the sequence `token_ids`."""

    request_id: str
    token_ids: Sequence[int]
    start: int
    num_tokens: int
    block_table: Sequence[int]
    logits: Literal["last", "all", "none"] = "last"


def batch_of(shares: Sequence[Share], block_size: int, *, table_width: int | None = None, step: int = 0) -> ModelBatch:
    """A batch of `shares` in order; the last row of each share with logits is sampled, greedily.

    `table_width` is the B of the block table [N, B], at least the longest table; unused entries are -1.
    """
    width = max(table_width or 0, *(len(share.block_table) for share in shares))
    table = torch.full((len(shares), width), -1, dtype=torch.int32)
    for row, share in enumerate(shares):
        table[row, : len(share.block_table)] = torch.tensor(share.block_table, dtype=torch.int32)
    positions = [torch.arange(share.start, share.start + share.num_tokens) for share in shares]
    slots = [table[row].long()[p // block_size] * block_size + p % block_size for row, p in enumerate(positions)]
    counts = torch.tensor([0, *(share.num_tokens for share in shares)])
    starts = counts.cumsum(0)
    indices, sampled = _logits_rows(shares, starts.tolist())
    return ModelBatch(
        step=step,
        input_ids=torch.tensor([i for s in shares for i in s.token_ids[s.start : s.start + s.num_tokens]]),
        positions=torch.cat(positions),
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor([share.start + share.num_tokens for share in shares], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(slots),
        logits_indices=torch.tensor(indices, dtype=torch.int64),
        sampling=_greedy([share for share in shares if share.logits != "none"], sampled),
        request_ids=tuple(share.request_id for share in shares),
    )


def _logits_rows(shares: Sequence[Share], starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """(positions in the T axis with logits, index among them of each share's last one)."""
    indices: list[int] = []
    sampled: list[int] = []
    for share, first in zip(shares, starts, strict=False):
        if share.logits != "none":
            last = first + share.num_tokens
            indices.extend(range(first if share.logits == "all" else last - 1, last))
            sampled.append(len(indices) - 1)
    return indices, sampled


def _greedy(shares: Sequence[Share], rows: Sequence[int]) -> SamplingMetadata:
    params = SamplingParams(temperature=0.0)
    return SamplingMetadata(
        sampled_rows=tuple(rows),
        rows=tuple(
            SampledRow(share.request_id, params, 0, 0, 0, prompt_token_ids=list(share.token_ids), output_token_ids=[])
            for share in shares
        ),
    )
