"""What a client may ask its answer to be: fields to one grammar, what is refused by which path. Rows L2, L12, L13, L16."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from core.commands.request_arguments import split
from core.errors import ConfigError, RequestError
from core.request import GrammarSpec, SamplingParams
from core.stages.renderer import RendererContext
from core.stages.text_renderer import Text
from core.testing.engines import fake_spec
from core.testing.tokenizers import byte_level_bpe
from plugins.frontends.offline import Line
from plugins.frontends.openai_http.fields import check_fields
from plugins.frontends.openai_http.parse import validate
from plugins.frontends.openai_http.response_format import grammar_of
from plugins.frontends.openai_http.schema import ChatBody, CompletionBody, bounded
from plugins.frontends.openai_http.settings import Bounds
from plugins.frontends.structured_outputs import closed_schema

BODIES = [
    (bounded(ChatBody, Bounds()), {"messages": [{"role": "user", "content": "x"}]}),
    (bounded(CompletionBody, Bounds()), {"prompt": "x"}),
]
SCHEMA = {"type": "object", "properties": {"b": {"enum": ["é", "🔥"]}, "a": {"type": "integer"}}, "required": ["b"]}
TEXT = '{"type":"object","properties":{"b":{"enum":["é","🔥"]},"a":{"type":"integer"}},"required":["b"]}'
NAMED = {"name": "answer", "schema": SCHEMA}
RESPONSE = {"type": "json_schema", "json_schema": NAMED}
STRUCTURE = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
TAG = {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<f"]}
TAG_TEXT = f'{{"structures":[{{"begin":"<f>","schema":{TEXT},"end":"</f>"}}],"triggers":["<f"]'


def asked(which=0, **fields):
    model, body = BODIES[which]
    return grammar_of(validate(model, check_fields({**body, **fields}, model.model_fields)))


def spec(**fields):
    found = [asked(which, **fields) for which in (0, 1)]
    assert found[0] == found[1], "chats and completions take the same"
    return found[0].spec


def refused(**fields):
    errors = []
    for which in (0, 1):
        with pytest.raises(RequestError) as caught:
            asked(which, **fields)
        errors.append((caught.value.param, caught.value.code, caught.value.message))
    assert errors[0] == errors[1]
    return caught.value


def outputs(**values):
    return {"structured_outputs": values}


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        ({"response_format": RESPONSE}, "json_schema", TEXT, "response_format.json_schema.schema"),
        ({"response_format": TAG}, "structural_tag", TAG_TEXT + "}", "response_format"),
        (outputs(json=SCHEMA), "json_schema", TEXT, "structured_outputs.json"),
        (outputs(json=json.dumps(SCHEMA)), "json_schema", TEXT, "structured_outputs.json"),
        (outputs(json={}), "json_schema", "{}", "structured_outputs.json"),
        (outputs(json_object=True), "json_object", "", "structured_outputs.json_object"),
        (outputs(regex="[a-z]+\n"), "regex", "[a-z]+\n", "structured_outputs.regex"),
        (outputs(choice=["yes", "né"]), "choice", '["yes","né"]', "structured_outputs.choice"),
        (outputs(grammar='root ::= "a"'), "ebnf", 'root ::= "a"', "structured_outputs.grammar"),
        (outputs(structural_tag=TAG), "structural_tag", TAG_TEXT + "}", "structured_outputs.structural_tag"),
        (
            outputs(structural_tag=json.dumps(TAG)),
            "structural_tag",
            TAG_TEXT + "}",
            "structured_outputs.structural_tag",
        ),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA, ensure_ascii=True)}, "json_schema", TEXT, "guided_json"),
        ({"guided_regex": "a|b"}, "regex", "a|b", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", '["a"]', "guided_choice"),
        ({"guided_grammar": "root ::= [0-9]"}, "ebnf", "root ::= [0-9]", "guided_grammar"),
    ],
)
def test_every_way_to_ask(fields, kind, source, param):
    assert spec(**fields) == GrammarSpec(kind=kind, source=source)
    assert asked(0, **fields).param == param


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"response_format": {"type": "text"}},
        outputs(),
        outputs(json=None, choice=None, json_object=False, disable_any_whitespace=False, backend=None),
    ],
)
def test_nothing_is_asked(fields):
    assert asked(0, **fields) is asked(1, **fields) is None


def test_options():
    options = {"disable_any_whitespace": True, "backend": "xgrammar"}
    expected = GrammarSpec(kind="json_schema", source=TEXT, any_whitespace=False, backend="xgrammar")
    assert spec(**outputs(json=SCHEMA, **options)) == expected
    assert spec(response_format=RESPONSE, **outputs(**options)) == expected, "options of another field's grammar"
    assert spec(guided_json=SCHEMA, guided_decoding_backend="xgrammar").backend == "xgrammar"
    assert spec(**outputs(regex="a", backend="auto")).backend == ""
    assert spec(**outputs(regex="a", disable_fallback=True, backend="b")).backend == "b"


def test_options_for_tools_say_where_they_belong():
    message = refused(**outputs(disable_additional_properties=True)).message
    assert message.endswith("; for `tools`, write `additionalProperties: false` in their `parameters`.")


def test_l5_only_who_asks_for_it_gets_no_additional_properties():
    for strict in (True, False, None):
        named = {**NAMED, "strict": strict, "description": "what it is for"}
        assert spec(response_format={"type": "json_schema", "json_schema": named}).source == TEXT
    closed = json.loads(spec(**outputs(json=SCHEMA, disable_additional_properties=True)).source)
    assert closed == {**SCHEMA, "additionalProperties": False}
    tag = spec(**outputs(structural_tag=TAG, disable_additional_properties=True))
    assert json.loads(tag.source)["structures"][0]["schema"] == closed


def test_closed_schemas():
    part = {"properties": {"a": {}}}
    done = {**part, "additionalProperties": False}
    assert closed_schema({"items": part, "anyOf": [part, True]}) == {"items": done, "anyOf": [done, True]}
    assert closed_schema({"$defs": {"x": part}}) == {"$defs": {"x": done}}
    assert closed_schema({"properties": {"properties": part}}) == {
        "properties": {"properties": done},
        "additionalProperties": False,
    }
    for kept in (
        {"not": part},
        {"if": part},
        {"const": part},
        {"enum": [part]},
        {**part, "additionalProperties": True},
    ):
        assert closed_schema(kept) == kept
    before = json.dumps(SCHEMA)
    closed_schema(SCHEMA)
    assert json.dumps(SCHEMA) == before, "what was sent is left alone"


@pytest.mark.parametrize(
    ("fields", "both"),
    [
        ({"response_format": RESPONSE, **outputs(json=SCHEMA)}, ["response_format.json_schema.schema", "outputs.json"]),
        (outputs(json=SCHEMA, regex="a"), ["structured_outputs.json", "structured_outputs.regex"]),
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, ["guided_json", "guided_choice"]),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, ["response_format", "guided_regex"]),
    ],
)
def test_two_grammars_are_one_too_many(fields, both):
    error = refused(**fields)
    assert all(name in error.message for name in both) and error.param.endswith(both[1])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": "no"}}},
            "response_format.json_schema.strict",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        (outputs(jsn=SCHEMA), "structured_outputs.jsn"),
        (outputs(json=[1]), "structured_outputs.json"),
        (outputs(json=5), "structured_outputs.json"),
        (outputs(json="[]"), "structured_outputs.json"),
        (outputs(json="true"), "structured_outputs.json"),
        (outputs(json='{"a": 1'), "structured_outputs.json"),
        (outputs(json='{"a": 1, "a": 2}'), "structured_outputs.json"),
        (outputs(json='{"a": NaN}'), "structured_outputs.json"),
        (outputs(json="[" * 100_000), "structured_outputs.json"),
        (outputs(json_object=1), "structured_outputs.json_object"),
        (outputs(regex=""), "structured_outputs.regex"),
        (outputs(regex=["a"]), "structured_outputs.regex"),
        (outputs(choice=[]), "structured_outputs.choice"),
        (outputs(choice=["a", ""]), "structured_outputs.choice[1]"),
        (outputs(choice=["a", 1]), "structured_outputs.choice[1]"),
        (outputs(choice="ab"), "structured_outputs.choice"),
        (outputs(grammar=""), "structured_outputs.grammar"),
        (outputs(regex="a", whitespace_pattern=" ?"), "structured_outputs.whitespace_pattern"),
        (outputs(whitespace_pattern=" ?"), "structured_outputs.whitespace_pattern"),
        (outputs(regex="a", backend="no/name"), "structured_outputs.backend"),
        (outputs(regex="a", disable_fallback=True), "structured_outputs.disable_fallback"),
        (outputs(backend="xgrammar"), "structured_outputs.backend"),
        (outputs(disable_any_whitespace=True), "structured_outputs.disable_any_whitespace"),
        (outputs(regex="a", disable_any_whitespace=True), "structured_outputs.disable_any_whitespace"),
        (outputs(choice=["a"], disable_any_whitespace=True), "structured_outputs.disable_any_whitespace"),
        (outputs(regex="a", disable_additional_properties=True), "structured_outputs.disable_additional_properties"),
        (
            outputs(json_object=True, disable_additional_properties=True),
            "structured_outputs.disable_additional_properties",
        ),
        (
            {"guided_grammar": "root ::= [a]", **outputs(disable_additional_properties=True)},
            "structured_outputs.disable_additional_properties",
        ),
        (outputs(disable_additional_properties=True), "structured_outputs.disable_additional_properties"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": {}}, "guided_choice"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_decoding_backend": "a", **outputs(regex="a", backend="b")}, "guided_decoding_backend"),
    ],
)
def test_l12_l13_l16_what_is_wrong_is_named(fields, param):
    error = refused(**fields)
    assert error.param == param and param in error.message and error.status == 400


def test_l16_where_a_text_is_wrong_is_told():
    assert "line 2 column 5" in refused(guided_json='{\n"a" 1}').message


# --- structural tags ------------------------------------------------------------------------------

CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TAGS = [{"type": "tag", "begin": "<f>", "content": CONTENT, "end": "</f>"}]
ONE = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}


def tag(**values):
    return outputs(structural_tag={"type": "structural_tag", **values})


@pytest.mark.parametrize(
    ("form", "source"),
    [
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS},
            {"triggers": ["<f"]},
        ),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": TAGS, "at_least_one": True, "stop_after_first": True},
            {"triggers": ["<"], "at_least_one": True, "stop_after_first": True},
        ),
        (
            {"type": "tags_with_separator", "tags": TAGS, "separator": "\n", "at_least_one": True},
            {"triggers": ["<f>"], "at_least_one": True, "separator": "\n"},
        ),
        (TAGS[0], {"triggers": ["<f>"], "at_least_one": True, "stop_after_first": True}),
    ],
)
def test_the_newer_form_of_a_structural_tag(form, source):
    assert json.loads(spec(**tag(format=form)).source) == {"structures": [ONE], **source}
    assert spec(response_format={"type": "structural_tag", "format": form}) == spec(**tag(format=form))


PATH = "structured_outputs.structural_tag"


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({}, f"{PATH}.structures"),
        ({"structures": [], "triggers": ["<f"]}, f"{PATH}.structures"),
        ({"structures": [STRUCTURE], "triggers": []}, f"{PATH}.triggers"),
        ({"structures": [STRUCTURE], "triggers": ["<g"]}, f"{PATH}.structures[0].begin"),
        ({"structures": [{**STRUCTURE, "schema": 5}], "triggers": ["<f"]}, f"{PATH}.structures[0].schema"),
        ({"structures": [{**STRUCTURE, "begin": ""}], "triggers": ["<f"]}, f"{PATH}.structures[0].begin"),
        ({"structures": [STRUCTURE], "triggers": ["<f"], "format": TAGS[0]}, f"{PATH}.structures"),
        ({"format": {"type": "any_text"}}, f"{PATH}.format.type"),
        ({"format": "tag"}, f"{PATH}.format.type"),
        ({"format": {**TAGS[0], "content": {"type": "any_text"}}}, f"{PATH}.format.content.type"),
        ({"format": {**TAGS[0], "end": ["a", "b"]}}, f"{PATH}.format.end"),
        (
            {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS, "at_least_one": True}},
            f"{PATH}.format.at_least_one",
        ),
        (
            {"format": {"type": "tags_with_separator", "tags": TAGS, "separator": ","}},
            f"{PATH}.format.at_least_one",
        ),
        ({"format": {"type": "triggered_tags", "triggers": ["x"], "tags": TAGS}}, f"{PATH}.format.tags[0].begin"),
    ],
)
def test_structural_tags_that_cannot_be_served(values, param):
    error = refused(**tag(**values))
    assert error.param == param and param in error.message


# --- conflicts with other fields ------------------------------------------------------------------

JSON = GrammarSpec(kind="json_schema", source="{}")


@pytest.fixture(scope="module")
def renderer():
    tokenizer = byte_level_bpe()
    model = fake_spec(tokenizer.vocab_size)
    return Text(Text.Settings(), RendererContext(model, tokenizer)), model, tokenizer


def test_conflicts_that_can_be_seen_are_refused(renderer):
    text, model, tokenizer = renderer
    eos = min(model.eos_token_ids)
    letter = next(i for i in tokenizer.encode("x", False) if tokenizer.token_bytes(i))
    choice = GrammarSpec(kind="choice", source='["yes","né"]')
    wrong = [
        ("ignore_eos", {"grammar": JSON, "ignore_eos": True}),
        ("allowed_token_ids", {"grammar": JSON, "allowed_token_ids": (letter,)}),
        ("min_tokens", {"grammar": choice, "min_tokens": 4}),
        ("bad_words", {"grammar": choice, "bad_words": ("né", "yes", "no")}),
        ("allowed_token_ids", {"allowed_token_ids": (letter,), "logit_bias": {letter: -100.0}}),
        ("allowed_token_ids", {"allowed_token_ids": (letter,), "bad_words": ("x",)}),
    ]
    for param, fields in wrong:
        with pytest.raises(RequestError) as caught:
            text.prepare(SamplingParams(**fields))
        assert caught.value.param == param
    fine = [
        {"grammar": JSON, "stop": ("}",), "stop_token_ids": (eos, letter), "allowed_token_ids": (letter, eos)},
        {"grammar": choice, "min_tokens": 3, "bad_words": ("yes",)},
        {"grammar": GrammarSpec(kind="regex", source="[a-z]+\n"), "stop": ("\n",), "stop_token_ids": (letter,)},
        {"ignore_eos": True, "stop": ("}",)},
        {"allowed_token_ids": (letter, eos), "logit_bias": {letter: -100.0}},
        {"allowed_token_ids": (letter,), "logit_bias": {letter: -99.0}},
    ]
    for fields in fine:
        assert text.prepare(SamplingParams(**fields)).grammar == fields.get("grammar")


# --- generate and the terminal chat ---------------------------------------------------------------


def line(**fields):
    return Line.model_validate({"prompt": "x", **fields})


def test_generate_takes_the_same_fields():
    params = line(
        structured_outputs={"json": SCHEMA, "backend": "xgrammar"},
        logit_bias={"5": -100},
        allowed_token_ids=[1, 2],
        bad_words=["x"],
        repetition_detection={"max_pattern_size": 4},
    ).params()
    assert params.grammar == GrammarSpec(kind="json_schema", source=TEXT, backend="xgrammar")
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ({5: -100.0}, (1, 2), ("x",))
    assert params.repetition_detection.max_pattern_size == 4
    assert line().params() == SamplingParams()
    assert (line(structured_outputs={"regex": "a"}).grammar_param, line().grammar_param) == (
        "structured_outputs.regex",
        "",
    )


@pytest.mark.parametrize(
    ("fields", "spec", "param"),
    [
        ({"response_format": {"type": "json_object"}}, ("json_object", ""), "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            ("json_schema", TEXT),
            "response_format.json_schema.schema",
        ),
        ({"guided_json": SCHEMA}, ("json_schema", TEXT), "guided_json"),
        ({"guided_json": TEXT}, ("json_schema", TEXT), "guided_json"),
        ({"guided_regex": "[0-9]+"}, ("regex", "[0-9]+"), "guided_regex"),
        ({"guided_choice": ["yes", "no"]}, ("choice", '["yes","no"]'), "guided_choice"),
        ({"guided_grammar": "root ::= [0-9]"}, ("ebnf", "root ::= [0-9]"), "guided_grammar"),
    ],
)
def test_generate_takes_a_grammar_in_every_field_of_the_server(fields, spec, param):
    asked = line(**fields, guided_decoding_backend="xgrammar")
    assert asked.params().grammar == GrammarSpec(kind=spec[0], source=spec[1], backend="xgrammar")
    assert (asked.grammar_param, asked.grammar_backend_param) == (param, "guided_decoding_backend")


def test_a_command_line_may_name_any_of_them():
    parts = split(
        [
            'structured_outputs={"regex": "[0-9]+"}',
            "structured_outputs.max_bytes=99",
            "guided_regex=[0-9]+",
            'guided_choice=["a","b"]',
            "guided_grammar={a}",
        ]
    )
    assert parts.overrides == ["structured_outputs.max_bytes=99"]
    assert parts.request == {
        "structured_outputs": {"regex": "[0-9]+"},
        "guided_regex": "[0-9]+",
        "guided_choice": ["a", "b"],
        "guided_grammar": "{a}",
    }
    with pytest.raises(ConfigError, match="is not JSON") as caught:
        split(["structured_outputs={regex: a}"])
    assert """write it as in structured_outputs='{"regex": "[0-9]+"}'""" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
            "`structured_outputs.json` and `structured_outputs.regex`",
        ),
        ({"structured_outputs": {"jsn": 1}}, "`structured_outputs.jsn`; did you mean json?"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"backend": "a"}}, "needs a grammar"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "`structured_outputs.regex` and `guided_regex`"),
        ({"response_format": {"type": "json"}}, "`response_format.type` is one of"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_decoding_backend": "a"}, "`guided_decoding_backend` needs a grammar"),
        ({"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2}}, "larger than max_pattern_size"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
    ],
)
def test_generate_names_what_is_wrong(fields, words):
    with pytest.raises((ValidationError, RequestError)) as caught:
        line(**fields)
    assert words in str(caught.value)
