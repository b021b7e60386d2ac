"""What every quantization must do, as tests::

class TestMine(QuantContract):
    component = Mine
    max_error = 0.05  # relative, of a product; 0.3 where nothing is said
"""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from core.model.interface import Linear, QuantContext, QuantMethod
from core.testing.contract import Contract
from core.testing.host_reads import HostReads

SHAPES = pytest.mark.parametrize("shape", [(64, 64), (96, 64), (64, 128), (1, 64), (257, 128)], ids=str)  # out, in
UP = "model.layers.0.mlp.up_proj"


def random_weight(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[1])


def random_input(num_tokens: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed))


class QuantContract(Contract):
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    max_error: ClassVar[float] = 0.3

    def make_quant(self, dtype: torch.dtype = torch.float32) -> QuantMethod:
        quant: QuantMethod = self.make(QuantContext(torch.device(self.device), dtype))
        return quant

    def apply(self, made: Linear, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        with torch.inference_mode():
            found: Tensor = made(x.to(self.device, dtype))
        return found

    @SHAPES
    def test_products_are_near_those_of_the_full_weight(self, shape: tuple[int, int]) -> None:
        weight, x = random_weight(shape), random_input(7, shape[1])
        expected = linear(x, weight)
        for dtype in self.dtypes:
            found = self.apply(self.make_quant(dtype).linear(UP, weight.clone(), None), x, dtype)
            assert found.shape == (7, shape[0]), f"[7, {shape[1]}] becomes {list(found.shape)}, not [7, {shape[0]}]"
            assert found.dtype == dtype
            error = float((found.float().cpu() - expected).norm() / expected.norm())
            assert error <= self.max_error, f"relative error {error:.3f} of a product, allowed {self.max_error}"

    def test_the_bias_is_added(self) -> None:
        weight, bias, x = random_weight((96, 64)), random_input(1, 96, seed=3)[0] * 10, random_input(5, 64)
        quant = self.make_quant()
        without = self.apply(quant.linear(UP, weight.clone(), None), x)
        with_bias = self.apply(quant.linear(UP, weight.clone(), bias.clone()), x)
        torch.testing.assert_close(with_bias, without + bias.to(self.device), atol=1e-2, rtol=1e-2)

    @pytest.mark.parametrize("num_tokens", [1, 2, 33])
    def test_a_token_does_not_depend_on_its_batch(self, num_tokens: int) -> None:
        made, x = self.make_quant().linear(UP, random_weight((96, 64)), None), random_input(num_tokens, 64)
        together = self.apply(made, x)
        assert together.shape == (num_tokens, 96)
        for index in range(num_tokens):
            torch.testing.assert_close(self.apply(made, x[index : index + 1])[0], together[index], atol=1e-5, rtol=1e-4)

    def test_applied_twice_it_gives_the_same(self) -> None:
        made, x = self.make_quant().linear(UP, random_weight((96, 64)), None), random_input(5, 64)
        first = self.apply(made, x).clone()
        assert torch.equal(self.apply(made, x), first)

    def test_layers_are_kept_apart(self) -> None:
        quant, x = self.make_quant(), random_input(3, 64)
        names = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"]
        weights = [random_weight((64, 64), seed) for seed in range(3)]
        made = [quant.linear(name, weight.clone(), None) for name, weight in zip(names, weights, strict=True)]
        for one, weight in zip(made, weights, strict=True):
            expected = linear(x, weight)
            error = float((self.apply(one, x).cpu() - expected).norm() / expected.norm())
            assert error <= self.max_error, "a layer is applied with another layer's weight"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_weights_come_in_any_dtype(self, dtype: torch.dtype) -> None:
        weight, x = random_weight((64, 128)).to(dtype), random_input(4, 128)
        expected = linear(x, weight.float())
        found = self.apply(self.make_quant().linear(UP, weight, None), x)
        assert float((found.cpu() - expected).norm() / expected.norm()) <= self.max_error

    def test_a_weight_of_zeros_gives_zeros(self) -> None:
        weight = random_weight((64, 64))
        weight[:5] = 0.0
        weight[:, 32:] = 0.0
        found = self.apply(self.make_quant().linear(UP, weight, None), random_input(4, 64))
        assert bool(torch.isfinite(found).all()), "a row of zeros gives NaN"
        assert float(found[:, :5].abs().max()) == 0.0

    def test_weight_and_input_are_left_as_they_are(self) -> None:
        weight, bias, x = random_weight((64, 64)), random_input(1, 64)[0], random_input(4, 64)
        kept = [tensor.clone() for tensor in (weight, bias, x)]
        self.apply(self.make_quant().linear(UP, weight, bias), x)
        for before, after in zip(kept, (weight, bias, x), strict=True):
            assert torch.equal(before, after)

    def test_applying_reads_no_values_on_the_host(self) -> None:
        """It is graph-safe: what is applied is planned when the layer is made."""
        made, x = self.make_quant().linear(UP, random_weight((64, 64)), None), random_input(4, 64).to(self.device)
        with torch.inference_mode(), HostReads() as reads:
            made(x)
        assert not reads.found, f"it calls Tensor.{reads.found[0]}, which reads values on the host"
