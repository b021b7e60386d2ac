"""The built-in tool parsers, each in its format: the contract, and bug rows M1 to M5."""

from __future__ import annotations

import json
import random
import sys
import time

import pytest

from core.stages.tool_parser import ToolParserContext
from core.testing.engines import fake_spec
from core.testing.harness import tool_texts as texts
from core.testing.tool_parser import ToolParserContract
from plugins.tool_parsers.harmony import Harmony
from plugins.tool_parsers.hermes import Hermes
from plugins.tool_parsers.llama3_json import Llama3Json
from plugins.tool_parsers.mistral import Mistral
from plugins.tool_parsers.pythonic import Pythonic
from plugins.tool_parsers.qwen3_coder import Qwen3Coder

PARSERS = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "harmony": Harmony,
    "qwen3_coder": Qwen3Coder,
}
WORDS = frozenset({"tools", "grammar"})
NESTED = {
    "city": 'São "Oslo" \\ {}[]()',
    "deep": [{"a": [1, -2.5e10, True, None]}, {}, []],
    "code": "if (x) { y[0] = '</tool_call>'; }\n\t",
}
SPREAD = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "deep": {"type": "array"}, "code": {"type": "string"}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SPREAD}} for name in ("f", "g")]


def as_json(arguments):
    return json.dumps(arguments, ensure_ascii=False)


def as_python(arguments):
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def as_tags(arguments):
    shown = {key: value if isinstance(value, str) else as_json(value) for key, value in arguments.items()}
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items())


WRITTEN = {
    "hermes": lambda name, args: f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(args)}}}\n</tool_call>',
    "llama3_json": lambda name, args: f'{{"name": "{name}", "parameters": {as_json(args)}}}',
    "mistral": lambda name, args: f'[TOOL_CALLS][{{"name": "{name}", "arguments": {as_json(args)}}}]',
    "pythonic": lambda name, args: f"[{name}({as_python(args)})]",
    "harmony": lambda name, args: (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json(args)}<|call|>"
    ),
    "qwen3_coder": lambda name, args: f"<tool_call>\n<function={name}>\n{as_tags(args)}</function>\n</tool_call>",
}
"""One call as a model of the format writes it."""

FORMATS = tuple(PARSERS)


def parser_of(name, **settings):
    cls = PARSERS[name]
    return cls(cls.Settings(**settings), ToolParserContext(fake_spec()))


def told(name, pieces, tools=TOOLS):
    return texts.told(parser_of(name).stream(tools), pieces)


def read(name, text, size=10_000):
    """Content, and calls with their arguments as Python has them."""
    content, calls = told(name, texts.cut(text, size))
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


# --- the contract ---------------------------------------------------------------------------------

WEATHER = {"city": "Oslo", "days": 3}


class TestLlama3Json(ToolParserContract):
    component = Llama3Json
    provides = WORDS
    examples = {
        '{"name": "weather", "parameters": {"city": "Oslo"}}': [("weather", {"city": "Oslo"})],
        '{"type": "function", "name": "now", "parameters": {}}': [("now", {})],
        '<|python_tag|>{"name": "now", "parameters": {}}': [("now", {})],
        '{"name": "now", "parameters": {}}; {"name": "search", "parameters": {"query": "x"}}': [
            ("now", {}),
            ("search", {"query": "x"}),
        ],
        '{"name": "now", "arguments": {}}\n{"parameters": {"query": ";"}, "name": "search"}': [
            ("now", {}),
            ("search", {"query": ";"}),
        ],
        'I look it up. {"name": "now", "parameters": {}}': [("now", {})],
    }


class TestMistral(ToolParserContract):
    component = Mistral
    provides = WORDS
    examples = {
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]': [("weather", {"city": "Oslo"})],
        '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "a1b2c3d4e"}, {"name": "now", "arguments": {}}]': [
            ("now", {}),
            ("now", {}),
        ],
        '[TOOL_CALLS]weather{"city": "Oslo"}': [("weather", {"city": "Oslo"})],
        '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}': [
            ("weather", {"city": "Oslo"}),
            ("now", {}),
        ],
        '[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}': [("now", {"a": 1})],
        'I look it up.[TOOL_CALLS][{"name": "now", "arguments": {}}]': [("now", {})],
    }


class TestPythonic(ToolParserContract):
    component = Pythonic
    provides = WORDS
    examples = {
        '[weather(city="Oslo", days=3)]': [("weather", WEATHER)],
        "[now()]": [("now", {})],
        "[ now ( ) , search( query = 'it\\'s \"q\"' , ) ]": [("now", {}), ("search", {"query": 'it\'s "q"'})],
        "<|python_start|>[now()]<|python_end|>": [("now", {})],
        "[search(query=[1, {'a': True, \"b\": None,}, [],], n=-1.5e3)]": [
            ("search", {"query": [1, {"a": True, "b": None}, []], "n": -1500.0})
        ],
        '[weather(**{"city": "Oslo", "days": 3})]': [("weather", WEATHER)],
        "[weather(**{})]": [("weather", {})],
    }


class TestHarmony(ToolParserContract):
    component = Harmony
    provides = WORDS
    examples = {
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>': [
            ("weather", {"city": "Oslo"})
        ],
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}": [("now", {})],
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|> {}<|call|>": [("now", {})],
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>": [("now", {})],
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}<|call|>": [("now", {})],
    }


class TestQwen3Coder(ToolParserContract):
    component = Qwen3Coder
    provides = WORDS
    examples = {
        WRITTEN["qwen3_coder"]("weather", WEATHER): [("weather", WEATHER)],
        "<function=now>\n</function>": [("now", {})],
        "<tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>": [
            ("weather", {"city": "Oslo"})
        ],
        "<tool_call>\n<function=weather>\n<parameter=days>\nabout 3\n</parameter>\n</function>\n</tool_call>": [
            ("weather", {"days": "about 3"})
        ],
        "<tool_call>\n<function=weather>\n<parameter=city>\n\n<b>\n\n</parameter>\n</function>\n</tool_call>": [
            ("weather", {"city": "\n<b>\n"})
        ],
    }


# --- the rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 10_000])
def test_m1_streamed_arguments_are_the_whole_ones(name, size):
    text = WRITTEN[name]("f", NESTED)
    assert read(name, text, size) == ("", [("f", NESTED)])
    assert told(name, texts.cut(text, size)) == told(name, [text])


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_come_while_the_model_writes_them(name):
    stream = parser_of(name).stream(TOOLS)
    text = WRITTEN[name]("f", {"city": "Once upon a time in Oslo"})
    before, _, after = text.partition(" upon")
    (first,) = stream.push(before).tool_calls
    assert (first.index, first.name, first.arguments) == (0, "f", '{"city": "Once')
    (second,) = stream.push(" upon").tool_calls
    assert (second.index, second.name, second.arguments) == (0, None, " upon")
    rest = [call.arguments for parsed in (stream.push(after), stream.finish()) for call in parsed.tool_calls]
    assert "".join(rest) == ' a time in Oslo"}'


ODD = [
    "mkdir -p test/{test1,test2",
    "[{",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|call|>",
    '"}}',
    "\\",
    ")]",
    "'",
    "<",
    "\n",
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", ODD)
def test_m3_braces_and_markers_in_texts_are_text(name, value):
    for size in (1, 3, 1000):
        assert read(name, WRITTEN[name]("f", {"code": value}), size) == ("", [("f", {"code": value})])


@pytest.mark.parametrize("name", FORMATS)
def test_m4_a_truncated_call_keeps_what_was_told(name):
    text = WRITTEN[name]("f", {"city": "xyz", "deep": [1, 2]})
    _, ((_, whole),) = told(name, [text])
    seen = set()
    for end in range(len(text) + 1):
        content, calls = told(name, [text[:end]])
        assert told(name, list(text[:end])) == (content, calls)
        if calls:
            ((called, arguments),) = calls
            assert called == "f" and whole.startswith(arguments)
            seen.add(arguments)
        else:
            assert content == text[:end]
    assert len(seen) > 5 and whole in seen


NO_CALLS = {
    "hermes": ['<tool_call>{"name": "h", "arguments": {}}</tool_call>', "<tool_call>[]</tool_call>", "<tool_call>"],
    "llama3_json": [
        '{"name": "h", "parameters": {}}',
        '{"name": "f"}',
        '{"name": "f", "parameters": []}',
        '{"answer": 42}',
        "{}",
        "<|python_tag|>print(1)",
        "<|python_tag|>",
        '{"name": "',
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "h", "arguments": {}}]',
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]h{}",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[ARG]{}",
        "[TOOL_CALLS]f[CALL_ID][ARGS]{}",
        "[TOOL_CALLS]f[CALL_ID]x{}",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] ",
        '[TOOL_CALLS][{"name": "f", "arguments": "text"}]',
    ],
    "pythonic": [
        "[1, 2, 3]",
        "[h(a=1)]",
        "[f(1)]",
        "[f(a)]",
        "[f(a=)]",
        "[f(a=b)]",
        "[f(a=__import__('os'))]",
        "[f(a=(1))]",
        "[f",
        "[f(",
        "[]",
        "f(a=1)",
        "<|python_start|>f()<|python_end|>",
        "[f(²=1)]",
        "[f(a==1)]",
        "[f(*{})]",
    ],
    "harmony": [
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>",
        "<|channel|>commentary to=functions.h <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.f<|message|>[]<|call|>",
        "<|channel|>commentary to=functions.f",
        "<|channel|>" + "x" * 600 + " to=functions.f<|message|>{}",
        "to=functions.f",
        "to",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=h>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f\n",
        "<tool_call><function=>",
        "<tool_call><parameter=a>",
        "<function=f>",
        "<function=f><parameter=a b>",
        "<function=f>text",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts])
def test_what_is_no_call_is_content(name, text):
    for around in ("", "  "):
        for size in (1, 2, 5, 1000):
            assert told(name, texts.cut(around + text + around, size)) == (around + text + around, [])


SPOILT = {
    "llama3_json": [('{"name": "f", "parameters": {"a": 1, b}}', '{"a": 1, ', "b}}")],
    "mistral": [
        ('[TOOL_CALLS]f{"a": 1, b}', '{"a": 1, ', "b}"),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1} x', '{"a": 1}', " x"),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, x]', '{"a": 1}', ", x]"),
    ],
    "pythonic": [
        ("[f(a=1, b)]", '{"a": 1', ", b)]"),
        ("[f(a=01)]", '{"a": 01', ")]"),
        ("[f(a='x', b=nul)]", '{"a": "x"', ", b=nul)]"),
        ("[f(a=[1, 2)]", '{"a": [1, 2', ")]"),
        ("[f(a='\\xzz')]", '{"a": "', "\\xzz')]"),
        ("[f(a=1, a=2)]", '{"a": 1', ", a=2)]"),
        ("[f(a=1)] and more", '{"a": 1}', " and more"),
        ("[f(a=1), 2]", '{"a": 1}', ", 2]"),
    ],
    "qwen3_coder": [
        ("<function=f><parameter=a>x</parameter>text</function>", '{"a": "x"', "text</function>"),
        ("<function=f><parameter=a>x</parameter> <parameter=a>", '{"a": "x"', " <parameter=a>"),
    ],
}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in SPOILT.items() for row in rows])
def test_what_spoils_a_call_that_has_begun_is_content(name, row):
    text, arguments, content = row
    for size in (1, 2, 3, 1000):
        assert told(name, texts.cut(text, size)) == (content, [("f", arguments)])


HALF = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": ',
    "llama3_json": '{"name": "f", "parameters": {"a": ',
    "mistral": '[TOOL_CALLS]f{"a": ',
    "pythonic": "[f(a=",
    "harmony": "<|channel|>commentary to=functions.f<|message|>",
    "qwen3_coder": "<tool_call><function=f><parameter=a>",
}
UNITS = ("[[[[(((", "[", '"', "'", "\\", "1", " ", "\n", "<", "{", '{"a":', "x{[(", "a=", "<tool_call>", "[TOOL_CALLS]")
SIZE = 50_000


def long_texts(name):
    call = WRITTEN[name]("f", {"city": "x"})
    for unit in (*UNITS, *parser_of(name).special_tokens, call, call[: len(call) // 2], call.rstrip("]>"), "[f("):
        many = unit * (SIZE // len(unit))
        yield many
        yield HALF[name] + many
        yield f"{HALF[name]}{'[' * 100}'{many}"
        yield f'{HALF[name]}{"[" * 100}"{many}'


@pytest.mark.parametrize("name", FORMATS)
def test_m5_no_text_costs_more_than_its_length(name):
    """Ten times the text takes ten times the CPU in a linear parser, and a hundred times in a quadratic one.

    Sizes that lines of Python do not show, such as of what is copied. A machine's pause is not there three times over.
    """
    for text in long_texts(name):
        for cut in (lambda text: [text], lambda text: texts.cut(text, 7)):
            ratios = []
            while not ratios or ratios[-1] >= 30 and len(ratios) < 3:
                tenth = cpu_seconds(name, cut(text[: len(text) // 10]))
                ratios.append(cpu_seconds(name, cut(text)) / max(tenth, 0.002))  # less is lost in the clock
            assert min(ratios) < 30, f"{text[:80]!r}… in {len(cut(text))} pieces: {ratios} times as long"


def cpu_seconds(name, pieces):
    started = time.process_time()
    told(name, pieces)
    return time.process_time() - started


def lines_run(name, text):
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if "tool_parsers" not in frame.f_code.co_filename:
            return None
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        told(name, texts.cut(text, 64))
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", FORMATS)
def test_m5_twice_the_text_is_at_most_twice_the_work(name):
    for text in long_texts(name):
        half, whole = lines_run(name, text[:1500]), lines_run(name, text[:3000])
        assert whole <= 2.6 * half + 500, f"{text[:80]!r}…: {half} lines, then {whole}"


@pytest.mark.parametrize("name", FORMATS)
def test_m5_nothing_is_evaluated(name):
    code = '__import__("os").abort()'
    assert read(name, WRITTEN[name]("f", {"code": code})) == ("", [("f", {"code": code})])


@pytest.mark.parametrize("name", FORMATS)
def test_any_cut_of_any_mixture_says_the_same(name):
    rng = random.Random(7)
    call = WRITTEN[name]("f", {"city": "x", "deep": [1, {"a": None}]})
    places = sorted(rng.sample(range(len(call)), 4))
    pieces = [call, *(call[:at] for at in places), *(call[at:] for at in places), " ", "\n", "text", *",;])}>\"'"]
    for _ in range(300):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 7)))
        whole = told(name, [text])
        assert told(name, list(text)) == told(name, texts.cut(text, rng.randint(2, 9))) == whole
        assert whole[1] or whole[0] == text


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        (r"'a\n\t\\\'\"b'", "a\n\t\\'\"b"),
        (r"'\x41\u00e9\U0001F525\101\0'", "Aé🔥A\0"),
        (r"'\ud83d\ude00'", "😀"),
        (r"'\d+\w'", "\\d+\\w"),
        ("'one\\\ntwo'", "onetwo"),
        ("'two\nlines'", "two\nlines"),
        ('""', ""),
        ("-0.5e-3", -0.0005),
        ("False", False),
        ("true", True),
        ("null", None),
        ("[]", []),
        ("{'a': {}}", {"a": {}}),
        ("{ 'a' : [ 1 , 'b' , ] , }", {"a": [1, "b"]}),
    ],
)
def test_python_literals(literal, value):
    for size in (1, 2, 1000):
        assert read("pythonic", f"[f(a={literal}, b=1)]", size) == ("", [("f", {"a": value, "b": 1})])


def test_values_of_tags_are_read_by_their_schema():
    properties = {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "null"]},
        "listed": {"enum": [1, 2]},
        "flag": {"type": "boolean"},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    raw = {"text": "1", "number": "1", "maybe": "null", "either": "null", "listed": "2", "flag": "True", "other": "1"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in raw.items())
    for size in (1, 5, 1000):
        _, ((_, arguments),) = told("qwen3_coder", texts.cut(f"<function=f>\n{body}</function>", size), tools)
        assert json.loads(arguments) == {
            "text": "1",
            "number": 1,
            "maybe": None,
            "either": "null",
            "listed": 2,
            "flag": True,
            "other": "1",
        }


def test_an_id_that_the_model_wrote_is_told():
    stream = parser_of("mistral").stream(TOOLS)
    calls = stream.push('[TOOL_CALLS][{"id": "abc123def", "name": "f", "arguments": {}}]').tool_calls
    calls += stream.push("[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}").tool_calls
    assert [(call.name, call.call_id) for call in calls] == [("f", "abc123def"), ("g", "x1")]
