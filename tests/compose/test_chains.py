"""Chains: groups of which config selects any number. On the command line, in preset files, in their order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.components import CHAINS
from core.errors import ConfigError
from core.session import open_session

GLOBAL = "# @package _global_\n"


def members(words: list[str], chain: str = "observers") -> list[str]:
    return [part.provided.component.name for part in open_session(words).description.chain(chain)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("preset", "observers"):
        (tmp_path / name).mkdir()
    return tmp_path


def preset(folder: Path, text: str, name: str = "mine") -> list[str]:
    (folder / f"preset/{name}.yaml").write_text(GLOBAL + text, encoding="utf-8")
    return [f"config_dir={folder}", f"+preset={name}"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["prometheus"]),
        (["observers=prometheus"], ["prometheus"]),
        (["observers=jsonl"], ["jsonl"]),
        (["observers=[jsonl,prometheus]"], ["jsonl", "prometheus"]),
        (["observers=[prometheus,jsonl]"], ["prometheus", "jsonl"]),
        (["observers=[]"], []),
        (["~observers"], []),
        (["~observers.prometheus"], []),
        (["observers=[prometheus,jsonl]", "~observers.prometheus"], ["jsonl"]),
        (["+observers=jsonl"], ["prometheus", "jsonl"]),
        (["+observers=[jsonl,otel]"], ["prometheus", "jsonl", "otel"]),
        (["++observers=[jsonl]"], ["prometheus", "jsonl"]),
        (["+observers=jsonl", "+observers=otel"], ["prometheus", "jsonl", "otel"]),
        (["observers=[otel]", "+observers=jsonl"], ["otel", "jsonl"]),
        (["observers=[]", "+observers=jsonl"], ["jsonl"]),
        (["observers=[jsonl]", "observers=[otel]"], ["otel"]),
        (["observers.jsonl={}"], ["prometheus", "jsonl"]),
        (["+observers.jsonl={}"], ["prometheus", "jsonl"]),
        (["observers.jsonl.steps=true"], ["prometheus", "jsonl"]),
        (["observers=[]", "observers.jsonl.steps=true"], ["jsonl"]),
        (["observers.jsonl.steps=true", "+observers=otel"], ["prometheus", "jsonl", "otel"]),
    ],
)
def test_the_command_line_replaces_adds_and_takes_out(words, expected):
    assert members(words) == expected


def test_a_members_values_reach_its_settings():
    description = open_session(["observers=[prometheus,jsonl]", "observers.jsonl.path=x.jsonl"]).description
    (_, jsonl) = description.chain("observers")
    assert (jsonl.path, str(jsonl.settings.path)) == ("observers.jsonl", "x.jsonl")


def test_logits_processors_are_a_chain_in_configs_order():
    chain = "logits_processors"
    assert members(["logits_processors=[dry,min_tokens]"], chain) == ["dry", "min_tokens"]
    assert members(["logits_processors=[min_tokens,dry]"], chain) == ["min_tokens", "dry"]
    assert members(["logits_processors=[]"], chain) == []
    assert members(["logits_processors=[]", "logits_processors.dry={}"], chain) == ["dry"]


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("defaults:\n  - override /observers: [jsonl, prometheus]\n", [], ["jsonl", "prometheus"]),
        ("defaults:\n  - override /observers: jsonl\n", [], ["jsonl"]),
        ("defaults:\n  - override /observers: []\n", [], []),
        ("defaults:\n  - /observers/jsonl\n", [], ["prometheus", "jsonl"]),
        ("defaults:\n  - /observers/jsonl\n", ["observers=[otel]"], ["otel"]),
        ("defaults:\n  - /observers/jsonl\n", ["observers=[]"], []),
        ("defaults:\n  - /observers/jsonl\n", ["observers=[otel,jsonl]"], ["otel", "jsonl"]),
        ("defaults:\n  - /observers/jsonl\n", ["+observers=otel"], ["prometheus", "jsonl", "otel"]),
        ("observers:\n  jsonl: {}\n", [], ["prometheus", "jsonl"]),
        ("observers:\n  jsonl:\n", [], ["prometheus", "jsonl"]),
        ("observers: {}\n", [], ["prometheus"]),
        ("observers: {jsonl: {path: a}, otel: {}}\n", [], ["prometheus", "jsonl", "otel"]),
        ("defaults:\n  - override /observers: [jsonl]\nobservers:\n  jsonl: {path: a}\n", [], ["jsonl"]),
        ("defaults:\n  - override /observers: [jsonl]\n", ["observers=[otel]"], ["otel"]),
        ("defaults:\n  - override /observers: [jsonl]\n", ["+observers=[otel]"], ["jsonl", "otel"]),
        ("defaults:\n  - override /observers: [jsonl]\n", ["~observers.jsonl"], []),
        ("observers: {jsonl: {}}\n", ["observers=[]"], []),
        ("observers: {jsonl: {}}\n", ["observers=[prometheus]"], ["prometheus"]),
        ("observers: {jsonl: {}}\n", ["+observers=otel"], ["prometheus", "jsonl", "otel"]),
        ("observers: {jsonl: {}}\n", ["observers=[otel,jsonl]"], ["otel", "jsonl"]),
    ],
)
def test_presets_do_the_same_and_a_list_on_the_command_line_is_all_there_is(folder, text, words, expected):
    assert members([*preset(folder, text), *words]) == expected


def test_what_a_preset_sets_of_a_member_stays_where_the_command_line_lists_it(folder):
    words = preset(folder, "observers: {jsonl: {path: night.jsonl}}\n")
    (jsonl,) = open_session([*words, "observers=[jsonl]"]).description.chain("observers")
    assert str(jsonl.settings.path) == "night.jsonl"


def test_an_option_of_ones_own_brings_members_with_values(folder):
    (folder / "observers/audit.yaml").write_text("jsonl: {path: audit.jsonl, steps: true}\notel: {}\n", "utf-8")
    for words in (["observers=audit"], ["observers=[audit]"], ["observers=[]", "+observers=audit"]):
        jsonl, otel = open_session([f"config_dir={folder}", *words]).description.chain("observers")
        assert (str(jsonl.settings.path), jsonl.settings.steps, otel.path) == ("audit.jsonl", True, "observers.otel")
    assert members([f"config_dir={folder}", "observers=[audit]", "~observers.otel"]) == ["jsonl"]


TWICE = [
    ["observers=[jsonl,jsonl]"],
    ["+observers=[jsonl,jsonl]"],
    ["+observers=prometheus"],
    ["observers=[jsonl]", "+observers=jsonl"],
    ["+observers=jsonl", "+observers=[otel,jsonl]"],
]


@pytest.mark.parametrize("words", TWICE, ids=" ".join)
def test_the_same_name_twice_is_refused(words):
    with pytest.raises(ConfigError, match="observers: '(jsonl|prometheus)' is selected twice; name it once"):
        open_session(words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defaults:\n  - override /observers: [jsonl, jsonl]\n", "'jsonl' is selected twice"),
        ("defaults:\n  - /observers/prometheus\n", "'prometheus' is selected twice"),
        ("observers: {jsonl: {}, jsonl: {}}\n", "duplicate key jsonl"),
        ("observers: prometheus\n", "`- override /observers: [a, b]` (set in FOLDER/preset/mine.yaml (config_dir))"),
        ("observers: [prometheus]\n", "`- override /observers: …` (set in FOLDER/preset/mine.yaml (config_dir))"),
        ("observers: {jsonl: 3}\n", "'observers.jsonl': a mapping from key to value, {} for the defaults (got 3)"),
        ("observers: {jsonl: [path]}\n", "'observers.jsonl': a mapping from key to value"),
        ("observers: {jsnol: {}}\n", "no observer is called 'jsnol'; did you mean jsonl? (set in FOLDER/preset"),
        ("observers: {jsnol: 3}\n", "no observer is called 'jsnol'; did you mean jsonl?"),
        ("observers: {jsonl: {paht: x}}\n", "unknown config key 'observers.jsonl.paht'; did you mean path?"),
        ("defaults:\n  - override /observers: [jsnol]\n", "did you mean jsonl? (set in FOLDER/preset/mine.yaml"),
        ("defaults:\n  - override /observers: {jsonl: {}}\n", "In 'preset/mine': Unsupported item value in defaults"),
        ("defaults:\n  - override observers: [jsonl]\n", "`- override /observers: …`, with the slash"),
    ],
)
def test_mistakes_in_a_file(folder, text, expected):
    with pytest.raises(ConfigError) as caught:
        open_session(preset(folder, text))
    assert expected.replace("FOLDER", str(folder)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("chain", CHAINS)
def test_null_drops_nothing_silently(folder, chain):
    with pytest.raises(ConfigError, match=re.escape(f"write `- override /{chain}: []`")) as caught:
        open_session(preset(folder, f"{chain}: null\n"))
    assert "preset/mine.yaml" in str(caught.value)
    assert members(preset(folder, f"defaults:\n  - override /{chain}: []\n"), chain) == []


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("observers=null", "observers=[] for none"),
        ("observers=3", "observers takes a list of names"),
        ("observers={jsonl: {path: x}}", "values are written observers.<name>.<key>=…"),
        ("observers=prometheus,jsonl", "observers=[a,b]"),
        ("observers=[[jsonl]]", "observers takes a list of names"),
        ("~observers=jsonl", "~observers.<name> takes one out"),
        ("~observers.jsonl", "~observers.jsonl: nothing sets observers.jsonl"),
        ("~observers.promethues", "did you mean observers.prometheus"),
        ("observers.jsonl=3", "'observers.jsonl': a mapping from key to value, {} for the defaults (got 3)"),
        ("observers.jsnol=3", "no observer is called 'jsnol'; did you mean jsonl?"),
        ("scheduler=[fcfs]", "scheduler=<name>"),
        ("scheduler=fcfs,fcfs", "scheduler=<name>"),
    ],
)
def test_mistakes_on_the_command_line(word, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        open_session([word])


def test_a_member_without_settings_says_so_and_offers_no_name():
    with pytest.raises(ConfigError, match="unknown config key 'observers.prometheus.x'; observers.prometheus has no"):
        open_session(["observers.prometheus.x=1"])
    with pytest.raises(ConfigError, match="unknown config key 'observers.jsonl.name'") as caught:
        open_session(["observers.jsonl.name=x"])
    assert "name" not in str(caught.value).split("; ", 1)[1]


@pytest.mark.parametrize("chain", CHAINS)
def test_the_terminal_commands_take_chains_for_config(chain):
    from core.commands.request_arguments import split

    parts = split([f"{chain}=[]", f"+{chain}=x", f"{chain}.x.y=1", "max_tokens=3"])
    assert (parts.overrides, parts.request) == ([f"{chain}=[]", f"+{chain}=x", f"{chain}.x.y=1"], {"max_tokens": "3"})
