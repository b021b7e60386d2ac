"""Rows and logits for tests of samplers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.batch import PromptRows, SampledRow, SamplingMetadata
from core.request import SamplingParams

VOCAB = 301  # not a multiple of any block size
EOS = frozenset({7, 11})
UNUSABLE = frozenset({298, 299, 300})
GREEDY = SamplingParams(temperature=0.0)


def make_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3.0


def make_row(name: str, params: SamplingParams = GREEDY, **fields: object) -> SampledRow:
    values: dict[str, object] = {
        "seed": 1,
        "choice": 0,
        "position": 4,
        "prompt_token_ids": [1, 2, 3, 200],
        "output_token_ids": [5, 5, 9, 2],
        **fields,
    }
    return SampledRow(request_id=name, params=params, **values)  # type: ignore[arg-type]


def metadata_of(rows: Sequence[SampledRow], prompt_rows: Sequence[PromptRows] = ()) -> SamplingMetadata:
    return SamplingMetadata(tuple(range(len(rows))), tuple(rows), tuple(prompt_rows))
