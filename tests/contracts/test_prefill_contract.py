"""The built-in prefills keep the contract of stage 5."""

from __future__ import annotations

from core.stages.prefill import Chunked, Whole
from core.testing.prefill import PrefillContract


class TestChunked(PrefillContract):
    component = Chunked


class TestChunkedInSmallPieces(PrefillContract):
    component = Chunked
    settings = {"chunk_size": 3, "long_chunk_size": 7, "long_prompt": 50}


class TestChunkedByTime(PrefillContract):
    component = Chunked
    settings = {"target_tpot": 0.02, "min_chunk": 4}


class TestChunkedWithFewLongOnes(PrefillContract):
    component = Chunked
    settings = {"long_prompt": 50, "long_chunk_size": 9, "max_long_prefills": 1}


class TestWhole(PrefillContract):
    component = Whole
