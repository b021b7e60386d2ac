"""The built-in executor keeps the contract."""

from __future__ import annotations

from core.model.local_executor import LocalExecutor
from core.testing.executor import ExecutorContract
from core.testing.suites import words_of


class TestLocal(ExecutorContract):
    component = LocalExecutor
    provides = words_of("executor", "local")
