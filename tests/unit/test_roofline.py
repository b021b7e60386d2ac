"""What a step must at least take, and a run's share of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from core.lab.bench.limits import limits
from core.lab.bench.report import summary
from core.model import ceilings
from core.model.arch import read_architecture
from core.model.roofline import Roofline
from core.outputs import StepStats

# 100 bytes/s and 1000 operations/s: a step reads 50 bytes, and a byte for each token before it
ROOFLINE = Roofline(
    weight_bytes=50.0,
    linear_operations_per_token=80.0,
    head_operations_per_row=20.0,
    kv_bytes_per_context_token=1.0,
    bytes_per_s=100.0,
    operations_per_s=1000.0,
)


def step(num_requests: int, num_tokens: int, num_prefill: int, seconds: float) -> StepStats:
    return StepStats(
        num_requests=num_requests,
        num_scheduled_tokens=num_tokens,
        num_prefill_tokens=num_prefill,
        forward_s=seconds * 0.75,
        between_s=seconds * 0.25,
    )


REPORT: dict[str, Any] = {"prompt_tokens": 60, "output_tokens": 80, "num_requests": 2}  # 30 + 40 / 2 tokens of context


def test_a_step_takes_the_longer_of_moving_and_computing() -> None:
    assert ROOFLINE.step_bytes(10) == 60 and ROOFLINE.step_operations(10, 2) == 840
    assert ROOFLINE.least_s(1, 1, 0) == 0.5  # 50 of 100 bytes/s; 100 of 1000 operations/s
    assert ROOFLINE.least_s(100, 1, 0) == 8.02
    assert ROOFLINE.least_s(1, 1, 1000) == 10.5


def test_shares_of_both_limits() -> None:
    steps = [step(1, 20, 20, 4.0), step(1, 1, 0, 2.0), step(1, 1, 0, 2.0)]
    found = limits(ROOFLINE, steps, REPORT)
    assert found["decode"] == {"achieved_per_s": 50.0, "ceiling_per_s": 100.0, "share": 0.5}
    assert found["prefill"] == {"achieved_per_s": 1620 / 4, "ceiling_per_s": 1000.0, "share": pytest.approx(0.405)}
    assert found["steps_share"] == pytest.approx((1.62 + 1.0 + 1.0) / 8)
    assert found["text"].startswith("decode 50% of memory bandwidth (0.0 GB/s of 0.0), prefill 40% of arithmetic")
    assert "limits" in summary({"headline": {}, "roofline": found, **REPORT})
    json.dumps(found)


def test_a_run_without_a_step_of_a_kind_tells_no_share_of_it() -> None:
    found = limits(ROOFLINE, [step(4, 4, 0, 5.0)], REPORT)
    assert found["prefill"] == {} and "prefill" not in found["text"]
    assert found["decode"]["share"] == pytest.approx((50 + 4 * 50) / 5 / 100)
    assert limits(ROOFLINE, [], REPORT)["steps_share"] == 0.0


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 330,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def test_the_torch_layers_count_their_weights_and_measure_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "READ_BYTES", 2**16)
    monkeypatch.setattr(ceilings, "SIDE", 32)
    found = ceilings.roofline_of(read_architecture(CONFIG), torch.bfloat16, torch.device("cpu"))
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96  # q, k and v, out, and the three of the MLP
    assert found.weight_bytes == 2 * (2 * layer + 330 * 64)
    assert (found.linear_operations_per_token, found.head_operations_per_row) == (2 * 2 * layer, 2 * 330 * 64)
    assert found.kv_bytes_per_context_token == 2 * 2 * (2 * 16) * 2
    assert found.bytes_per_s > 0 and found.operations_per_s > 0


def test_little_free_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "free_host_memory", lambda: 4000)
    assert ceilings.readable_bytes(torch.device("cpu")) == 1000
    monkeypatch.setattr(ceilings, "free_host_memory", lambda: None)
    assert ceilings.readable_bytes(torch.device("cpu")) == 2**30
