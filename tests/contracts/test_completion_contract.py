"""The built-in completion keeps the contract of stage 9."""

from __future__ import annotations

from core.stages.completion import Standard
from core.testing.completion import CompletionContract


class TestStandard(CompletionContract):
    component = Standard
