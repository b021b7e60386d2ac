"""Our own modules with hooks are what every plugin package must be."""

from __future__ import annotations

from core.plugins import BUILTINS
from core.testing.plugin import PluginContract


def _class(module: str) -> type:
    return type(module, (PluginContract,), {"plugin": module})


globals().update({f"Test_{module.replace('.', '_')}": _class(module) for module in BUILTINS})
