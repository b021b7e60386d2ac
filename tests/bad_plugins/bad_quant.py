"""Quantizations that each break one promise of `core.model.interface.QuantMethod`."""

from __future__ import annotations

import torch

from plugins.quant.none import Dense


class WrongShape(Dense):
    """Rounds the output up to whole tiles of 32."""

    caught_by = "test_products_are_near_those_of_the_full_weight"

    def linear(self, name, weight, bias):
        rows = -weight.shape[0] % 32
        padded = torch.cat([weight, weight.new_zeros(rows, weight.shape[1])])
        return super().linear(name, padded, None if bias is None else torch.cat([bias, bias.new_zeros(rows)]))


class DividesByZero(Dense):
    """Scales each row by its largest weight, which may be zero."""

    caught_by = "test_a_weight_of_zeros_gives_zeros"

    def linear(self, name, weight, bias):
        scale = weight.abs().amax(1, keepdim=True)
        return super().linear(name, weight / scale * scale, bias)


class ForgetsBias(Dense):
    """A layer with a bias is applied without it."""

    caught_by = "test_the_bias_is_added"

    def linear(self, name, weight, bias):
        return super().linear(name, weight, None)
