"""docs/testing.md names every suite, and the attributes that it says a class may have."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from core.commands.plugins_check import FLAGS, VALUED
from core.components import CHAINS, GROUPS
from core.contracts import CONTRACTS
from core.outputs import StepStats
from core.testing.observer import record
from plugins.observers.jsonl import request_row
from plugins.observers.wall_clock import WallClock

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")


def rows() -> dict[str, tuple[str, str, str]]:
    found = re.findall(r"^\| `(\w+)` \| `from ([\w.]+) import (\w+)` \| (.*?) ?\|$", PAGE, flags=re.M)
    return {group: (module, name, more) for group, module, name, more in found}


def test_every_group_is_there_with_its_suite():
    assert list(rows()) == [*GROUPS, *CHAINS]
    found = {group: f"{module}:{name}" for group, (module, name, _) in rows().items()}
    assert found == {group: promise.suite for group, promise in CONTRACTS.items()}


def test_attributes_are_those_of_the_suites():
    for module, name, more in rows().values():
        suite = getattr(importlib.import_module(module), name)
        for attribute in re.findall(r"`(?:async def )?(\w+)(?: =|\(|`)", more):
            known = hasattr(suite, attribute) or hasattr(importlib.import_module(module), attribute)
            assert known or attribute in ("openai", "prefix_sharing", "folder"), f"{name} has no {attribute}"


def test_every_option_is_explained():
    for option in (*VALUED, *FLAGS):
        assert f"`{option}" in PAGE, option


def test_no_number_of_checks_is_printed_that_would_grow_old():
    assert "… checks" in PAGE and not re.search(r"\d+ checks", PAGE)


def test_fields_of_jsonl_lines_are_those_that_are_written():
    page = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(start|request|step)` \|.*?\| (.*) \|$", page, flags=re.M))
    steps = set(re.findall(r"`(\w+)`", rows["step"]))
    assert steps == set(StepStats.__struct_fields__)
    for field in request_row(record(), WallClock()):
        assert f"`{field}`" in rows["request"], field
    assert {"`version`", "`model`", "`parts`"} <= set(re.findall(r"`\w+`", rows["start"]))
