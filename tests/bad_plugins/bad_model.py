"""Models that each break one promise of `core.model.interface.Model`."""

from __future__ import annotations

from dataclasses import replace

from core.model.decoder import NativeModel


class WrongRows(NativeModel):
    """Gives the wanted rows in order of position, whatever the order in which they are wanted."""

    caught_by = "test_rows_are_those_asked_for_in_that_order"

    def forward(self, batch, kv_caches):
        return super().forward(replace(batch, logits_indices=batch.logits_indices.sort().values), kv_caches)


class PerLayer:
    """An attention whose metadata is made anew in each layer."""

    def __init__(self, attention):
        self._attention = attention
        self.kv_shape = attention.kv_shape

    def prepare(self, batch, specs):
        self._given = batch, specs

    def forward(self, spec, q, k, v, kv_cache, metadata):
        return self._attention.forward(spec, q, k, v, kv_cache, self._attention.prepare(*self._given))


class PreparesPerLayer(NativeModel):
    """Has the attention's metadata made in each layer."""

    caught_by = "test_metadata_is_prepared_once_per_batch_for_all_layers"

    def __init__(self, settings, context):
        super().__init__(settings, replace(context, attention=PerLayer(context.attention)))


class KeepsWeights(NativeModel):
    """Ignores the quantization that config selected."""

    caught_by = "test_linear_layers_are_made_by_the_quantization"

    def __init__(self, settings, context):
        from core.testing.naive import DenseQuant

        super().__init__(settings, replace(context, quant=DenseQuant(context.quant.context)))
