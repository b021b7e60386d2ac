"""Our own modules with hooks are what every plugin package must be; and each group has a suite."""

from __future__ import annotations

from core.hookspecs import CHAINS, GROUPS
from core.plugins import BUILTINS
from core.testing.plugin import CONTRACTS, PluginContract
from core.testing.suites import SUITES


def _class(module: str) -> type:
    return type(module, (PluginContract,), {"plugin": module})


globals().update({f"Test_{module.replace('.', '_')}": _class(module) for module in BUILTINS})


def test_every_group_has_a_contract_and_a_suite() -> None:
    assert set(SUITES) == set(CONTRACTS) == {*GROUPS, *CHAINS}
