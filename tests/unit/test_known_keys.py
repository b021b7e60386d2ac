"""What is said of a wrong key or value, at any depth of a settings class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from core.config.keys import Option, keys_of, nearest, validated
from core.errors import ConfigError, near_matches


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tenant(Frozen):
    tickets: int = 1
    colour: Literal["red", "blue"] = "red"


class Linear(Frozen):
    kind: Literal["linear"] = "linear"
    slope: float = 1.0


class Steps(Frozen):
    kind: Literal["steps"] = "steps"
    heights: tuple[float, ...] = ()


@dataclasses.dataclass
class Box:
    width: int = 1


class Model(Frozen):
    limit: int = Field(default=1, ge=1)
    must: int
    tenant: Tenant = Tenant()
    maybe: Tenant | None = None
    tenants: Mapping[str, Tenant] = {}
    queue: tuple[Tenant, ...] = ()
    pair: tuple[int, Tenant] = (1, Tenant())
    either: Linear | Steps = Linear()
    tagged: Annotated[Linear | Steps, Field(discriminator="kind")] = Linear()
    stop: str | tuple[str, ...] = ()
    sizes: dict[str, list[int]] = {}
    box: Box | None = None
    ports: dict[int, str] = {}
    checked: Annotated[tuple[str, ...], BeforeValidator(lambda value: value)] = ()
    memory: str | float = 0.5
    word: str = Field(default="a", pattern="^a+$", description="some a")
    renamed: int = Field(default=1, alias="spelt")

    @field_validator("memory")
    @classmethod
    def _legal(cls, memory: str | float) -> str | float:
        if memory == "lots":
            raise ValueError("write a size")
        return memory


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validated(Model, {"must": 1, **values}, "top", ("name",))
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "key", "right"),
    [
        ({"limt": 1}, "top.limt", "limit"),
        ({"nmae": 1}, "top.nmae", "name"),
        ({"tenant": {"tikets": 1}}, "top.tenant.tikets", "tickets"),
        ({"maybe": {"tikets": 1}}, "top.maybe.tikets", "tickets"),
        ({"tenants": {"gold": {"tikets": 1}}}, "top.tenants.gold.tikets", "tickets"),
        ({"queue": [{}, {"tikets": 1}]}, "top.queue.1.tikets", "tickets"),
        ({"pair": [1, {"tikets": 1}]}, "top.pair.1.tikets", "tickets"),
        ({"either": {"sloep": 1}}, "top.either.sloep", "slope"),
        ({"either": {"hights": 1}}, "top.either.hights", "heights"),
        ({"tagged": {"kind": "steps", "hights": []}}, "top.tagged.hights", "heights"),
        ({"box": {"widht": 1}}, "top.box.widht", "width"),
        ({"spetl": 1}, "top.spetl", "spelt"),
    ],
)
def test_an_unknown_key_is_named_in_full_with_what_may_stand_there(values, key, right):
    message = refusal(**values)
    assert f"unknown config key '{key}'; did you mean {right}" in message


def test_name_is_offered_at_the_top_only_and_never_as_the_only_choice():
    assert "name" not in refusal(tenant={"zzzzz": 1})
    assert "name" not in refusal(zzzzz=1).replace("renamed", "")

    class Bare(Frozen):
        pass

    with pytest.raises(ConfigError, match="unknown config key 'quant.x'; quant has no settings"):
        validated(Bare, {"x": 1}, "quant", ("name",))
    with pytest.raises(ConfigError, match=r"unknown config key 'quant.naem'; did you mean name\?"):
        validated(Bare, {"naem": 1}, "quant", ("name",))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"limit": 0}, "config key 'top.limit': Input should be greater than or equal to 1 (got 0)"),
        ({"must": None}, "config key 'top.must': Input should be a valid integer (got None)"),
        ({"tenant": 3}, "config key 'top.tenant': it holds keys of its own, as in top.tenant.tickets=… (got 3)"),
        ({"tenant": {"colour": "rde"}}, "'top.tenant.colour': Input should be 'red' or 'blue' (got 'rde'); did you mean red?"),
        ({"tenants": {"gold": {"tickets": "x"}}}, "config key 'top.tenants.gold.tickets': Input should be a valid integer"),
        ({"queue": [{"tickets": "x"}]}, "config key 'top.queue.0.tickets': Input should be a valid integer"),
        ({"stop": 3}, "'top.stop': Input should be a valid string (got 3), or Input should be a valid tuple (got 3)"),
        ({"checked": "anna, bert"}, "config key 'top.checked': it should be a list; write [anna, bert] (got 'anna, bert')"),
        ({"checked": "a: [b"}, "config key 'top.checked': it should be a list; write [a, b] (got 'a: [b')"),
        ({"sizes": {"a": "b"}}, "config key 'top.sizes.a': it should be a list; write [b] (got 'b')"),
        ({"stop": ["a", 3]}, "config key 'top.stop.1': Input should be a valid string (got 3)"),
        ({"sizes": {"a": ["x"]}}, "config key 'top.sizes.a.0': Input should be a valid integer"),
        ({"ports": {"x": "y"}}, "config key 'top.ports.x': Input should be a valid integer"),
        ({"memory": "lots"}, "config key 'top.memory': Value error, write a size (got 'lots')"),
        ({"memory": [1]}, "config key 'top.memory': Input should be a valid string (got [1]), or Input should be a valid number"),
        ({"checked": 3}, "config key 'top.checked': Input should be a valid tuple (got 3)"),
        ({"word": "b"}, "config key 'top.word': it should be some a (got 'b')"),
        ({"either": 3}, "config key 'top.either': it holds keys of its own, as in top.either.kind=… (got 3)"),
        ({"tagged": {"kind": "curve"}}, "config key 'top.tagged': Input tag 'curve' found using 'kind' does not match"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_as_it_is_written(values, expected):
    assert expected in refusal(**values)


def test_what_must_be_set_says_so():
    with pytest.raises(ConfigError, match="config key 'top.must': it must be set"):
        validated(Model, {}, "top")


def test_a_component_is_named_and_whose_key_it_is():
    class Bare(Frozen):
        pass

    def owners(key: str) -> list[str]:
        return {"x": ["gold"], "tenant": ["gold", "silver"]}.get(key, [])

    def said(model: type[BaseModel], **values: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            validated(model, values, "group", ("name",), Option("group", "plain", owners))
        return str(caught.value)

    assert said(Bare, y=1) == "unknown config key 'group.y'; group=plain has no settings"
    assert said(Bare, x=1) == (
        "unknown config key 'group.x'; it is a key of group=gold, and group=plain is selected: select group=gold, "
        "or leave group.x out"
    )
    assert "it is a key of group=gold and group=silver" in said(Bare, tenant=1)
    nested = said(Model, must=1, tenant={"x": 1})  # what lies deeper is no key of a component
    assert nested == "unknown config key 'group.tenant.x'; choose one of: colour, tickets"


def test_all_problems_come_at_once_each_key_once():
    message = refusal(limt=1, stop=3, tenant={"tikets": 1})
    assert message.count("config key") == 3
    assert "'top.limt'" in message and "'top.stop'" in message and "'top.tenant.tikets'" in message


@pytest.mark.parametrize("values", [3, [1], "x"])
def test_no_mapping_at_all(values):
    with pytest.raises(ConfigError, match="config key 'plugins': it holds keys of its own"):
        validated(Tenant, values, "plugins")


def test_a_long_value_is_cut():
    assert len(refusal(limit="x" * 10_000)) < 300


def test_the_error_carries_the_key_and_whether_there_is_such_a_key():
    for values, key, unknown in (({"limt": 1}, "top.limt", True), ({"limit": 0}, "top.limit", False)):
        with pytest.raises(ConfigError) as caught:
            validated(Model, {"must": 1, **values}, "top")
        assert (caught.value.key, caught.value.unknown) == (key, unknown)


def test_the_keys_of_a_class_are_listed_with_those_inside():
    keys = list(keys_of(Model))
    assert {"limit", "tenant", "tenant.tickets", "maybe.colour", "either.slope", "either.heights", "spelt"} <= set(keys)
    assert not {"renamed", "tenants.tickets", "queue.tickets"} & set(keys)

    class Loop(Frozen):
        again: Loop | None = None

    Loop.model_rebuild(_types_namespace={"Loop": Loop})
    assert max(key.count(".") for key in keys_of(Loop)) == 3


def test_the_nearest_key_may_be_the_end_of_a_longer_one():
    keys = [
        "frontend",
        "frontend.port",
        "frontend.limits.connections",
        "cache.block_size",
        "process",
        "process.separate",
    ]
    assert nearest("port", keys) == ["frontend.port"]
    assert nearest("limits.conections", keys) == ["frontend.limits.connections"]
    assert nearest("fronted.port", keys)[0] == "frontend.port"
    assert nearest("BLOCK_SIZE", keys) == ["cache.block_size"]
    assert nearest("zzz", keys) == []
    assert nearest("n", ["chat.n", "bounds.n", "frontend.seed"]) == ["bounds.n", "chat.n"]


def test_near_matches_look_past_the_case_and_keep_both_spellings():
    assert near_matches("PORT", ["port", "slots"]) == "; did you mean port?"
    assert near_matches("Port", ["PORT", "port"]) == "; did you mean PORT, port?"
    assert near_matches("x", []) == ""
    assert near_matches("zzzz", ["b", "a"]) == "; choose one of: a, b"
