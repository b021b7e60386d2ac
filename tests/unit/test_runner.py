"""ModelRunner and LocalExecutor: device and dtype, KV memory, ids in flight, and what a failed step leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.batch import ModelBatch, SamplerOutput, SamplingMetadata
from core.errors import ConfigError
from core.model import runner as runner_module
from core.model.interface import AttentionSpec, ExecutorContext
from core.model.local_executor import LocalExecutor
from core.model.model_settings import LocalExecutorSettings
from core.model.runner import ModelRunner, resolve_device, resolve_dtype
from core.model.spec import ModelFiles, ModelSpec
from core.testing.batches import Share, batch_of
from plugins.attention.settings import TorchSdpaSettings
from plugins.attention.torch_sdpa import TorchSdpa
from plugins.quant.none import Dense
from plugins.quant.settings import DenseSettings

BLOCK, VOCAB = 4, 32
SPECS = (AttentionSpec(0, 2, 1, 8, 1.0), AttentionSpec(1, 2, 2, 8, 1.0))


class NextId:
    """A model whose most probable next id is input id + 1; it keeps the batches it saw."""

    def __init__(self) -> None:
        self.attention_specs = SPECS
        self.seen: list[ModelBatch] = []

    def forward(self, batch: ModelBatch, kv_caches: Sequence[Tensor]) -> Tensor:
        assert len(kv_caches) == len(SPECS)
        self.seen.append(batch)
        if 13 in batch.input_ids.tolist():
            raise ValueError("unlucky")
        return torch.nn.functional.one_hot(batch.input_ids[batch.logits_indices] + 1, VOCAB).float()


class Argmax:
    """Greedy; the id 20 counts as a failed draw."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        ids = logits[list(metadata.sampled_rows)].argmax(-1).tolist()
        drawn = {row.request_id: (token,) for row, token in zip(metadata.rows, ids, strict=True)}
        failed = {request: "bad row" for request, (token,) in drawn.items() if token == 20}
        return SamplerOutput({r: t for r, t in drawn.items() if r not in failed}, errors=failed)

    def forget(self, request_ids: Sequence[str]) -> None:
        self.forgotten.extend(request_ids)


def context(model: NextId, sampler: Argmax, **changes: Any) -> ExecutorContext:
    values: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": BLOCK} | changes
    return ExecutorContext(
        spec=ModelSpec("x", ModelFiles("hf", Path(), "x"), {}, VOCAB, 64, frozenset()),
        build_model=lambda model_context: model,
        build_attention=lambda attention_context: TorchSdpa(TorchSdpaSettings(), attention_context),
        build_quant=lambda quant_context: Dense(DenseSettings(), quant_context),
        build_sampler=lambda device: sampler,
        max_num_scheduled_tokens=64,
        max_num_running_reqs=4,
        progress=lambda what, done, total: None,
        **values,
    )


@pytest.fixture
def model() -> NextId:
    return NextId()


@pytest.fixture
def sampler() -> Argmax:
    return Argmax()


@pytest.fixture
def executor(model: NextId, sampler: Argmax) -> LocalExecutor:
    executor = LocalExecutor(LocalExecutorSettings(), context(model, sampler))
    executor.allocate(8)
    return executor


def prefill(request: str, ids: list[int], block: int) -> Share:
    return Share(request, ids, 0, len(ids), [block])


def in_flight(shares: list[Share]) -> ModelBatch:
    """A decode batch planned before the ids of the last step were known."""
    batch = batch_of(shares, BLOCK)
    sources = {index: share.request_id for index, share in enumerate(shares)}
    return replace(batch, input_ids=torch.full_like(batch.input_ids, -1), token_sources=sources)


def test_a_step_returns_ids_and_times(executor: LocalExecutor) -> None:
    step = executor.submit(batch_of([prefill("a", [1, 2, 3], 0), prefill("b", [7], 1)], BLOCK)).result()
    assert step.sampled.token_ids == {"a": (4,), "b": (8,)}
    assert step.forward_s > 0 and step.sample_s > 0


def test_ids_in_flight_come_from_the_last_step(executor: LocalExecutor, model: NextId) -> None:
    executor.submit(batch_of([prefill("a", [1, 2, 3], 0), prefill("b", [7], 1)], BLOCK))
    batch = in_flight([Share("b", [0] * 2, 1, 1, [1]), Share("a", [0] * 4, 3, 1, [0])])
    assert executor.submit(batch).result().sampled.token_ids == {"b": (9,), "a": (5,)}
    assert model.seen[-1].input_ids.tolist() == [8, 4]
    assert batch.input_ids.tolist() == [-1, -1], "the caller's batch is left as it was"


def test_a_failed_draw_does_not_stop_the_others_in_flight(executor: LocalExecutor) -> None:
    first = executor.submit(batch_of([prefill("a", [19], 0), prefill("b", [7], 1)], BLOCK)).result()
    assert first.sampled.errors == {"a": "bad row"}
    batch = in_flight([Share("a", [0] * 2, 1, 1, [0]), Share("b", [0] * 2, 1, 1, [1])])
    assert executor.submit(batch).result().sampled.token_ids["b"] == (9,)


def test_an_id_that_nobody_sampled_is_an_error(executor: LocalExecutor) -> None:
    submission = executor.submit(in_flight([Share("ghost", [0] * 2, 1, 1, [0])]))
    with pytest.raises(RuntimeError, match="ghost"):
        submission.result()


def test_what_the_step_raised_comes_out_of_result_and_the_next_step_runs(executor: LocalExecutor) -> None:
    submission = executor.submit(batch_of([prefill("a", [13], 0)], BLOCK))
    with pytest.raises(ValueError, match="unlucky"):
        submission.result()
    assert executor.submit(batch_of([prefill("a", [3], 0)], BLOCK)).result().sampled.token_ids == {"a": (4,)}


def test_forget_drops_ids_and_sampler_state(executor: LocalExecutor, sampler: Argmax) -> None:
    executor.submit(batch_of([prefill("a", [1], 0)], BLOCK))
    executor.forget(["a", "unknown"])
    assert sampler.forgotten == ["a", "unknown"]
    with pytest.raises(RuntimeError, match="no sampled token yet"):
        executor.submit(in_flight([Share("a", [0] * 2, 1, 1, [0])])).result()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_per_block_cover_all_layers(dtype: str, size: int, model: NextId, sampler: Argmax) -> None:
    runner = ModelRunner(context(model, sampler, dtype=dtype))
    assert runner.kv_bytes_per_block() == BLOCK * 2 * (1 + 2) * 8 * size


def test_kv_that_does_not_fit_is_refused_with_numbers(executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "free_host_memory", lambda: 50 * 2**20)
    with pytest.raises(ConfigError, match="100000 blocks need 73 MiB, but 50 MiB of memory is free"):
        executor.allocate(100_000)


def test_an_allocation_that_fails_is_refused_the_same_way(
    executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "free_host_memory", lambda: None)
    with pytest.raises(ConfigError, match="an unknown amount of memory is free"):
        executor.allocate(2**45)


def test_the_executor_says_where_it_runs_and_what_is_free(executor: LocalExecutor) -> None:
    assert (executor.device, executor.dtype) == ("cpu", "float32")
    free = executor.free_memory()
    assert free is not None and free > 0


def test_unknown_dtype_and_missing_device_are_named() -> None:
    with pytest.raises(ConfigError, match="model.dtype=int4: choose one of: auto, float32"):
        resolve_dtype("int4", torch.device("cpu"))
    with pytest.raises(ConfigError, match="model.device=cuda:99"):
        resolve_device("cuda:99")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True}, torch.float32),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_auto_dtype_follows_the_cpu(
    capabilities: dict[str, bool], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_dtype("auto", torch.device("cpu")) == expected


def test_threads_are_set_when_asked(model: NextId, sampler: Argmax) -> None:
    before = torch.get_num_threads()
    try:
        LocalExecutor(LocalExecutorSettings(num_threads=1), context(model, sampler))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_close_releases_the_cache(executor: LocalExecutor) -> None:
    executor.close()
    with pytest.raises(AssertionError):
        executor.submit(batch_of([prefill("a", [1], 0)], BLOCK)).result()
