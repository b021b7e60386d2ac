"""What every model must do, as tests::

    class TestMine(ModelContract):
        component = Mine
        family = "qwen3"  # a model type that it can run: a tiny one is made of it, and compared with transformers

A model that runs none of transformers' types names files of its own instead: `folder = Path("tests/tiny")`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from core.batch import ModelBatch
from core.model.describe import ANY_MODEL_TYPE, read_spec
from core.model.interface import AttentionContext, Model, ModelContext, QuantContext
from core.model.optional_model import AheadModel, ArgmaxModel
from core.model.spec import ModelFiles, ModelSpec
from core.progress import no_progress
from core.testing.batches import Share, batch_of
from core.testing.contract import Contract
from core.testing.naive import DenseQuant, NaiveAttention
from core.testing.tiny_models import make_tiny_model

BLOCK_SIZE = 16
NUM_BLOCKS = 16
CPU = torch.device("cpu")
LONG, SHORT = [5, 2, 7, 3], [9, 11]  # block tables of the two requests of these tests


class ModelContract(Contract):
    family: ClassVar[str] = "llama"
    folder: ClassVar[Path | None] = None
    atol: ClassVar[float] = 2e-4  # of logits in float32
    attends: ClassVar[bool] = (
        True  # through its context's attention; else by itself, on the cache that the attention lays out
    )

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
        path = cls.folder or make_tiny_model(tmp_path_factory.mktemp("model"), cls.family)
        kind = "gguf" if path.suffix == ".gguf" else "hf"
        return read_spec(ModelFiles(kind, path, str(path)), known_model_types=ANY_MODEL_TYPE)

    def make_model(self, spec: ModelSpec) -> tuple[Model, NaiveAttention, DenseQuant]:
        attention = NaiveAttention(AttentionContext(CPU, torch.float32, BLOCK_SIZE))
        quant = DenseQuant(QuantContext(CPU, torch.float32))
        with torch.inference_mode():
            model: Model = self.make(ModelContext(spec, CPU, torch.float32, attention, quant, no_progress))
        return model, attention, quant

    def caches(self, model: Model, attention: NaiveAttention) -> list[Tensor]:
        """Full of NaN, so that a read of what was never written shows."""
        shapes = [attention.kv_shape(spec, NUM_BLOCKS) for spec in model.attention_specs]
        return [torch.full(shape, float("nan")) for shape in shapes]

    def forward(self, model: Model, batch: ModelBatch, caches: Sequence[Tensor]) -> Tensor:
        with torch.inference_mode():
            return model.forward(batch, caches)

    def prompt(self, spec: ModelSpec, length: int, seed: int = 2) -> list[int]:
        ids = torch.randint(10, spec.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        return [token_id if token_id not in spec.unusable_token_ids else 10 for token_id in ids]

    def whole(self, spec: ModelSpec, ids: Sequence[int], table: Sequence[int]) -> Tensor:
        """Logits of every position, in one pass."""
        model, attention, _ = self.make_model(spec)
        batch = batch_of([Share("a", ids, 0, len(ids), table, logits="all")], BLOCK_SIZE)
        return self.forward(model, batch, self.caches(model, attention))

    def assert_close(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=self.atol, rtol=1e-3)

    def test_every_layer_is_described_once(self, spec: ModelSpec) -> None:
        specs = self.make_model(spec)[0].attention_specs
        assert [one.layer for one in specs] == list(range(len(specs))), "`layer` numbers the KV caches from 0"
        for one in specs:
            assert one.num_heads % one.num_kv_heads == 0 and min(one.num_kv_heads, one.head_dim) > 0
            assert one.scale > 0 and (one.sliding_window is None or one.sliding_window > 0)

    def test_logits_are_those_of_transformers(self, spec: ModelSpec) -> None:
        if self.folder is not None:
            pytest.skip("files of its own: there is nothing to compare with")
        import transformers

        auto: Any = transformers.AutoModelForCausalLM
        reference = auto.from_pretrained(spec.files.path, attn_implementation="eager", dtype=torch.float32).eval()
        ids = self.prompt(spec, 53)
        with torch.inference_mode():
            expected = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        assert float(expected.std()) > 0.1
        self.assert_close(self.whole(spec, ids, LONG), expected)

    def test_logits_are_float32_of_the_vocabularys_width(self, spec: ModelSpec) -> None:
        logits = self.whole(spec, self.prompt(spec, 9), SHORT)
        assert (logits.dtype, tuple(logits.shape)) == (torch.float32, (9, spec.vocab_size))
        assert bool(torch.isfinite(logits).all())

    def test_rows_are_those_asked_for_in_that_order(self, spec: ModelSpec) -> None:
        model, attention, _ = self.make_model(spec)
        batch = batch_of([Share("a", self.prompt(spec, 21), 0, 21, LONG, logits="all")], BLOCK_SIZE)
        caches = self.caches(model, attention)
        every = self.forward(model, batch, caches)
        for wanted in ([20], [4, 0, 20, 7], [3, 3], []):
            part = replace(batch, logits_indices=torch.tensor(wanted, dtype=torch.int64))
            found = self.forward(model, part, caches)
            assert found.shape == (len(wanted), spec.vocab_size), f"{len(wanted)} rows asked for: {list(found.shape)}"
            self.assert_close(found, every[wanted])

    def test_chunks_and_decodes_give_the_logits_of_one_pass(self, spec: ModelSpec) -> None:
        ids = self.prompt(spec, 40)
        model, attention, _ = self.make_model(spec)
        caches, found, start = self.caches(model, attention), [], 0
        for count in (10, 1, 17, 4, 1, 1, 6):
            batch = batch_of([Share("a", ids, start, count, LONG, logits="all")], BLOCK_SIZE)
            found.append(self.forward(model, batch, caches))
            start += count
        self.assert_close(torch.cat(found), self.whole(spec, ids, LONG))

    def test_a_request_does_not_depend_on_its_batch_mates(self, spec: ModelSpec) -> None:
        """Chunks of one prompt beside decodes of another, in two orders."""
        a, b = self.prompt(spec, 40), self.prompt(spec, 24, seed=3)
        expected = self.whole(spec, a, LONG), self.whole(spec, b, SHORT)
        model, attention, _ = self.make_model(spec)
        caches = self.caches(model, attention)
        first = [Share("a", a, 0, 30, LONG, logits="all"), Share("b", b, 0, 20, SHORT, logits="all")]
        second = [Share("b", b, 20, 4, SHORT, logits="all"), Share("a", a, 30, 10, LONG, logits="all")]
        together = self.forward(model, batch_of(first, BLOCK_SIZE), caches)
        self.assert_close(together, torch.cat([expected[0][:30], expected[1][:20]]))
        together = self.forward(model, batch_of(second, BLOCK_SIZE), caches)
        self.assert_close(together, torch.cat([expected[1][20:], expected[0][30:]]))

    def test_the_largest_logits_alone_are_those_of_forward(self, spec: ModelSpec) -> None:
        model, attention, _ = self.make_model(spec)
        if not isinstance(model, ArgmaxModel):
            pytest.skip("it has no forward_argmax")
        shares = [Share("a", self.prompt(spec, 40), 0, 40, LONG, logits="all"), Share("b", [11, 12], 0, 2, SHORT)]
        batch = batch_of(shares, BLOCK_SIZE)
        logits = self.forward(model, batch, self.caches(model, attention))
        with torch.inference_mode():
            found = model.forward_argmax(batch, self.caches(model, attention))
        assert torch.equal(found.ids, logits.argmax(-1)) and torch.equal(found.peaks, logits.amax(-1))
        none = replace(batch, logits_indices=torch.tensor([], dtype=torch.int64))
        with torch.inference_mode():
            assert not len(model.forward_argmax(none, self.caches(model, attention)).ids)

    def test_a_step_need_not_follow_from_the_largest_logits_before(self, spec: ModelSpec) -> None:
        """A model may begin what it takes for the next step; then another comes, or the same with other company."""
        model, attention, _ = self.make_model(spec)
        if not isinstance(model, ArgmaxModel):
            pytest.skip("it has no forward_argmax")
        a, b = self.prompt(spec, 34), self.prompt(spec, 24, seed=3)
        caches = self.caches(model, attention)
        steps = [
            [Share("a", a, 0, 30, LONG), Share("b", b, 0, 20, SHORT)],
            [Share("a", a, 30, 1, LONG), Share("b", b, 20, 1, SHORT)],
            [Share("a", a, 31, 1, LONG), Share("b", b, 21, 1, SHORT)],  # with tokens that nobody had the model choose
            [Share("b", b, 22, 1, SHORT)],  # one alone
            [Share("a", a, 32, 1, LONG), Share("b", b, 23, 1, SHORT)],
            [Share("a", a, 32, 1, LONG)],  # again
            [Share("a", a, 33, 1, LONG)],
        ]
        expected = {"a": self.whole(spec, a, LONG), "b": self.whole(spec, b, SHORT)}
        for shares in steps:
            with torch.inference_mode():
                peaks = model.forward_argmax(batch_of(shares, BLOCK_SIZE), caches).peaks
            self.assert_close(
                peaks, torch.stack([expected[s.request_id][s.start + s.num_tokens - 1].amax() for s in shares])
            )

    def test_nothing_is_written_once_it_is_settled(self, spec: ModelSpec) -> None:
        model, attention, _ = self.make_model(spec)
        if not isinstance(model, AheadModel):
            pytest.skip("it begins nothing ahead")
        assert isinstance(model, ArgmaxModel)
        caches, ids = self.caches(model, attention), self.prompt(spec, 20)
        for start, count in ((0, 18), (18, 1), (19, 1)):
            with torch.inference_mode():
                model.forward_argmax(batch_of([Share("a", ids, start, count, LONG)], BLOCK_SIZE), caches)
            model.settle()
            before = [cache.view(torch.uint8).clone() for cache in caches]
            time.sleep(0.01)
            assert all(torch.equal(one.view(torch.uint8), kept) for one, kept in zip(caches, before, strict=True))
            model.settle()

    def test_steps_that_follow_from_the_largest_logits(self, spec: ModelSpec) -> None:
        model, attention, _ = self.make_model(spec)
        if not isinstance(model, ArgmaxModel):
            pytest.skip("it has no forward_argmax")
        ids, caches = self.prompt(spec, 20), self.caches(model, attention)
        for start in (0, *range(20, 40)):
            share = Share("a", ids, start, len(ids) - start, LONG)
            with torch.inference_mode():
                found = model.forward_argmax(batch_of([share], BLOCK_SIZE), caches)
            ids = [*ids, int(found.ids)]
        assert self.whole(spec, ids, LONG)[19:-1].argmax(-1).tolist() == ids[20:]

    def test_metadata_is_prepared_once_per_batch_for_all_layers(self, spec: ModelSpec) -> None:
        if not self.attends:
            pytest.skip("it runs attention itself")
        model, attention, _ = self.make_model(spec)
        attention.prepared.clear()  # a model may run a batch while it is built
        attention.attended.clear()
        caches = self.caches(model, attention)
        for start in (0, 8):
            batch = batch_of([Share("a", self.prompt(spec, 16), start, 8, SHORT)], BLOCK_SIZE)
            self.forward(model, batch, caches)
        assert len(attention.prepared) == 2, f"{len(attention.prepared)} times in two batches"
        assert all(specs == tuple(model.attention_specs) for specs in attention.prepared)
        assert sorted(attention.attended) == sorted([one.layer for one in model.attention_specs] * 2)

    def test_a_step_run_twice_gives_the_same(self, spec: ModelSpec) -> None:
        """The engine may repeat a failed step."""
        model, attention, _ = self.make_model(spec)
        caches, ids = self.caches(model, attention), self.prompt(spec, 20)
        self.forward(model, batch_of([Share("a", ids, 0, 12, SHORT)], BLOCK_SIZE), caches)
        batch = batch_of([Share("a", ids, 12, 8, SHORT, logits="all")], BLOCK_SIZE)
        first = self.forward(model, batch, caches).clone()
        self.assert_close(self.forward(model, batch, caches), first)

    def test_the_batch_is_left_as_it_is(self, spec: ModelSpec) -> None:
        model, attention, _ = self.make_model(spec)
        batch = batch_of([Share("a", self.prompt(spec, 12), 0, 12, SHORT)], BLOCK_SIZE)
        names = (
            "input_ids",
            "positions",
            "query_start_loc",
            "seq_lens",
            "block_table",
            "slot_mapping",
            "logits_indices",
        )
        kept = {name: getattr(batch, name).clone() for name in names}
        self.forward(model, batch, self.caches(model, attention))
        for name, before in kept.items():
            assert torch.equal(getattr(batch, name), before), f"the model changes batch.{name}"

    def test_linear_layers_are_made_by_the_quantization(self, spec: ModelSpec) -> None:
        """A model that keeps its weights to itself would ignore `quant=…` in silence."""
        _, _, quant = self.make_model(spec)
        assert quant.names, "context.quant was never asked for a linear layer"
        assert len(set(quant.names)) == len(quant.names), "two layers go by one name"
