"""Grammars at work: their masks where the sampler runs, and the process that compiles them."""
