"""The built-in decode keeps the contract of stage 6."""

from __future__ import annotations

from core.stages.decode import Plain
from core.testing.decode import DecodeContract


class TestPlain(DecodeContract):
    component = Plain
