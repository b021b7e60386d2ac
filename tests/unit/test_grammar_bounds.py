"""What a client's grammar may be, judged before anything compiles it."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import RequestError
from core.grammar.bounds import bounded
from core.grammar.pattern_bounds import NESTED_REPEATS
from core.request import GRAMMAR_KINDS, GrammarSpec
from core.settings import StructuredOutputSettings

LIMITS = StructuredOutputSettings()
SMALL = StructuredOutputSettings(max_bytes=200, max_depth=4, max_nodes=6, max_choices=3, max_pattern=20, max_repeat=10)


def source_of(kind: str, source: str, limits: StructuredOutputSettings = LIMITS) -> str:
    return bounded(GrammarSpec(kind=kind, source=source), limits, "response_format").source


def refused(kind: str, source: str, limits: StructuredOutputSettings = LIMITS) -> RequestError:
    with pytest.raises(RequestError) as caught:
        source_of(kind, source, limits)
    assert caught.value.status == 400 and caught.value.param == "response_format"
    assert caught.value.message.startswith("response_format: ")
    return caught.value


def deep(levels: int) -> str:
    return '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)


@pytest.mark.parametrize(
    ("kind", "allowed", "too_much", "key"),
    [
        ("json_schema", '{"a":"' + "x" * 192 + '"}', '{"a":"' + "x" * 193 + '"}', "max_bytes"),
        ("json_schema", '{"a":"' + "é" * 96 + '"}', '{"a":"' + "é" * 97 + '"}', "max_bytes"),
        ("json_schema", deep(4), deep(5), "max_depth"),
        ("json_schema", '{"a":[[],[],[],[]]}', '{"a":[[],[],[],[],[]]}', "max_nodes"),
        ("json_schema", '{"enum":[1,2,3]}', '{"enum":[1,2,3,4]}', "max_choices"),
        ("json_schema", '{"anyOf":[1,2,3]}', '{"x":{"anyOf":[1,2,3,4]}}', "max_choices"),
        ("json_schema", '{"pattern":"' + "a" * 20 + '"}', '{"pattern":"' + "a" * 21 + '"}', "max_pattern"),
        ("json_schema", '{"patternProperties":{"a{10}":{}}}', '{"patternProperties":{"a{11}":{}}}', "max_repeat"),
        ("regex", "a" * 20, "a" * 21, "max_pattern"),
        ("regex", "((((a))))", "(((((a)))))", "max_depth"),
        ("regex", "[[[[", "[[[[[", "max_depth"),
        ("regex", "a{10}", "a{11}", "max_repeat"),
        ("regex", "a{2,10}", "a{2,11}", "max_repeat"),
        ("regex", "a{10,}", "a{ 11 , }", "max_repeat"),
        ("regex", "(a{10}b{10}){10}", "(a{10}){10}{2}", "max_repeat"),
        ("choice", '["a","b","c"]', '["a","b","c","d"]', "max_choices"),
        ("ebnf", "root ::= ((((x))))", "root ::= (((((x)))))", "max_depth"),
        ("ebnf", 'root ::= "a" | "b" | "c"', 'root ::= "a" | "b" | "c" | "d"', "max_choices"),
        (
            "ebnf",
            "root ::= a\n" + "a ::= b\n" * 5,
            "root ::= a\n" + "".join(f"a{i} ::= b\n" for i in range(6)),
            "max_nodes",
        ),
        ("ebnf", 'root ::= "a"{10}', 'root ::= "a"{11}', "max_repeat"),
    ],
)
def test_each_bound_is_where_it_says(kind: str, allowed: str, too_much: str, key: str) -> None:
    source_of(kind, allowed, SMALL)
    error = refused(kind, too_much, SMALL)
    assert error.code == "too_large"
    assert f"{getattr(SMALL, key)} is the limit" in error.message and f"structured_outputs.{key}" in error.message


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json_schema", "", "no JSON"),
        ("json_schema", '{"a":', "no JSON"),
        ("json_schema", "}}}}{{", "no JSON"),
        ("json_schema", '{"a":NaN}', "NaN is no JSON"),
        ("json_schema", '{"a":-Infinity}', "-Infinity is no JSON"),
        ("json_schema", '{"a":1e999}', "a number is too large"),
        ("json_schema", '{"a":' + "9" * 400 + "}", "a number is too large"),
        ("json_schema", '{"a":-' + "9" * 5000 + "}", "a number is too large"),
        ("json_schema", "[]", "not a list"),
        ("json_schema", "3", "not a number"),
        ("json_schema", '"object"', "not a text"),
        ("json_schema", "null", "not null"),
        ("choice", "[]", "at least one"),
        ("choice", '["a", 1]', "list of texts"),
        ("choice", '{"a": 1}', "list of texts"),
        ("ebnf", "", "no rule that is called root"),
        ("ebnf", 'rout::="route"', "no rule that is called root"),
        ("ebnf", 'root ::= "a"\nx ::= )', "line 2, column 7: ) closes nothing"),
        ("ebnf", 'root ::= (\n"a"', "line 2, column 4: a ( is not closed"),
        ("structural_tag", "[]", "the structural tag"),
        ("structural_tag", '{"structures":[],"triggers":[]}', "no structures"),
        ("structural_tag", '{"structures":[{"begin":"<a>","schema":{},"end":""}],"triggers":["<b"]}', "no trigger"),
        ("structural_tag", '{"structures":[{"begin":"<a>","schema":3,"end":""}],"triggers":["<a"]}', "schema"),
        ("structural_tag", '{"structures":[{"begin":"<a>","end":""}],"triggers":["<a"]}', "schema"),
    ],
)
def test_what_is_malformed_is_refused_with_a_reason(kind: str, source: str, words: str) -> None:
    error = refused(kind, source)
    assert error.code == "invalid_grammar" and words in error.message


@pytest.mark.parametrize("source", ['{"const":"\\ud800"}', '{"const":"\ud800"}', '{"\\udc00":1}'])
def test_a_lone_surrogate_is_refused(source: str) -> None:
    """It has no UTF-8 form: nothing that follows could carry it."""
    assert refused("json_schema", source).code == "invalid_unicode"


def test_json_is_written_in_one_way() -> None:
    """Equal schemas are one entry of the cache, however they were sent; the order of properties is part of a schema."""
    same = {source_of("json_schema", text) for text in ('{"a": "é", "b": [1, 2]}', '{ "a":"\\u00e9",\n"b":[1,2] }')}
    assert same == {'{"a":"é","b":[1,2]}'}
    assert source_of("json_schema", '{"b":1,"a":2}') == '{"b":1,"a":2}'
    assert source_of("json_schema", '{"a":1,"a":2}') == '{"a":2}'  # nothing behind it can see another value


def test_brackets_inside_of_texts_do_not_count() -> None:
    text = json.dumps({"const": "[{" * 40 + '\\"' + "}" * 3})
    assert json.loads(source_of("json_schema", text, SMALL)) == json.loads(text)
    assert source_of("ebnf", 'root ::= "((((((" [)\\](] # ((((((\n', SMALL)
    assert source_of("regex", r"\(\(\(\(\(\([(((((((]", SMALL.model_copy(update={"max_pattern": 99}))


@pytest.mark.parametrize("name", ["enum", "pattern", "patternProperties", "type"])
def test_a_property_may_be_called_like_a_keyword(name: str) -> None:
    schema = {"properties": {name: {"type": "string"}}}
    assert json.loads(source_of("json_schema", json.dumps(schema))) == schema


def test_what_else_a_grammar_says_is_kept_and_an_artifact_is_not() -> None:
    narrow = LIMITS.model_copy(update={"any_whitespace": False})
    assert not bounded(GrammarSpec(kind="json_object"), narrow, "p").any_whitespace
    assert bounded(GrammarSpec(kind="regex", source="a"), narrow, "p").any_whitespace, "JSON's alone"
    spec = GrammarSpec(kind="json_object", source="x", any_whitespace=False, backend="b", artifact=b"forged")
    assert bounded(spec, LIMITS, "p") == GrammarSpec(kind="json_object", any_whitespace=False, backend="b")


LONG = LIMITS.max_bytes - 8
HARD = {
    "json_schema": [
        '"' + '\\"' * (LONG // 2),
        '"' * LONG,
        "\\" * LONG,
        '{"' * (LONG // 2),
        "1" * LONG,
        " " * LONG,
        '"\\' * (LONG // 2),
    ],
    "regex": ["{" * 500, "{ " * 250, "{1," * 160, "[" + "]" * 500, "\\" * 500, "a{1}" * 120],
    "ebnf": [
        "{ " * (LONG // 2),
        '"' * LONG,
        '"\\' * (LONG // 2),
        "[" * LONG,
        "a" * LONG,
        "a " * (LONG // 2),
        "#" * LONG,
        "::=" * (LONG // 3),
    ],
    "choice": ["[" * LONG, '["",' * (LONG // 4)],
    "structural_tag": ['{"structures":[' * 4000],
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", HARD)
def test_a_scan_does_not_begin_anew(kind: str) -> None:
    """Of 64 KiB, one that did at each bracket or quote would take minutes."""
    for source in HARD[kind]:
        with suppress(RequestError):
            source_of(kind, source)


@given(st.sampled_from(GRAMMAR_KINDS), st.text(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_text_passes_or_is_refused(kind: str, source: str) -> None:
    try:
        source_of(kind, source)
    except RequestError as error:
        assert error.status == 400
        error.message.encode()


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda node: st.lists(node) | st.dictionaries(st.text(), node), max_leaves=40)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_a_schema_means_the_same_afterwards(value: object) -> None:
    schema = {"default": value}
    try:
        text = json.dumps(schema)
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    assert json.loads(source_of("json_schema", text)) == schema


def test_nested_repetitions_multiply() -> None:
    limits = StructuredOutputSettings(max_repeat=10)
    assert NESTED_REPEATS * 10 == 160
    source_of("regex", "((a{4}){4}){10}", limits)
    refused("regex", "((a{5}){4}){10}", limits)
    refused("regex", "(((a{10}){10}b)c){2}", limits)
    refused("ebnf", 'root ::= (("a"{10} "b"){10}){2}', limits)
