"""Quantized checkpoints in folders of safetensors, as the ecosystem's tools write them: one module for each `quant_method`."""
