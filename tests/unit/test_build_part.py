"""A component that cannot be built says who it is, why, and what to do where memory lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from core import assembly
from core.assembly import build
from core.errors import ConfigError, PluginError


def built(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def construct(settings: object, context: object) -> None:
        raise error

    monkeypatch.setattr(assembly, "import_target", lambda provided, target: construct)
    provided = SimpleNamespace(component=SimpleNamespace(target="acme:Model"))
    part: Any = SimpleNamespace(provided=provided, who="model=acme (plugin acme, acme 1.0)", settings=None)
    build(part, None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such width"), "ValueError: no such width"),
        (MemoryError("of 3 GiB"), "MemoryError: of 3 GiB; lower cache.memory, or raise the limit of memory"),
    ],
)
def test_it_is_named_with_what_it_raised(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError) as refused:
        built(error, monkeypatch)
    assert str(refused.value) == f"model=acme (plugin acme, acme 1.0) could not be built: {reason}"


def test_an_error_of_ours_passes_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: not there$"):
        built(ConfigError("model.path: not there"), monkeypatch)
