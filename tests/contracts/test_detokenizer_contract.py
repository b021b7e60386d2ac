"""The built-in detokenizer keeps the contract of stage 8."""

from __future__ import annotations

from core.stages.incremental import Incremental
from core.testing.detokenizer import DetokenizerContract


class TestIncremental(DetokenizerContract):
    component = Incremental
