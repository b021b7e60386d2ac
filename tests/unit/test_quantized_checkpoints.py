"""Checkpoints that the ecosystem's own tools have quantized: their weights, their logits, and what is refused by name.

`shared/fixtures` lies beside the repository; its README says which tool made what.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from core.errors import ModelFileError
from core.model.block_formats import QUANTIZED_CHECKPOINTS
from core.model.decoder import NativeModel
from core.model.describe import read_spec
from core.model.quantized.source import SCHEMES, QuantizedWeights, scheme_of
from core.model.spec import ModelFiles
from core.model.weights import open_weights
from core.testing.model import ModelContract

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
REFUSED = {"gptqp-w3-g64-sym": "quantization_config.checkpoint_format='gptq_p': is not read; gptq, gptq_v2 are"}
ROUNDED = {"fp8-gptqmodel-row": 2**-8, "torchao-int8wo": 2**-8}
"""Folders whose tool gave the expected weights in bfloat16. All others are equal to the last bit."""
FOLDERS = sorted(path.name for path in FIXTURES.glob("*/") if (FIXTURES / f"{path.name}.expected.safetensors").exists())
READ = [name for name in FOLDERS if name not in REFUSED]

pytestmark = pytest.mark.skipif(not FIXTURES.is_dir(), reason="shared/fixtures is not beside the repository")


class Native(ModelContract):
    """Its ways to run a model."""

    component = NativeModel


@dataclass(frozen=True)
class InMemory:
    """The tensors of a checkpoint."""

    location: str
    tensors: Mapping[str, Tensor]

    def names(self) -> Set[str]:
        return self.tensors.keys()

    def stored(self, name: str) -> Tensor:
        return self.tensors[name]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.tensors[name].to(dtype)


def files(name: str) -> ModelFiles:
    return ModelFiles("hf", FIXTURES / name, name)


def expected(name: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / f"{name}.expected.safetensors")


def config_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]
    return values


def source(
    name: str,
    changes: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, Tensor]], object] = lambda found: None,
) -> QuantizedWeights:
    """A folder with another config, and its tensors edited."""
    tensors = {key: value for path in (FIXTURES / name).glob("*.safetensors") for key, value in load_file(path).items()}
    edit(tensors)
    scheme = scheme_of({**config_of(name), **(changes or {})}, "config.json")
    return QuantizedWeights(InMemory(name, tensors), scheme)


def test_fixtures_are_of_every_scheme() -> None:
    assert set(SCHEMES) == set(QUANTIZED_CHECKPOINTS) == {config_of(name)["quant_method"] for name in READ}
    assert set(REFUSED) <= set(FOLDERS) and len(READ) >= 19


@pytest.mark.parametrize("name", READ)
def test_weights_are_those_that_the_tool_has(name: str) -> None:
    weights, wanted = open_weights(files(name)), expected(name)
    for key in (key for key in wanted if key.endswith(".weight")):
        found = weights.read(key, torch.float32)
        if name in ROUNDED:
            torch.testing.assert_close(found, wanted[key], rtol=ROUNDED[name], atol=0.0)
        else:
            assert torch.equal(found, wanted[key]), key
    assert weights.names() == open_weights(files("base-h128-f32")).names(), "every tensor has a place in the model"


@pytest.mark.parametrize("name", READ)
def test_logits_are_those_of_transformers_with_these_weights(name: str) -> None:
    spec, native, wanted = read_spec(files(name), max_model_len=None), Native(), expected(name)
    assert spec.weights == (config_of(name)["quant_method"],)
    logits = native.whole(spec, wanted["prompt_ids"].flatten().tolist(), [0])
    error = (logits - wanted["logits"]).norm() / wanted["logits"].norm()
    assert error < (2e-2 if name in ROUNDED else 1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_its_key(name: str) -> None:
    with pytest.raises(ModelFileError) as refused:
        open_weights(files(name))
    assert str(refused.value).endswith(REFUSED[name]) and name in str(refused.value)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gptq-w4-g128-sym", {"quant_method": "gtpq"}, "quant_method='gtpq': is not read; did you mean gptq"),
    ("gptq-w4-g128-sym", {"quant_method": 3}, "quant_method=3: is not read"),
    ("gptq-w4-g128-sym", {"bits": 5}, "bits=5: is not read; 2, 3, 4, 8 are"),
    ("gptq-w4-g128-sym", {"bits": True}, "bits=True: is not read"),
    ("gptq-w4-g128-sym", {"group_size": 0}, "group_size=0: is no size of a group"),
    ("gptq-w4-g128-sym", {"pack_dtype": "int16"}, "pack_dtype='int16': is not read; int32 are"),
    ("gptq-w4-g64-sym-dynamic", {"dynamic": {"+:(": {}}}, "dynamic=.*no pattern"),
    ("gptq-w4-g64-sym-dynamic", {"dynamic": {".*": {"bits": 6}}}, "dynamic '.*': quantization_config.bits=6"),
    ("autoawq-gemm-w4-g64", {"version": "gemv_fast"}, "version='gemv_fast': is not read; gemm, gemv are"),
    ("autoawq-gemm-w4-g64", {"bits": 8}, "bits=8: is not read; 4 are"),
    (
        "ct-fp8-dynamic",
        {"transform_config": {"config_groups": {"R1": {}}}},
        "transform_config=.*the weights would be others",
    ),
    (
        "ct-fp8-dynamic",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config=.*the weights would be others",
    ),
    ("ct-fp8-dynamic", {"quantization_status": "frozen"}, "quantization_status='frozen'"),
    ("ct-fp8-dynamic", {"config_groups": {}}, "config_groups={}: says of no module"),
    (
        "ct-fp8-dynamic",
        {"config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}}},
        r"group_0.format='nvfp4-pack",
    ),
    ("fp8-gptqmodel-row", {"format": "e5m2", "checkpoint_format": "e5m2"}, "checkpoint_format='e5m2': is not read"),
    ("fp8-gptqmodel-row", {"weight_block_size": [128]}, r"weight_block_size=\[128\]: is no pair"),
    ("bnb-nf4", {"load_in_8bit": True}, "load_in_8bit=True: is not read"),
    ("bnb-nf4", {"bnb_4bit_use_double_quant": True}, "bnb_4bit_use_double_quant=True: is not read"),
    (
        "torchao-int8wo",
        {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        "quant_type.default._type='Int4",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG, ids=str)
def test_a_config_that_is_not_read_names_its_key(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=f"config.json: .*{message}"):
        source(name, changes)


PROJECTION = "model.layers.0.self_attn.q_proj"


def edits(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda found: found.update({f"{PROJECTION}.{suffix}": change(found[f"{PROJECTION}.{suffix}"])})


DAMAGES: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("gptq-w4-g64-asym", "qweight", lambda x: x.to(torch.int64), "holds torch.int64, not torch.int32"),
    ("gptq-w4-g64-asym", "qweight", lambda x: x.flatten(), "not that of a matrix"),
    ("gptq-w4-g64-asym", "qzeros", lambda x: x[:1], "has shape"),
    ("gptq-w4-g64-asym", "scales", lambda x: x.t().contiguous(), "has shape"),
    ("gptq-w4-g32-sym-descact", "g_idx", lambda x: x[:-1], "has shape"),
    ("gptq-w4-g32-sym-descact", "g_idx", lambda x: x + 1, "names group 4, there are 4"),
    ("gptq-w4-g32-sym-descact", "g_idx", lambda x: x - 1, "names group"),
    ("autoawq-gemm-w4-g64", "scales", lambda x: x.t().contiguous(), "has shape"),
    ("autoawq-gemm-w4-g64", "qzeros", lambda x: x[:, :-1].contiguous(), "has shape"),
    ("autoawq-gemv-w4-g64", "scales", lambda x: x[:, :1].contiguous(), "for 128 outputs and 2 groups"),
    ("autoawq-gemv-w4-g64", "qzeros", lambda x: x[:5], "for 128 outputs and 2 groups"),
    ("ct-w4a16-g64-asym-awq", "weight_scale", lambda x: x.t().contiguous(), "for 128 outputs and 2 groups"),
    ("ct-w4a16-g64-asym-awq", "weight_zero_point", lambda x: x.t().contiguous(), "has shape"),
    ("ct-w4a16-g64-asym-awq", "weight_shape", lambda x: x * 0, r"says \[0, 0\]"),
    ("ct-int8-w8a8-dyn-rtn", "weight_scale", lambda x: x[:3], "has shape"),
    ("ct-fp8-block128", "weight_scale", lambda x: x.repeat(1, 2), "has shape"),
    ("fp8-gptqmodel-row", "weight_scale_inv", lambda x: x[:3], "has shape"),
    ("fp8-gptqmodel-row", "weight", lambda x: x.float(), "holds torch.float32"),
    ("bnb-nf4", "weight", lambda x: x[:-1], "for a matrix"),
    ("bnb-nf4", "weight.absmax", lambda x: x[:-1], "has shape"),
    ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", lambda x: x[:-5], "is not the JSON"),
    ("torchao-int8wo", "_weight_scale", lambda x: x[:3], "for a weight"),
]


@pytest.mark.parametrize(
    ("name", "suffix", "damage", "message"), DAMAGES, ids=lambda value: value if type(value) is str else ""
)
def test_parts_that_do_not_fit_are_named(
    name: str, suffix: str, damage: Callable[[Tensor], Tensor], message: str
) -> None:
    weights = source(name, edit=edits(suffix, damage))
    with pytest.raises(ModelFileError, match=f"{name}: tensor {PROJECTION}.{suffix}: .*{message}"):
        weights.read(f"{PROJECTION}.weight", torch.float32)


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("gptq-w4-g64-asym", "scales"), ("autoawq-gemm-w4-g64", "qzeros"), ("bnb-nf4", "weight.absmax")],
)
def test_a_part_that_is_missing_is_named(name: str, suffix: str) -> None:
    weights = source(name, edit=lambda found: found.pop(f"{PROJECTION}.{suffix}"))
    with pytest.raises(ModelFileError, match=f"{PROJECTION}.{suffix}: is missing"):
        weights.read(f"{PROJECTION}.weight", torch.float32)


def test_a_name_that_is_not_there_has_near_matches() -> None:
    with pytest.raises(ModelFileError, match="not found; did you mean"):
        source("bnb-nf4").read("model.layers.0.self_attn.q_prj.weight", torch.float32)


MISTAKES: list[tuple[str, str, dict[str, Any], Callable[[dict[str, Tensor]], object]]] = [
    ("zero points of v1 taken for v2", "gptq-w4-g64-asym", {"checkpoint_format": "gptq_v2"}, lambda found: None),
    ("zero points of v2 taken for v1", "gptqv2-w4-g64-asym", {"checkpoint_format": "gptq"}, lambda found: None),
    ("act-order lost", "gptq-w4-g32-sym-descact", {}, lambda found: found.pop(f"{PROJECTION}.g_idx")),
    ("all inputs in one group", "gptq-w4-g32-sym-descact", {}, edits("g_idx", torch.zeros_like)),
    (
        "words read in the order of outputs",
        "autoawq-gemm-w4-g64",
        {},
        lambda found: found.update({f"{PROJECTION}.qweight": in_output_order(found[f"{PROJECTION}.qweight"])}),
    ),
    (
        "zero points left out",
        "ct-w4a16-g64-asym-awq",
        {},
        edits("weight_zero_point", lambda x: torch.full_like(x, 0x88888888 - (1 << 32))),
    ),
    ("a divisor taken for a factor", "fp8-gptqmodel-row", {"weight_scale_semantics": None}, lambda found: None),
]


def in_output_order(words: Tensor) -> Tensor:
    """AWQ's words as they would be if each held its eight outputs one after another."""
    places = (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    shifts = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]) * 4
    wide = (places.long() << shifts).sum(-1)
    return torch.where(wide >= 2**31, wide - 2**32, wide).to(torch.int32)


@pytest.mark.parametrize(("what", "name", "changes", "edit"), MISTAKES, ids=[what for what, *_ in MISTAKES])
def test_a_mistake_in_packing_would_show(
    what: str, name: str, changes: dict[str, Any], edit: Callable[[dict[str, Tensor]], object]
) -> None:
    """Each is one that readers of these formats have made; the comparison with the tool's weights tells it."""
    key = f"{PROJECTION}.weight"
    right, wrong = (source(name, *given).read(key, torch.float32) for given in ((), (changes, edit)))
    assert (right - wrong).norm() / right.norm() > 0.01


# --- what was reported of other readers (bugs O5 to O8) -------------------------------------------------


def awq_words(codes: Tensor) -> Tensor:
    """uint8 [rows, columns] -> int32 [rows, columns / 8] as AutoAWQ packs them."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    places = codes.long().unflatten(1, (-1, 8))[:, :, order]
    wide = (places << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(wide >= 2**31, wide - 2**32, wide).to(torch.int32)


def awq_weight(codes: Tensor, zeros: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Through the reader: codes [in, out], zeros and scales [groups, out]. [out, in]"""
    tensors = {"a.qweight": awq_words(codes), "a.qzeros": awq_words(zeros), "a.scales": scales}
    config = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": group_size}
    weights = QuantizedWeights(InMemory("a", tensors), scheme_of(config, "config.json"))
    return weights.read("a.weight", torch.float32)


def test_o6_awq_numbers_come_out_as_they_went_in() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16) % 16
    found = awq_weight(codes, torch.zeros(1, 16, dtype=torch.uint8), torch.ones(1, 16), -1)
    assert torch.equal(found.t(), codes.float())


@pytest.mark.parametrize("num_inputs", [32, 64, 128, 256])
@pytest.mark.parametrize("num_outputs", [8, 64, 96, 192])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_o5_awq_of_any_width(num_inputs: int, num_outputs: int, group_size: int) -> None:
    generator = torch.Generator().manual_seed(num_inputs + num_outputs)
    size = num_inputs if group_size == -1 else group_size
    groups = -(-num_inputs // size)
    codes = torch.randint(0, 16, (num_inputs, num_outputs), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 16, (groups, num_outputs), generator=generator).to(torch.uint8)
    scales = torch.rand(groups, num_outputs, generator=generator)
    index = torch.arange(num_inputs) // size
    wanted = ((codes.double() - zeros.double()[index]) * scales.double()[index]).t()
    found = awq_weight(codes, zeros, scales, group_size)
    for rows in (1, 7, 33):
        x = torch.randn(rows, num_inputs, generator=generator)
        torch.testing.assert_close(x @ found.t(), (x.double() @ wanted.t()).float(), rtol=1e-3, atol=1e-3)


def test_o7_packed_zero_points_are_read() -> None:
    weights = source("ct-w4a16-g64-asym-awq")
    assert torch.equal(
        weights.read(f"{PROJECTION}.weight", torch.float32), expected("ct-w4a16-g64-asym-awq")[f"{PROJECTION}.weight"]
    )


@pytest.mark.parametrize("shown", ["present", "absent", "all zero"])
def test_o8_the_order_of_groups(shown: str) -> None:
    """All zero is how GPTQModel stores one group with act-order; absent is groups one after another."""
    changes: dict[str, Callable[[dict[str, Tensor]], object]] = {
        "present": lambda found: None,
        "absent": lambda found: found.pop(f"{PROJECTION}.g_idx"),
        "all zero": edits("g_idx", torch.zeros_like),
    }
    name = "gptq-w4-g32-sym-descact"
    found = source(name, edit=changes[shown]).read(f"{PROJECTION}.weight", torch.float32)
    tensors = load_file(FIXTURES / name / "model.safetensors")
    order = tensors[f"{PROJECTION}.g_idx"].long()
    groups = {"present": order, "absent": torch.arange(128) // 32, "all zero": torch.zeros(128, dtype=torch.long)}
    scales = tensors[f"{PROJECTION}.scales"].float()
    codes = expected(name)[f"{PROJECTION}.weight"].t() / scales[order]  # whole numbers, up to rounding
    torch.testing.assert_close(found.t(), codes * scales[groups[shown]], rtol=1e-5, atol=1e-6)
