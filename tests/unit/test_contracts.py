"""The table of contracts says what the hooks say, and names what there is."""

from __future__ import annotations

import importlib
import re

import pytest

from core import hookspecs
from core.components import CHAINS, GROUPS, hook_of
from core.contracts import CONTRACTS
from core.testing.contract import Contract


def found(path: str) -> type:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("group", [*GROUPS, *CHAINS])
def test_the_hook_names_the_contract(group):
    text = getattr(hookspecs, hook_of(group)).__doc__
    named = re.findall(r"Contract: `([\w.]+)`", text)
    assert named == [CONTRACTS[group].protocol.replace(":", ".")]


@pytest.mark.parametrize("group", [*GROUPS, *CHAINS])
def test_contract_and_suite_are_there(group):
    assert getattr(found(CONTRACTS[group].protocol), "_is_protocol", False)
    assert issubclass(found(CONTRACTS[group].suite), Contract)
