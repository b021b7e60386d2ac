"""Token counts kept from step to step equal counts made anew, and only rows with penalties change."""

from __future__ import annotations

import numpy as np
import torch

from core.request import SamplingParams
from core.testing.sampler import make_logits, make_row
from core.testing.sampler_reference import ReferenceSampler, spec_of
from plugins.samplers.penalties import Penalties, TokenCounts, has_penalties

V = 60
ALL = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4)


def slow(logits: torch.Tensor, row: object) -> torch.Tensor:
    return torch.from_numpy(ReferenceSampler(spec_of(V)).edited(logits.numpy(), row))  # type: ignore[arg-type]


def as_dict(counts: TokenCounts) -> dict[int, float]:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


def test_counts_grow_by_the_step() -> None:
    counts = TokenCounts([4, 4, 9], V)
    assert as_dict(counts) == {4: 0.0, 9: 0.0}
    ids = [*range(40), 4, 4]
    for token_id in ids:
        counts.extend([token_id])
    assert as_dict(counts) == {i: float(ids.count(i)) for i in {*ids, 4, 9}}
    assert counts.num_output_tokens == 42


def test_drafts_count_for_later_rows_and_leave_no_trace() -> None:
    counts = TokenCounts([1], V)
    counts.extend([2])
    before = as_dict(counts)
    assert as_dict(counts.with_drafts((2, 30))) == {1: 0.0, 2: 2.0, 30: 1.0}
    assert as_dict(counts) == before


def test_apply_equals_the_slow_twin_over_a_growing_output() -> None:
    penalties, output = Penalties(V), list[int]()
    rng = np.random.default_rng(0)
    for step in range(30):
        logits = make_logits(3, V, seed=step)
        rows = [
            make_row("a", ALL, output_token_ids=list(output)),
            make_row("plain"),
            make_row("b", ALL, prompt_token_ids=[7]),
        ]
        wanted = [slow(values, row) for values, row in zip(logits, rows, strict=True)]
        penalties.apply(logits, rows, [0, 2])
        assert all(torch.equal(values, want) for values, want in zip(logits, wanted, strict=True))
        output += rng.integers(0, V, 1 + step % 2).tolist()


def test_counts_are_rebuilt_for_another_history() -> None:
    """Preemption, resumption, a request id used again, ids taken back."""
    penalties = Penalties(V)
    histories = [([1, 2], [5, 6, 7]), ([1, 2], [5]), ([1, 2], [5, 8, 7]), ([1], [5, 8, 7]), ([1], [5, 8, 9])]
    for prompt, output in histories:
        row = make_row("a", ALL, prompt_token_ids=prompt, output_token_ids=output)
        counts = penalties.counts_of(row)
        assert as_dict(counts) == {i: float(output.count(i)) for i in (*prompt, *output)}


def test_forget_drops_the_state_and_changes_no_result() -> None:
    penalties = Penalties(V)
    row = make_row("a", ALL)
    first, second = make_logits(1, V), make_logits(1, V)
    penalties.apply(first, [row], [0])
    assert len(penalties) == 1
    penalties.forget(["a", "unknown"])
    assert len(penalties) == 0
    penalties.apply(second, [row], [0])
    assert torch.equal(first, second)


def test_nothing_known_changes_nothing() -> None:
    logits = make_logits(1, V)
    row = make_row("a", ALL, prompt_token_ids=[], output_token_ids=[])
    wanted = logits.clone()
    Penalties(V).apply(logits, [row], [0])
    assert torch.equal(logits, wanted)


def test_ids_in_flight_are_not_counted_yet() -> None:
    penalties = Penalties(V)
    early = make_row("a", ALL, output_token_ids=[5], position=2)
    assert as_dict(penalties.counts_of(early))[5] == 1.0
    late = make_row("a", ALL, output_token_ids=[5, 5, 6], position=3)
    counts = as_dict(penalties.counts_of(late))
    assert (counts[5], counts[6]) == (2.0, 1.0)


def test_masked_tokens_stay_masked() -> None:
    logits = make_logits(1, V)
    logits[0, 5] = float("-inf")
    Penalties(V).apply(logits, [make_row("a", ALL)], [0])
    assert logits[0, 5] == float("-inf")
    assert not logits.isnan().any()


def test_has_penalties() -> None:
    assert not has_penalties(SamplingParams())
    assert has_penalties(SamplingParams(repetition_penalty=0.9))
    assert has_penalties(SamplingParams(frequency_penalty=-1.0))
    assert has_penalties(SamplingParams(presence_penalty=0.1))
