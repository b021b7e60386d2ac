"""The built-in weight format keeps the contract, and loses nothing."""

from __future__ import annotations

from core.testing.quant import QuantContract
from plugins.quant.none import Dense


class TestDense(QuantContract):
    component = Dense
    max_error = 0.01  # bfloat16's
