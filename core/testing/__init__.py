"""Contract suites for every kind of component, which plugins of others pass too, and the fakes they are made with.

What only our own tests use is in `harness`.
"""

from __future__ import annotations

import pkgutil
import sys


def explain_assertions() -> None:
    """Assertions of these modules say what they compared, as those of test modules do. Before the modules are imported."""
    import pytest

    names = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
    pytest.register_assert_rewrite(*(name for name in names if name not in sys.modules))


if "pytest" in sys.modules:
    explain_assertions()
