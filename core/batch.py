"""Records between the stages of one step. Frozen; shapes stand beside the fields.

Letters: N scheduled requests, T scheduled tokens, R logits rows, S sampled rows, V vocabulary, B blocks per table row.
Rows of logits are not requests: speculation and prompt logprobs give a request several rows in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from core.request import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    import torch


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):  # made for each request of each step, like SampledRow
    """One request's share of a step: positions [start, start + num_tokens) of its sequence."""

    request: Request
    start: int  # num_computed_tokens when the step was planned
    num_tokens: int  # num_scheduled_tokens
    num_drafts: int = 0  # of those, draft tokens at the end that the sampler verifies
    samples: bool = True  # the last scheduled position is the last known one, so this step samples a token


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What the scheduler decided: policy on one side, tensors on the other."""

    step: int
    scheduled: tuple[ScheduledRequest, ...] = ()
    preempted: tuple[Request, ...] = ()
    refused: tuple[Request, ...] = ()  # ended by the scheduler itself: can never run, or expired

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(part.num_tokens for part in self.scheduled)

    @property
    def is_empty(self) -> bool:
        return not self.scheduled


class SampledRow(msgspec.Struct, frozen=True):  # made for each row of each step: a frozen dataclass takes 1 µs more
    """Who a sampled logits row belongs to, and what its draw may depend on.

    `position` is the index of the token drawn within the output (0 for the first). A draw depends only on
    (seed, choice, position), the row's logits and its own history: never on batch mates.
    """

    request_id: str
    params: SamplingParams
    seed: int
    choice: int
    position: int
    prompt_token_ids: list[int]  # [num_prompt_tokens], shared with the request, not to be changed
    output_token_ids: list[int]  # [num_output_tokens], likewise; shorter than `position` while ids are in flight
    draft_token_ids: tuple[int, ...] = ()  # drafts before this row, when it verifies speculation


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logits rows wanted only for prompt logprobs: row k predicts `target_ids[k]`."""

    request_id: str
    rows: tuple[int, ...]  # indices into the R rows
    target_ids: tuple[int, ...]  # the prompt token that each row predicts
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What stage 7 needs beside the logits."""

    sampled_rows: tuple[int, ...]  # [S] indices into the R rows
    rows: tuple[SampledRow, ...]  # [S] aligned with sampled_rows
    prompt_rows: tuple[PromptRows, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """One step's work as tensors: prefill chunks and decodes in one flat token axis. Integer tensors are on the CPU."""

    step: int
    input_ids: torch.Tensor  # [T] int64; -1 where the id is still in flight (see `token_sources`)
    positions: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [N+1] int32, cumulative scheduled tokens
    seq_lens: torch.Tensor  # [N] int32, computed tokens after this step
    block_table: torch.Tensor  # [N, B] int32, block ids; unused entries are -1
    slot_mapping: torch.Tensor  # [T] int64, block_id * block_size + offset
    logits_indices: torch.Tensor  # [R] int64, positions in the T axis whose logits are wanted
    sampling: SamplingMetadata
    request_ids: tuple[str, ...]  # [N]
    num_prefill_tokens: int = 0  # tokens that belong to requests still in their prompt
    # T index -> request id whose last sampled token (in flight) is the input; empty when nothing is in flight
    token_sources: Mapping[int, str] = field(default_factory=dict)
    # Where layers are in G groups (`core.model.layer_groups`), the two tensors above are those of the first group, and these
    # of the others; entries of blocks that have left a group's window are -1. Attention backends are shown one group at a time.
    group_block_tables: torch.Tensor | None = None  # [G - 1, N, B] int32
    group_slot_mappings: torch.Tensor | None = None  # [G - 1, T] int64

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log-probabilities at one position: the token itself, then its alternatives, best first (finite numbers only)."""

    token_id: int
    logprob: float
    rank: int  # 1 for the most probable token
    top: list[tuple[int, float]] = []


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Stage 7's result, on the host. Keys are request ids; a request may appear in `errors` instead of `token_ids`.

    Each request that samples is in one of the two. Ids are Python ints: numpy's do not cross to the front.
    """

    # 1 id per request; with drafts 1 to 1 + num_drafts accepted ids; then what a grammar forces after them
    token_ids: Mapping[str, tuple[int, ...]]
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # aligned with token_ids
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)  # request id -> what failed for this request alone

    @property
    def parts(self) -> tuple[Mapping[str, Any], ...]:
        """All fields, in order."""
        return self.token_ids, self.logprobs, self.prompt_logprobs, self.errors


class Verdict(msgspec.Struct, frozen=True):  # likewise
    """Stage 9's token-side judgement on one request after a step."""

    token_ids: tuple[int, ...]  # the ids kept; those after an end are cut
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
