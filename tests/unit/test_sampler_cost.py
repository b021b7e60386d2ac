"""What the samplers cost: the table's rows, and that both samplers do what is measured."""

from __future__ import annotations

import torch

from core.lab import sampler_cost as lab
from core.testing.sampler import make_logits, metadata_of
from core.testing.tiny_models import make_tiny_model


def test_every_case_is_measured_with_each_number_of_threads() -> None:
    threads = torch.get_num_threads()
    found = lab.measure("small", make_logits(4, 500), num_threads=1, num_rounds=1)
    assert [cost.case for cost in found] == list(lab.CASES)
    assert all(cost.sampler_ms > 0 and cost.argmax_ms > 0 and cost.ratio > 0 for cost in found)
    assert "small    greedy" in str(found[0]) and torch.get_num_threads() == threads


def test_the_samplers_that_are_measured_draw() -> None:
    logits = make_logits(4, 500)
    for case, asked in lab.CASES.items():
        name = "greedy" if case == "greedy" else "standard"
        found = lab.sampler(name, 500).sample(logits.clone(), metadata_of(lab._rows(asked, 4)))
        assert len(found.token_ids) == 4 and not found.errors
        if name == "greedy":
            assert [ids[0] for ids in found.token_ids.values()] == logits.argmax(-1).tolist()


def test_rows_of_a_model_are_of_one_step_in_the_midst_of_replies(tmp_path) -> None:
    found = lab.model_logits([f"model.source={make_tiny_model(tmp_path / 'tiny')}"])
    assert found.shape[0] == lab.NUM_ROWS and found.dtype == torch.float32
    assert len({tuple(row.tolist()) for row in found}) > lab.NUM_ROWS // 2
