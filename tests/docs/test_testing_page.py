"""docs/testing.md names every suite, and the attributes that it says a class may have."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from core.commands.plugins_check import FLAGS, VALUED
from core.hookspecs import CHAINS, GROUPS
from core.testing.suites import SUITES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")


def rows() -> dict[str, tuple[str, str, str]]:
    found = re.findall(r"^\| `(\w+)` \| `from ([\w.]+) import (\w+)` \| (.*?) ?\|$", PAGE, flags=re.M)
    return {group: (module, name, more) for group, module, name, more in found}


def test_every_group_is_there_with_its_suite():
    assert list(rows()) == [*GROUPS, *CHAINS]
    assert {group: (f"{module}:{name}",) for group, (module, name, _) in rows().items()} == dict(SUITES)


def test_attributes_are_those_of_the_suites():
    for module, name, more in rows().values():
        suite = getattr(importlib.import_module(module), name)
        for attribute in re.findall(r"`(?:async def )?(\w+)(?: =|\(|`)", more):
            known = hasattr(suite, attribute) or hasattr(importlib.import_module(module), attribute)
            assert known or attribute in ("openai", "prefix_sharing", "folder"), f"{name} has no {attribute}"


def test_every_option_is_explained():
    for option in (*VALUED, *FLAGS):
        assert f"`{option}" in PAGE, option
