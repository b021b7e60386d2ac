"""Grammars of each kind, with texts that are in them and texts that are not, and vocabularies to write them in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from core.grammar.vocabulary import read_vocabulary
from core.request import GrammarSpec
from core.stages.grammar import Vocabulary
from core.testing.sampler_reference import spec_of
from core.testing.tokenizers import byte_level_bpe, sentencepiece_bpe

PADDING = 45  # rows of the logits without a token; the last word of a mask is no whole one


@dataclass(frozen=True, slots=True)
class GrammarExample:
    spec: GrammarSpec
    texts: Sequence[str]
    others: Sequence[str]  # not in the language; several are beginnings of texts that are
    holds: Callable[[str], bool] | None = None  # of any text, whether it is in the language; None: known of these alone


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _tag(**options: object) -> str:
    schemas = {"near": {"const": 1}, "nearby": {"type": "object", "properties": {"a": {"type": "boolean"}}}}
    structures = [
        {"begin": f'<tool_call>\n{{"name": "{name}", "arguments": ', "schema": schema, "end": "}\n</tool_call>"}
        for name, schema in schemas.items()
    ]
    return json.dumps({"structures": structures, "triggers": ["<tool_call>"], **options})


_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a/b", "é", "🔥"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_CHOICES = ["yes", "no", "nope", 'a/b \\ "c"', "在线", "👩‍👩‍👧‍👦", "<s>x"]
_NEAR, _NEARBY = _call("near", "1"), _call("nearby", '{"a": true}')


def _in_brackets(text: str) -> bool:
    depth = len(text) - len(text.lstrip("("))
    inner = text[depth : len(text) - depth]
    return text == "(" * depth + inner + ")" * depth and re.fullmatch(r"[a-c0-9 é\n]+", inner) is not None


def _loaded(text: str) -> Any:
    """Its value, or an Ellipsis where it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return ...


def _is_person(value: Any) -> bool:
    if not isinstance(value, dict) or not {"name", "age"} <= value.keys() <= {"name", "age", "tags"}:
        return False
    tags = value.get("tags", [])
    known = isinstance(value["name"], str) and type(value["age"]) is int and 0 <= value["age"] <= 150
    return known and isinstance(tags, list) and len(tags) <= 2 and all(tag in ("a/b", "é", "🔥") for tag in tags)


def _is_in_range(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value) and 0 <= value <= 20


EXAMPLES = (
    GrammarExample(
        GrammarSpec(kind="choice", source=json.dumps(_CHOICES)),
        _CHOICES,
        ["", "n", "yess", "yesno", "NO", "在", "👩", "x", " yes", "yes "],
        lambda text: text in _CHOICES,
    ),
    GrammarExample(
        GrammarSpec(kind="regex", source=r"[a-c]{2,4}-[0-9]+(é|🔥)?"),
        ["ab-1", "abca-120é", "cc-0🔥"],
        ["", "a-1", "ab-", "ab-1x", "ab-1é🔥", "AB-1", "abcab-1"],
        lambda text: re.fullmatch(r"[a-c]{2,4}-[0-9]+(é|🔥)?", text) is not None,
    ),
    GrammarExample(
        GrammarSpec(
            kind="ebnf", source='root ::= "(" root ")" | item+ # one or more\nitem ::= [a-c0-9 ] | "é" | "\\n"'
        ),
        ["((a b))", "é\n1", "(((((0)))))"],
        ["", "()", "((a)", "(a))", "A", "(a)b"],
        _in_brackets,
    ),
    GrammarExample(
        GrammarSpec(kind="json_object"),
        ["{}", '{"a": [1, 2.5e3, null, true], "b": {"c": "é \\n \\" 🔥"}}', '{ "a" : -0.5 }'],
        ["", "[]", '"a"', "{", '{"a" 1}', '{"a": 01}', "{'a': 1}", '{"a": 1,}', '{"a": "\\x"}', '{"a": "\n"}', "{} {}"],
        lambda text: isinstance(_loaded(text), dict),
    ),
    GrammarExample(
        GrammarSpec(kind="json_schema", source=json.dumps(_PERSON)),
        ['{"name": "Ann", "age": 150}', '{"name":"é\\"","age":0,"tags":["a/b","🔥"]}', '{ "name" : "" , "age" : 7 }'],
        [
            "{}",
            '{"name": "Ann"}',
            '{"name": "Ann", "age": 151}',
            '{"name": 1, "age": 1}',
            '{"name": "A", "age": 1, "b": 2}',
        ],
        lambda text: _is_person(_loaded(text)),
    ),
    GrammarExample(
        GrammarSpec(kind="json_schema", source=json.dumps(_PERSON), any_whitespace=False),
        ['{"name": "Ann", "age": 150}', '{"name": "", "age": 0, "tags": ["é"]}'],
        ['{ "name": "Ann", "age": 150}', '{"name": "Ann"}', '{"name": "Ann", "age": 1.5}'],
        lambda text: _is_person(_loaded(text)),
    ),
    GrammarExample(
        GrammarSpec(kind="json_schema", source='{"type":"integer","minimum":0,"maximum":20}'),
        ["0", "7", "19", "20"],
        ["", "-1", "21", "07", "1.5", "200", '"7"', "null"],
        lambda text: _is_in_range(_loaded(text)),
    ),
    GrammarExample(
        GrammarSpec(kind="json_schema", source=json.dumps({"enum": ["a/b", "é", 1, None, {"a": [True]}]})),
        ['"a/b"', '"é"', "1", "null", '{"a": [true]}'],
        ["", '"a"', '"é', "2", "[true]", '"A/B"', '{"a": []}', '{"a": [true]'],
    ),
    GrammarExample(
        GrammarSpec(kind="structural_tag", source=_tag()),
        ["", "Hello.", _NEAR, f"Let me see. {_NEARBY} So {_NEAR}", "a < b"],
        [
            f"{_NEAR[:-1]}",
            "<tool_call>",
            "so <tool_call>\n",
            _call("far", "1"),
            _call("near", "2"),
            f"{_NEAR}<tool_call>x",
        ],
    ),
    GrammarExample(
        GrammarSpec(kind="structural_tag", source=_tag(at_least_one=True, separator="\n")),
        [_NEAR, f"{_NEAR}\n{_NEARBY}\n{_NEAR}"],
        ["", "Hello.", f"Let me see. {_NEAR}", f"{_NEAR}{_NEAR}", f"{_NEAR}\n", f"{_NEAR} So."],
    ),
    GrammarExample(
        GrammarSpec(kind="structural_tag", source=_tag(at_least_one=True, stop_after_first=True)),
        [_NEAR, _NEARBY],
        ["", "Hello.", f"{_NEAR}\n{_NEAR}", f"{_NEAR} "],
    ),
    GrammarExample(
        GrammarSpec(kind="structural_tag", source=_tag(stop_after_first=True)),
        ["", "Hello.", f"Let me see. {_NEAR}"],
        ["<tool_call>", f"{_NEAR}\n", f"{_NEAR}{_NEAR}"],
    ),
)

NO_TEXT = (
    GrammarSpec(kind="choice", source="[]"),
    GrammarSpec(kind="regex", source="(a"),
    GrammarSpec(kind="regex", source="[^\\s\\S]"),
    GrammarSpec(kind="ebnf", source="root ::= root"),
    GrammarSpec(kind="ebnf", source='root := "a"'),
    GrammarSpec(kind="json_schema", source="false"),
    GrammarSpec(kind="json_schema", source='{"type": "stsring"}'),
    GrammarSpec(kind="json_schema", source="[1"),
    GrammarSpec(kind="structural_tag", source='{"structures": [], "triggers": ["<a>"]}'),
    GrammarSpec(kind="structural_tag", source="{}"),
)
"""No grammars, or such that no text is in."""


KEYWORDS: Sequence[tuple[Any, Sequence[str]]] = (
    ({"type": ["string", "null"]}, ["1", "true", "{}", "[]"]),
    ({"type": "integer"}, ["1.5", '"1"']),
    ({"enum": ["a", 1]}, ['"b"', "2", '"a', "null"]),
    ({"enum": [1, 2, 3], "multipleOf": 2}, ["1", "3"]),
    ({"const": {"a": 1}}, ["{}", '{"a": 2}', '{"a": 1, "b": 1}']),
    ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, ["1", '"null"']),
    ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "boolean"}}}, ["1", '"a"']),
    ({"type": "integer", "minimum": 3}, ["2", "-3", "0"]),
    ({"type": "integer", "maximum": 3}, ["4", "30"]),
    ({"type": "number", "minimum": 3, "maximum": 7.5}, ["2.5", "7.6", "-4", "3e1"]),
    ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 7}, ["3", "3.0", "7", "8", "0.5"]),
    ({"type": "integer", "minimum": 0, "maximum": 20, "multipleOf": 7}, ["1", "8", "20"]),
    ({"type": "number", "multipleOf": 0.5}, ["0.3", "1.25"]),
    ({"type": "string", "minLength": 2}, ['""', '"a"', '"🔥"', '"\\n"', '"\\u00e9"']),
    ({"type": "string", "maxLength": 2}, ['"abc"', '"éé🔥"', '"\\n\\n\\n"']),
    ({"type": "string", "pattern": "^[a-c]+$"}, ['""', '"d"', '"abcd"', '"\\u0064"', '"a\\n"']),
    ({"type": "string", "pattern": "b"}, ['""', '"a"', '"\\u0061"']),
    ({"type": "string", "allOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}, ['"a"', '"b"']),
    ({"type": "string", "format": "ipv4"}, ['"x"', '"1.2.3"', '"256.1.1.1"']),
    ({"type": "array", "prefixItems": [{"type": "null"}]}, ["[1]", '["a", null]']),
    ({"type": "array", "items": {"type": "null"}}, ["[1]", "[null, 1]"]),
    ({"type": "array", "prefixItems": [{}], "items": False}, ["[1, 2]"]),
    ({"type": "array", "minItems": 2}, ["[]", "[1]"]),
    ({"type": "array", "maxItems": 2}, ["[1, 2, 3]"]),
    ({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}, ["[1, 1]", "[2, 2]"]),
    ({"type": "array", "maxItems": 2, "contains": {"type": "null"}}, ["[]", "[1]", "[1, 2]"]),
    ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, ["[1, 2]"]),
    ({"type": "object", "properties": {"a": {"type": "null"}}}, ['{"a": 1}', '{"\\u0061": 1}', '{"b": 1, "a": 1}']),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, ["{}", '{"b": 1}']),
    ({"type": "object", "required": ["a", "b"]}, ["{}", '{"a": 1}', '{"b": 1}']),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, ['{"b": 1}', '{"a": 1, "b": 1}']),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}}, ['{"b": 1}', '{"a": 1, "c": 2}']),
    (
        {"type": "object", "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False},
        ['{"a": 1}', '{"ab": 1}', '{"b": null}', '{"\\u0061": 1}'],
    ),
    ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, ['{"a": 1}', '{"b": 1, "ab": 1}']),
    ({"type": "object", "minProperties": 1}, ["{}"]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, ['{"a": 1, "b": 1}', '{"a": 1, "c": 1}']),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, ['{"b": 1}', '{"a": 1, "b": 1}']),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ['{"a": 1}']),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, ['{"a": 1}']),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, ['{"b": 1}']),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, ['""', "1"]),
    ({"oneOf": [{"type": "integer"}, {"enum": [1, "a"]}]}, ["1", '"b"']),
    ({"not": {"type": "null"}}, ["null"]),
    ({"type": "integer", "not": {"const": 1}}, ["1"]),
    ({"if": {"type": "string"}, "then": {"enum": ["a"]}, "else": {"type": "null"}}, ['"b"', "1"]),
)  # fmt: skip
"""Schemas with texts that one of their keywords forbids: those of normalised schemas (`GrammarBackend.compile`), and others."""


@cache
def vocabularies() -> tuple[Vocabulary, ...]:
    """One of each kind of tokenizer; both have several ids of the end."""
    found = []
    for tokenizer in (byte_level_bpe(), sentencepiece_bpe(prefix_space=True)):
        spec = spec_of(tokenizer.vocab_size + PADDING, tokenizer.eos_token_ids)
        found.append(read_vocabulary(spec, tokenizer))
    return tuple(found)
