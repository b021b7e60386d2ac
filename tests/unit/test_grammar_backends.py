"""What the built-in grammar backends make of grammars that others get wrong (rows L of the reported faults)."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from core.grammar.schema.normalise import normalise
from core.request import GrammarSpec
from core.stages.grammar import CompiledGrammar, GrammarBackend, GrammarError
from core.testing.grammar_examples import vocabularies
from core.testing.grammar_walks import allowed, segmented

VOCABULARY = vocabularies()[0]
BYTES = {
    token: at for at, token in enumerate(VOCABULARY.tokens) if len(token) == 1 and at not in VOCABULARY.special_ids
}
END = min(VOCABULARY.eos_ids)


def compiled(backend: GrammarBackend, kind: str, source: object, **fields: Any) -> CompiledGrammar:
    text = source if isinstance(source, str) else json.dumps(source)
    return backend.load(backend.compile(GrammarSpec(kind=kind, source=text, **fields)))


def is_in(grammar: CompiledGrammar, text: str | bytes) -> bool:
    """Byte by byte."""
    data = text.encode() if isinstance(text, str) else text
    ids = [BYTES[data[at : at + 1]] for at in range(len(data))]
    return grammar.matcher().accept([*ids, END]) == len(ids) + 1


def sorted_out(grammar: CompiledGrammar, texts: list[Any]) -> list[Any]:
    return [text for text in texts if is_in(grammar, text)]


def schema(backend: GrammarBackend, source: object) -> CompiledGrammar:
    return compiled(backend, "json_schema", source)


def test_white_space_between_tokens_is_bounded(backend):  # L1
    grammar = schema(backend, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for space, fits in ((" " * 40, True), (" " * 41, False), ("\n\t" * 21, False)):
        for text in (
            f'{{{space}"a":1}}',
            f'{{"a"{space}:1}}',
            f'{{"a":{space}1}}',
            f'{{"a":1{space}}}',
            f'{{"a":1{space},"b":2}}',
        ):
            assert is_in(grammar, text) is fits, text
    assert not is_in(grammar, ' {"a":1}') and not is_in(grammar, '{"a":1} ')
    empty = schema(backend, {"type": "object"})
    assert is_in(empty, "{" + " " * 40 + "}") and not is_in(empty, "{" + " " * 41 + "}")


def test_without_any_white_space(backend):
    values = {"type": "object", "additionalProperties": {"type": "array"}}
    grammar = compiled(backend, "json_schema", values, any_whitespace=False)
    texts = ['{"a": [1, 2], "b": []}', '{"a":[1]}', '{ "a": []}', '{"a": [1,2]}', '{"a": [] }', "{}", "{ }"]
    assert sorted_out(grammar, texts) == ['{"a": [1, 2], "b": []}', "{}"]


def test_properties_beside_patterns_for_their_names(backend):  # L3
    name = {"type": "string"}
    source = {"type": "object", "properties": {"name": name, "grade": name}, "required": ["name", "grade"]}
    try:
        grammar = schema(backend, {**source, "patternProperties": {"^grade$": name}})
    except GrammarError as error:
        assert "not supported" in str(error)
        return
    assert is_in(grammar, '{"name": "a", "grade": "b"}')
    assert not is_in(grammar, '{"name": "a", "grade": 1}') and not is_in(grammar, '{"name": 1, "grade": "b"}')


def test_other_properties_are_allowed_unless_the_schema_says_no(backend):  # L5
    source = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "c": {}}}
    texts = ['{"a": 1, "d": "x"}', '{"a": 1}', '{"d": [{}]}', '{"d": 1, "e": 2}']
    assert sorted_out(schema(backend, source), texts) == texts
    assert sorted_out(schema(backend, {**source, "additionalProperties": False}), texts) == ['{"a": 1}']
    typed = schema(backend, {**source, "additionalProperties": {"type": "integer"}})
    assert sorted_out(typed, texts) == ['{"a": 1}', '{"d": 1, "e": 2}']


def test_a_name_does_not_come_back_as_an_escape(backend):
    """`"\\u0061"` is the name a: as one of the other properties it could have any value."""
    source = {"type": "object", "properties": {"a": {"type": "integer"}, '"/\n': {"type": "null"}}}
    grammar = schema(backend, source)
    odd = [
        '{"a": "x"}',
        '{"\\u0061": "x"}',
        '{"a": 1, "\\u0061": "x"}',
        '{"a": 1, "a": 2}',
        '{"\\"\\/\\n": 1}',
        '{"\\"/\\u000a": 1}',
    ]
    assert sorted_out(grammar, odd) == []
    assert is_in(grammar, '{"a": 1, "\\"/\\n": null, "ab": "x", "": 2}')
    patterns = {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False}
    assert sorted_out(schema(backend, patterns), ['{"x": null}', '{"\\u0078": 1}', '{"x": 1}']) == ['{"x": null}']


@pytest.mark.parametrize("ascii_only", [True, False])
def test_enums_beyond_ascii(backend, ascii_only):  # L7
    values = ["在线", "北京", "é", "🔥"]
    grammar = compiled(backend, "json_schema", json.dumps({"enum": values}, ensure_ascii=ascii_only))
    assert sorted_out(grammar, [f'"{value}"' for value in values]) == [f'"{value}"' for value in values]
    for odd in ('"在"', '"Ã©"', '"e"', '""', b'"\xe9"'):
        assert not is_in(grammar, odd)
    assert written(grammar) <= {f'"{value}"' for value in values}


def test_a_slash_is_plain(backend):  # L8
    grammar = schema(backend, {"const": "http://example.com/path"})
    assert is_in(grammar, '"http://example.com/path"')
    assert written(grammar) == {'"http://example.com/path"'}


def test_lengths_count_characters(backend):  # L9
    one = schema(backend, {"type": "string", "maxLength": 1})
    texts = ['"😀"', '"\\ud83d\\ude00"', '"\\u00e9"', '"\\n"', '"\\""', '""']
    assert sorted_out(one, texts) == texts
    half = ['"\\ud83d"', '"\\ude00"', '"\\ude00\\ud83d"', '"ab"', '"\\n\\n"', '"😀😀"']
    assert sorted_out(one, half) == []
    three = schema(backend, {"type": "string", "minLength": 3})
    assert sorted_out(three, ['"a\\"b"', '"a\\"b\\n"', '"😀😀😀"', '"\\""', '"😀"', '"\\ud83d\\ude00a"']) == [
        '"a\\"b"', '"a\\"b\\n"', '"😀😀😀"'
    ]  # fmt: skip


@pytest.mark.parametrize("source", [{"type": "string"}, {"type": "string", "maxLength": 9}, {}, {"enum": ["a\u0001"]}])
def test_what_is_no_json_is_in_no_string(backend, source):  # L10
    try:
        grammar = schema(backend, source)
    except GrammarError:  # a control character can be refused
        assert "enum" in source
        return
    odd = [b'"%c"' % byte for byte in range(0x20)]
    odd += [
        b'"\\q"',
        b'"\\u12"',
        b'"\\u12g4"',
        b'"\\ud800"',
        b'"',
        b'"a',
        b'"\\"',
        b'"\xff"',
        b'"\xc3"',
        b'"\xed\xa0\x80"',
        b"'a'",
    ]
    odd += [b'"\xc0\xaf"', b'"\xf5\x80\x80\x80"', b'"\\x41"', b'"\\U0001F600"', b'"a" "b"', b'"a"b']
    assert sorted_out(grammar, odd) == []


def test_patterns_for_names_and_nothing_else(backend):  # L11
    source = {"type": "object", "patternProperties": {"^(yes|no)$": {"type": "string"}}, "additionalProperties": False}
    texts = [
        "{}",
        '{"yes": "a"}',
        '{"no": "", "yes": "b"}',
        '{"yes": 1}',
        '{"maybe": "a"}',
        '{"yess": "a"}',
        '{"": "a"}',
    ]
    assert sorted_out(schema(backend, source), texts) == texts[:3]


@pytest.mark.parametrize(
    "source",
    [
        {"properties": {"reason": {"type": "stsring"}}},
        {"type": True},
        {"type": ["string", "weird"]},
        [],
        17,
        {"type": "object", "properties": [1]},
        {"required": "a", "type": "object"},
        {"enum": 1},
        {"$ref": "http://example.com/schema"},
        {"$ref": "#/nowhere"},
        {"anyOf": []},
        {"type": "string", "minLength": -1},
        {"type": "string", "pattern": 1},
        {"type": "string", "pattern": "(?<=x)a"},
        {"const": "\ud800"},
        {"properties": {"a": 1}},
    ],
)
def test_what_is_no_schema_is_refused(backend, source):  # L12
    with pytest.raises(GrammarError) as caught:
        schema(backend, source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "keyword",
    [
        {"not": {"type": "null"}},
        {"if": {"type": "null"}, "then": False},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "null"}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "object", "minProperties": 3},
        {"items": {"not": {}}},
    ],
)
def test_keywords_that_are_not_enforced_are_refused(backend, keyword):
    with pytest.raises(GrammarError, match="not supported"):
        schema(backend, keyword)


def test_what_says_nothing_is_no_reason_to_refuse(backend):
    notes = {
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [2],
        "x-guidance": {"lenient": True},
        "deprecated": True,
    }
    grammar = schema(
        backend,
        {"type": "integer", **notes, "$comment": "c", "$schema": "https://json-schema.org/draft/2020-12/schema"},
    )
    assert sorted_out(grammar, ["12", "-3", "1.5", '"a"']) == ["12", "-3"]


@pytest.mark.parametrize(
    "pattern", ["^+[a-z]$", "^{2}times$", "(?<=x)a", "[.*", "(a", "a)", "*a", "a**", "a\\", "[z-a]", "(a)\\1"]
)
def test_patterns_that_are_none(backend, pattern):  # L14
    with pytest.raises(GrammarError, match="regular expression"):
        compiled(backend, "regex", pattern)


@pytest.mark.parametrize("depth", [1000, 60_000])
def test_deep_brackets_are_refused(backend, depth):  # L13
    deep = {"regex": "(" * depth + "a" + ")" * depth, "ebnf": "root ::= " + "(" * depth + '"a"' + ")" * depth}
    deep |= {"json_schema": '{"items":' * depth + "{}" + "}" * depth, "structural_tag": "[" * depth + "]" * depth}
    for kind, source in deep.items():
        with pytest.raises(GrammarError):
            compiled(backend, kind, source)


def test_recursion_that_is_useful_and_recursion_that_has_no_end(backend):  # L15
    left = compiled(backend, "ebnf", 'root ::= a\na ::= a "x" | "y"')
    assert sorted_out(left, ["y", "yxx", "x", "", "yy"]) == ["y", "yxx"]
    brackets = compiled(backend, "ebnf", 'root ::= ("[" root "]")*')
    assert sorted_out(brackets, ["", "[[][]]", "[]", "[[]", "]"]) == ["", "[[][]]", "[]"]
    tree = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
        "additionalProperties": False,
    }
    assert sorted_out(schema(backend, normalise(tree)), ['{"kids": [{"kids": []}, {}]}', '{"kids": [1]}']) == [
        '{"kids": [{"kids": []}, {}]}'
    ]
    for kind, source in (
        ("ebnf", "root ::= root"),
        ("ebnf", 'root ::= a\na ::= "x" a'),
    ):
        with pytest.raises(GrammarError):
            compiled(backend, kind, source)
    for source in ({"$ref": "#"}, {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}):
        with pytest.raises(GrammarError):
            schema(backend, normalise(source))


def test_what_has_no_end_is_never_led_into(backend):
    grammar = compiled(backend, "ebnf", 'root ::= "a" | "b" loop | [^\\x00-\\U0010FFFF]\nloop ::= "c" loop')
    assert written(grammar) == {"a"}


@pytest.mark.parametrize(
    "source",
    ['rout ::= "route"', "", "root", 'root ::= "a', "root ::= b", "root ::= [a", 'root ::= "a" ~', "x" * 10**5],
)
def test_ebnf_that_is_none_names_the_place(backend, source):  # L16
    with pytest.raises(GrammarError, match=r"line \d+, column \d+|no rule"):
        compiled(backend, "ebnf", source)


def test_choices_are_texts_and_no_notation(backend):
    choices = ["a\\b", 'say "x"', "tab\t", "nul\0", "{}[]()|*+?.^$/", "é\u2028", "ab", "a", "<|im_end|>", "root ::= x"]
    grammar = compiled(backend, "choice", choices)
    assert sorted_out(grammar, choices) == choices
    assert written(grammar, tries=200) <= set(choices)
    assert sorted_out(grammar, ["", "aa", "a\\", "abc", "x", "ta"]) == []


def test_nothing_is_printed(backend, capfd):
    grammar = compiled(backend, "regex", "a+b")
    matcher = grammar.matcher()
    matcher.accept([BYTES[b"a"], -1, 10**6, *VOCABULARY.special_ids, BYTES[b"x"]])
    for odd in (-1, 10**6, *sorted(VOCABULARY.special_ids - VOCABULARY.eos_ids), BYTES[b"x"]):
        matcher.accept([odd])
    for kind, source in (("regex", "a("), ("json_schema", '{"type": 1}'), ("ebnf", "?")):
        with pytest.raises(GrammarError):
            compiled(backend, kind, source)
    matcher.accept([BYTES[b"b"], END])
    matcher.forced()
    matcher.rollback(2)
    assert capfd.readouterr() == ("", "")


SPECIAL = [token_id for token_id in sorted(VOCABULARY.special_ids - VOCABULARY.eos_ids) if VOCABULARY.tokens[token_id]]


def test_control_tokens_in_a_structure_are_those_tokens(backend):
    """As in models whose calls begin with a token of their own."""
    opening, closing = (VOCABULARY.tokens[one].decode() for one in SPECIAL[:2])
    structure = {"begin": f"{opening}call ", "schema": {"const": 1}, "end": closing}
    call = [SPECIAL[0], *VOCABULARY.encode("call 1"), SPECIAL[1]]
    free = compiled(backend, "structural_tag", {"structures": [structure], "triggers": [opening]})
    text = VOCABULARY.encode("Hello")
    for ids in (call, text, [*text, *call, *text, *call], []):
        assert free.matcher().accept([*ids, END]) == len(ids) + 1
    for ids in (call[:-1], [SPECIAL[1]], [SPECIAL[0]], [*text, SPECIAL[1]]):
        assert free.matcher().accept([*ids, END]) <= len(ids)
    assert allowed(free.matcher(), VOCABULARY) & VOCABULARY.special_ids == {SPECIAL[0], *VOCABULARY.eos_ids}
    only = compiled(backend, "structural_tag", {"structures": [structure], "triggers": [opening], "at_least_one": True})
    assert allowed(only.matcher(), VOCABULARY) == {SPECIAL[0]}
    assert only.matcher().accept([*call, END]) == len(call) + 1
    with pytest.raises(GrammarError, match="ends the output"):
        end = VOCABULARY.tokens[END].decode()
        compiled(backend, "structural_tag", {"structures": [{**structure, "end": end}], "triggers": [opening]})


def test_free_text_has_no_control_tokens(backend):
    structure = {"begin": "<call>", "schema": {"const": 1}, "end": "</call>"}
    grammar = compiled(backend, "structural_tag", {"structures": [structure], "triggers": ["<call>"]})
    matcher = grammar.matcher()
    for token_id in VOCABULARY.encode("so <call>1</call> and"):
        assert allowed(matcher, VOCABULARY) & VOCABULARY.special_ids <= VOCABULARY.eos_ids
        assert matcher.accept([token_id]) == 1


def test_random_rules_against_a_slow_reading(backend):
    """Regular expressions of both backends, and Python's `re`."""
    rng = random.Random(7)
    for _ in range(150):
        pattern = random_pattern(rng, 3)
        grammar = compiled(backend, "regex", pattern)
        for _ in range(12):
            text = "".join(rng.choice("ab🔥\n") for _ in range(rng.randint(0, 5)))
            ids = segmented(VOCABULARY, text, rng)
            fits = grammar.matcher().accept([*ids, END]) == len(ids) + 1
            assert fits == (re.fullmatch(pattern, text) is not None), f"{pattern!r} and {text!r}"


def random_pattern(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.25:
        return rng.choice(["a", "b", "🔥", "[ab]", "[^a]", ".", "ab", "\\W", "[^\\s\\d]", "\\n", "[^\\n🔥]"])
    kind = rng.random()
    inner = [random_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind < 0.4:
        return "".join(inner)
    if kind < 0.7:
        return "(" + "|".join([*inner, *([""] if rng.random() < 0.2 else [])]) + ")"
    return f"(?:{inner[0]}){rng.choice(['*', '+', '?', '{2}', '{1,2}', '{0,3}', '{2,}'])}"


def written(grammar: CompiledGrammar, tries: int = 60) -> set[str]:
    """Texts that walks through masks end with."""
    found = set()
    for seed in range(tries):
        rng, matcher, text = random.Random(seed), grammar.matcher(), b""
        for _ in range(60):
            may = allowed(matcher, VOCABULARY)
            if may & VOCABULARY.eos_ids and (rng.random() < 0.5 or not may - VOCABULARY.eos_ids):
                found.add(text.decode())
                break
            token_id = rng.choice(sorted(may - VOCABULARY.eos_ids))
            assert matcher.accept([token_id]) == 1
            text += VOCABULARY.tokens[token_id]
        else:
            raise AssertionError(f"no end after {text!r}")
    return found
