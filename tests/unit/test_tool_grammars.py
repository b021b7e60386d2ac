"""`ToolParser.grammar` of each format: whatever a model could write under it, the same parser reads back as valid calls."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from core.grammar.compilation import normalised
from core.grammar.prelude import BehindText, Prelude
from core.stages.grammar import GrammarContext, Vocabulary
from core.stages.tool_parser import ToolParserContext
from core.testing.engines import fake_spec
from core.testing.grammar_walks import allowed
from plugins.grammars.llguidance_backend import LLGuidance
from plugins.tool_parsers.harmony import Harmony
from plugins.tool_parsers.hermes import Hermes
from plugins.tool_parsers.llama3_json import Llama3Json
from plugins.tool_parsers.mistral import Mistral
from plugins.tool_parsers.pythonic import Pythonic
from plugins.tool_parsers.qwen3_coder import Qwen3Coder

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F", "it's"]},
        "flags": {"type": "array", "items": {"type": ["boolean", "null"]}},
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}},
            "required": ["lat"],
        },
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["city", "flags"],
}
TREE = {
    "type": "object",
    "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}},
    "properties": {"root": {"$ref": "#/$defs/node"}, "size": {"type": "integer", "minimum": 3, "maximum": 5}},
    "required": ["root", "size"],
    "additionalProperties": False,
}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


SIMPLE = [tool("weather", CITY), tool("now", {"type": "object", "properties": {}})]
RICH = [tool("walk", TREE), tool("anything")]

MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>")
END = "<eos>"


def vocabulary(special):
    """Bytes, a few longer tokens, and the markers: as special tokens, or spelled."""
    words = ["weather", "now", '{"', '":', '", "', "</", "tool_call", "```", "functions.", "\n\n", ", "]
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
    num_text = len(tokens)
    tokens += [END.encode(), *(marker.encode() for marker in MARKERS if special)]
    known = {token: at for at, token in enumerate(tokens[:num_text])}

    def encode(text):
        ids, data, at = [], text.encode(), 0
        while at < len(data):
            size = next(size for size in range(min(12, len(data) - at), 0, -1) if data[at : at + size] in known)
            ids.append(known[data[at : at + size]])
            at += size
        return ids

    ends = frozenset({num_text})
    return Vocabulary(tokens, len(tokens) + 3, frozenset(range(num_text, len(tokens))), ends, encode)


FORMS = {
    "hermes": (Hermes, {}),
    "llama3_json": (Llama3Json, {}),
    "mistral": (Mistral, {}),
    "mistral named": (Mistral, {"form": "named"}),
    "mistral args": (Mistral, {"form": "args"}),
    "pythonic": (Pythonic, {}),
    "harmony": (Harmony, {}),
    "qwen3_coder": (Qwen3Coder, {}),
}


def parser_of(form):
    cls, settings = FORMS[form]
    return cls(cls.Settings(**settings), ToolParserContext(fake_spec()))


@pytest.fixture(scope="module", params=[True, False], ids=["special", "spelled"])
def words(request):
    return vocabulary(request.param)


def matcher_of(spec, words, backend=None):
    backend = backend or LLGuidance(LLGuidance.Settings(), GrammarContext(lambda: words))
    inner = backend.load(backend.compile(normalised(spec))).matcher()
    return BehindText(Prelude(spec, words), inner) if spec.after else inner


def walked(spec, words, rng, most=500, backend=None):
    """Ids drawn through masks, or None where no end was in sight. Ends are likelier than in a fair draw."""
    matcher, ids, queue = matcher_of(spec, words, backend), [], []
    likely = [at for at, token in enumerate(words.tokens) if token in (b'"', b"}", b"]", b")", b"<", b"\n", b"/", b"0")]
    while len(ids) < most:
        forced = matcher.forced()
        if forced:
            token_id = forced[0]
        else:
            options = sorted(allowed(matcher, words))
            assert options, f"a dead end after {text_of(ids, words)!r}"
            if spec.after and not queue and rng.random() < 0.1:
                queue = spelled(spec.after, words)
        if not forced and queue and queue[0] in options:
            token_id = queue.pop(0)
        elif not forced:
            short = [one for one in options if one in words.eos_ids or one in likely]
            token_id = rng.choice(short if short and rng.random() < 0.5 else options)
        assert matcher.accept([token_id]) == 1
        if token_id in words.eos_ids:
            return ids
        ids.append(token_id)
    return None


def spelled(text, words):
    """Its tokens, control tokens among them."""
    ids = []
    for part in re.split(r"(<[|][a-z]+[|]>|\[[A-Z_]+\])", text):
        known = part.encode() in words.tokens
        ids += [words.tokens.index(part.encode())] if known else words.encode(part)
    return ids


def text_of(ids, words):
    return b"".join(words.tokens[one] for one in ids if one < len(words.tokens)).decode("utf-8", "replace")


def calls_in(form, tools, text, rng):
    """(content, [(name, arguments)]), from pieces of any size."""
    stream, content, calls, at = parser_of(form).stream(tools), "", [], 0
    parsed = []
    while at < len(text):
        size = rng.randint(1, 9)
        parsed.append(stream.push(text[at : at + size]))
        at += size
    for one in [*parsed, stream.finish()]:
        content += one.content
        for delta in one.tool_calls:
            if delta.name is not None:
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def check(tools, calls, text):
    schemas = {one["function"]["name"]: one["function"].get("parameters", {"type": "object"}) for one in tools}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name], jsonschema.Draft202012Validator)
        assert isinstance(arguments, dict), text


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", "now", "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_grammar_allows_is_read_back(form, choice, parallel, words):
    spec = parser_of(form).grammar(SIMPLE, choice, parallel)
    assert spec is not None
    rng, num_ended, most = random.Random(f"{form}{choice}{parallel}"), 0, 0
    for _ in range(25):
        ids = walked(spec, words, rng)
        if ids is None:
            continue
        num_ended += 1
        text = text_of(ids, words)
        content, calls = calls_in(form, SIMPLE, text, rng)
        check(SIMPLE, calls, text)
        most = max(most, len(calls))
        if choice != "auto":
            assert calls and (form == "harmony" or not content.strip()), f"{text!r} leaves {content!r}"
        if choice == "now":
            assert {name for name, _ in calls} == {"now"}
        if not parallel:
            assert len(calls) <= 1, text
        if not calls:
            assert content == text
    assert num_ended >= 5, f"{num_ended} walks ended"
    if parallel and choice == "required" and form != "harmony":
        assert most > 1, "no walk had two calls"


def walks_of_calls(form, tools, spec, words, num_walks, **options):
    """How many random texts of the grammar came to an end: each is calls that are valid, and nothing else."""
    rng, num_ended = random.Random(form), 0
    for _ in range(num_walks):
        ids = walked(spec, words, rng, **options)
        if ids is not None:
            num_ended += 1
            text = text_of(ids, words)
            content, calls = calls_in(form, tools, text, rng)
            check(tools, calls, text)
            assert calls and (form == "harmony" or not content.strip()), f"{text!r} leaves {content!r}"
    return num_ended


@pytest.mark.parametrize("form", [form for form in FORMS if form != "qwen3_coder"])
@pytest.mark.parametrize("choice", ["required", "walk"])
def test_schemas_that_say_more_are_kept(form, choice, words):
    """References, bounds, and tools without a schema."""
    spec = parser_of(form).grammar(RICH, choice, True)
    assert spec is not None
    assert walks_of_calls(form, RICH, spec, words, 25) >= 5


LOOSE = {
    "type": "object",
    "properties": {
        "data": {"description": "a value of any type"},
        "count": {"type": "integer", "optional": True, "format": "int32"},
        "word": {"type": "string", "items": {"type": "string"}, "minimum": 3},
        "never": {"type": "array", "items": {"type": "string"}, "enum": ["Weather", "News"]},
        "flag": {"anyOf": [{"type": "boolean", "enum": ["True", "False"]}, {"type": "null"}]},
        "lists": {"type": "array", "items": {"type": "integer", "enum": ["1"]}},
    },
    "required": ["data", "lists"],
}
"""As datasets of tools are: names that no draft knows, keywords of other types, values that are not of the type."""


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_what_says_nothing_of_a_value_keeps_no_format_from_it(form, choice, words):
    tools = [tool("loose", LOOSE)]
    spec = parser_of(form).grammar(tools, choice, False)
    assert spec is not None
    rng, names = random.Random(form), set()
    for _ in range(20):
        ids = walked(spec, words, rng)
        if ids is not None:
            _, calls = calls_in(form, tools, text_of(ids, words), rng)
            check(tools, calls, ids)
            names |= {key for _, arguments in calls for key in arguments}
    assert names <= LOOSE["properties"].keys() - {"never"}
    assert choice == "auto" or {"data", "lists"} <= names


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("harmony", "mistral args")])
def test_no_argument_is_made_up_unless_the_schema_says_so(form, words):
    inner = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    parameters = {"type": "object", "properties": {"in": inner, "all": {"type": "array", "items": inner}}}
    opened = {**parameters, "additionalProperties": True}
    for schema, may in ((parameters, False), (opened, form not in ("pythonic", "qwen3_coder"))):
        tools = [tool("f", schema)]
        matcher = matcher_of(parser_of(form).grammar(tools, "f", False), words)
        bad = spelled(f'{BEGUN[form]}"other": 1', words)
        assert (matcher.accept(bad) == len(bad)) is may
    for schema in (
        tool("f", {"type": "object", "properties": {}}),
        tool("f", {**opened, "properties": {"in": opened}}),
    ):
        matcher = matcher_of(parser_of(form).grammar([schema], "f", False), words)
        may = form not in ("pythonic", "qwen3_coder") and "additionalProperties" in schema["function"]["parameters"]
        bad = spelled(f'{BEGUN[form]}"other": 1', words)
        assert (matcher.accept(bad) == len(bad)) is may
    nested = matcher_of(parser_of(form).grammar([tool("f", opened)], "f", False), words)
    bad = spelled(f'{BEGUN[form]}"in": {{"a": 1, "other": 1', words)
    assert nested.accept(bad) < len(bad)


BEGUN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {',
    "llama3_json": '{"name": "f", "parameters": {',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {',
    "mistral named": "[TOOL_CALLS]f{",
    "pythonic": "[f(**{",
    "qwen3_coder": "<tool_call>\n<function=f>\n",
}


def test_an_object_that_is_put_together_stays_open():
    """To close a part would leave no room for the others."""
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for schema in (
        {**base, "allOf": [{"properties": {"b": {"type": "integer"}}, "required": ["b"]}]},
        {**base, "properties": {"a": base, "b": {"allOf": [{"$ref": "#/properties/a"}, {"required": ["c"]}]}}},
        {**base, "required": ["a", "b"]},
        {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}, "additionalProperties": True},
    ):
        source = json.loads(parser_of("hermes").grammar([tool("f", schema)], "f", False).source)
        assert source["structures"][0]["schema"] == schema


@pytest.mark.parametrize("tools", [SIMPLE, RICH], ids=["simple", "rich"])
@pytest.mark.parametrize("form", FORMS)
def test_xgrammar_allows_what_is_read_back(form, tools, words):
    pytest.importorskip("xgrammar", reason="pip install nonet[xgrammar]")
    from plugins.grammars.xgrammar_backend import XGrammar

    backend = XGrammar(XGrammar.Settings(), GrammarContext(lambda: words))
    spec = parser_of(form).grammar(tools, "required", True)
    if spec is None:
        assert (form, tools) == ("qwen3_coder", RICH)
        return
    assert walks_of_calls(form, tools, spec, words, 8, backend=backend) >= 1


def test_a_keyword_of_another_script_is_one(words):
    tools = [tool("f", {"type": "object", "properties": {"año": {"type": "integer"}}, "required": ["año"]})]
    matcher, text = matcher_of(parser_of("pythonic").grammar(tools, "auto", True), words), "[f(año=1999)]"
    ids = words.encode(text)
    assert matcher.accept([*ids, min(words.eos_ids)]) == len(ids) + 1
    assert calls_in("pythonic", tools, text, random.Random(0)) == ("", [("f", {"año": 1999})])


def test_what_rules_cannot_say_is_not_said():
    """Tags hold no model to a bound, and keyword arguments beside content to none either."""
    assert parser_of("qwen3_coder").grammar(RICH, "required", True) is None
    assert parser_of("pythonic").grammar(RICH, "auto", True) is None
    for form in FORMS:
        assert parser_of(form).grammar([tool("f", {"type": "string"})], "required", True) is None
        assert parser_of(form).grammar(SIMPLE, "no such tool", True) is None


def test_a_call_of_hermes_is_written_as_its_models_do(words):
    spec = parser_of("hermes").grammar(SIMPLE, "required", True)
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for whole in (text, f"{text}\n{text}"):
        matcher = matcher_of(spec, words)
        ids = words.encode(whole)
        assert matcher.accept([*ids, min(words.eos_ids)]) == len(ids) + 1


def test_content_may_come_before_a_call_that_is_not_required(words):
    said = {
        "hermes": 'Let me see.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "llama3_json": 'Let me see: {"name": "now", "parameters": {}}',
        "qwen3_coder": "1 < 2.\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    }
    for form, text in said.items():
        for whole in (text, "Let me see."):
            ids = words.encode(whole)
            matcher = matcher_of(parser_of(form).grammar(SIMPLE, "auto", True), words)
            assert matcher.accept([*ids, min(words.eos_ids)]) == len(ids) + 1, (form, whole)
            content, calls = calls_in(form, SIMPLE, whole, random.Random(1))
            assert calls == ([("now", {})] if whole is text else []) and content
        bad = words.encode(text.replace("now", "never"))
        matcher = matcher_of(parser_of(form).grammar(SIMPLE, "auto", True), words)
        assert matcher.accept(bad) < len(bad)
