"""`qwen3_coder`: calls as tags for the function and each of its parameters, as Qwen 3 Coder writes them.

`<tool_call><function=name><parameter=city>Oslo</parameter></function></tool_call>`, each on lines of its own. A value is read as
its parameter's schema says: a text as it stands, anything else as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict

from core.request import GrammarSpec
from core.stages.tool_parser import AUTO, ToolParserContext
from plugins.tool_parsers.call_stream import CallStream, overlap
from plugins.tool_parsers.json_reader import WHITE_SPACE, JsonReader
from plugins.tool_parsers.schema_rules import (
    NothingError,
    Rules,
    UnsupportedError,
    check_arguments,
    check_keywords,
    quoted,
    says_nothing,
    values_of,
)
from plugins.tool_parsers.structures import chosen, schema_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_WORD_CHARS = 256  # of a name or key
MAX_OPTION_DEPTH = 4
_WORDS = {True: "true", False: "false", None: "null"}
_OTHER_WORDS = {"True": "true", "False": "false", "None": "null"}
_TAG = "<>= \t\n\r"  # no name or key has these


class Qwen3Coder:
    """Any number of calls, and content around them. What stands between tags and is no call of these tools is content."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    special_tokens = (OPEN, CLOSE)

    def __init__(self, settings: Settings, context: ToolParserContext):
        pass

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> Qwen3CoderStream:
        return Qwen3CoderStream(tools)

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
        """None, too, for schemas that say more than tags can hold a model to."""
        functions = chosen(tools, choice)
        schemas = [schema_of(function) for function in functions]
        if not functions or None in schemas:
            return None
        try:
            source = _ebnf(functions, schemas, parallel, is_open=choice == AUTO)
        except UnsupportedError:
            return None
        spec = GrammarSpec(kind="ebnf", source=source)
        return msgspec.structs.replace(spec, after=OPEN, may_end=True) if choice == AUTO else spec


class Qwen3CoderStream(CallStream):
    """`core.stages.tool_parser.ToolStream`."""

    markers = (OPEN, FUNCTION)

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        super().__init__(tools)
        self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}

    def _opened(self, marker: str) -> None:
        self._begin(TagCall(self._functions, opened=marker == FUNCTION), marker)

    def _read_after(self, text: str, at: int) -> int:
        return self._read_closer(text, at, CLOSE)


class TagCall:
    """From the function's tag to its end. See `plugins.tool_parsers.call_reader.Reader`."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], *, opened: bool):
        self.name: str | None = None
        self.call_id: str | None = None
        self.done = False
        self.failed = False
        self._certain = False
        self._functions = functions
        self._properties: Mapping[str, Any] = {}
        self._text: list[str] = []
        self._told: list[str] = []  # JSON that is new
        self._tells = False  # this step does
        self._held: list[str] = []  # what was read and is not told
        self._lead = "{"  # JSON before what is told next
        self._keys: set[str] = set()
        self._word = ""  # a tag, name or key, as far as it has come
        self._value: list[str] = []  # of a parameter that is no text
        self._tail = ""  # of a value: may be the beginning of its end
        self._starts = False  # the value: a line break belongs to the format
        self._is_text = False
        self._read: Callable[[str, int], int] = self._read_name if opened else self._read_function

    @property
    def certain(self) -> bool:
        return self._certain

    @property
    def text(self) -> str:
        return "".join(self._text)

    def new_arguments(self) -> str:
        told, self._told = "".join(self._told), []
        return told

    def after_arguments(self) -> str:
        return "".join(self._held)

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not (self.done or self.failed):
            start, at = at, self._read(text, at)
            self._text.append(text[start:at])
            if self._tells:
                self._held, self._tells = [self._tail], False
            else:
                self._held.append(text[start:at])
        return at

    def _tell(self, told: str) -> None:
        """All that was read up to the end of this step is in it, but for `_tail`."""
        self._told += [self._lead, told]
        self._lead, self._tells, self._certain = "", True, True

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    # --- tags ---

    def _read_function(self, text: str, at: int) -> int:
        return self._read_tag(text, at, {FUNCTION: self._read_name})

    def _read_inside(self, text: str, at: int) -> int:
        """In the function, between its parameters."""
        return self._read_tag(text, at, {PARAMETER: self._read_key, END_FUNCTION: self._end})

    def _read_tag(self, text: str, at: int, after: Mapping[str, Callable[[str, int], int]]) -> int:
        """One character of one of these tags, or white space before it."""
        if not self._word and text[at] in WHITE_SPACE:
            return at + 1
        word = self._word + text[at]
        if not any(tag.startswith(word) for tag in after):
            return self._fail(at)
        self._word = word
        if word in after:
            self._word, self._read = "", after[word]
            if word == END_FUNCTION:
                return self._end(text, at)
        return at + 1

    def _end(self, text: str, at: int) -> int:
        self._lead = "" if self._keys else "{"
        self._tell("}")
        self.done = True
        return at + 1

    def _read_name(self, text: str, at: int) -> int:
        word = self._read_word(text[at])
        if word is None:
            return at if self.failed else at + 1
        if word not in self._functions:
            return self._fail(at)
        self.name, self._read = word, self._read_inside
        self._properties = (self._functions[word].get("parameters") or {}).get("properties") or {}
        return at + 1

    def _read_key(self, text: str, at: int) -> int:
        key = self._read_word(text[at])
        if key is None:
            return at if self.failed else at + 1
        if key in self._keys:
            return self._fail(at)
        self._lead = f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: "
        self._keys.add(key)
        self._starts, self._value, self._tail, self._read = True, [], "", self._read_value
        self._is_text = reads_as_text(self._properties.get(key))
        if self._is_text:
            self._tell('"')
        return at + 1

    def _read_word(self, char: str) -> str | None:
        """The word that this character ends; None: it goes on, or it has failed."""
        if char == ">" and self._word:
            word, self._word = self._word, ""
            return word
        self.failed = char in _TAG or len(self._word) == MAX_WORD_CHARS
        self._word += char
        return None

    # --- values ---

    def _read_value(self, text: str, at: int) -> int:
        """To the end of the piece, or one character further where its end may have begun."""
        data, start, past = (self._tail + text[at], 0, at + 1) if self._tail else (text, at, len(text))
        end = data.find(END_PARAMETER, start)
        if end < 0:
            held = max(overlap(data, start, END_PARAMETER), overlap(data, start, "\n" + END_PARAMETER))
            self._tail = data[len(data) - held :]
            self._take(data[start : len(data) - held])
            return past
        past = past if self._tail else end + len(END_PARAMETER)
        self._tail = ""
        self._take(data[start:end], ends=True)
        self._read = self._read_inside
        self._end_value()
        return past

    def _take(self, part: str, *, ends: bool = False) -> None:
        if self._starts and part:
            self._starts, part = False, part.removeprefix("\n")
        if ends:
            part = part.removesuffix("\n")
        if not self._is_text:
            self._value.append(part)
        elif part:
            self._tell(json.dumps(part, ensure_ascii=False)[1:-1])

    def _end_value(self) -> None:
        if self._is_text:
            self._tell('"')
            return
        value = "".join(self._value).strip(WHITE_SPACE)
        value = _OTHER_WORDS.get(value, value)
        self._tell(value if is_json(value) else json.dumps(value, ensure_ascii=False))


def is_json(text: str) -> bool:
    reader = JsonReader()
    return reader.feed(text + " ", 0) >= len(text) > 0 and reader.done


def reads_as_text(schema: Any) -> bool:
    """Whether a parameter's value is a text: its schema allows one, or does not say."""
    kinds = _kinds(schema, 0)
    return not kinds or "string" in kinds


def _kinds(schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > MAX_OPTION_DEPTH:
        return set()
    kinds = schema.get("type")
    found = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    if not found:
        values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
        found = {"string" if isinstance(value, str) else "other" for value in values}
    for option in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        found |= _kinds(option, depth + 1)
    return found


def _ebnf(functions: Sequence[Mapping[str, Any]], schemas: Sequence[Any], parallel: bool, *, is_open: bool) -> str:
    """Of whole calls, or from behind the first one's opening tag on."""
    rules = Rules(_WORDS, barred="<")

    def parameter(key: str, schema: Any) -> str:
        if not key or len(key) > MAX_WORD_CHARS or set(key) & set(_TAG):
            raise UnsupportedError(f"{key!r} fits into no tag")
        opened = quoted(f"{PARAMETER}{key}>\n")
        if not reads_as_text(schema):
            return f"{opened} {rules.value(schema)} {quoted(chr(10) + END_PARAMETER + chr(10))}"
        return f"{opened} {_text_rule(schema)} {quoted(END_PARAMETER + chr(10))}"

    bodies = []
    for function, schema in zip(functions, schemas, strict=True):
        check_arguments(schema)
        opened, closed = f"\n{FUNCTION}{function['name']}>\n", f"{END_FUNCTION}\n{CLOSE}"
        bodies.append(f"{quoted(opened)} {rules.members(schema, parameter, '')} {quoted(closed)}")
    body = rules.add(" | ".join(bodies))
    more = f" ({quoted(chr(10) + OPEN)} {body})*" if parallel else ""
    return rules.text(f"{body}{more}" if is_open else f"{quoted(OPEN)} {body}{more}")


def _text_rule(schema: Any) -> str:
    """A text as it stands, with the line break behind it. Raises UnsupportedError."""
    if says_nothing(schema):
        return "[^<]*"
    if not isinstance(schema, dict):
        raise NothingError("it allows nothing")
    values = values_of(schema)
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        if not texts:  # what is read as a text is none of them
            raise NothingError("no text is allowed")
        if any("<" in text or text.strip("\n") != text for text in texts):
            raise UnsupportedError("a value has what ends it")
        return f"({' | '.join(quoted(text + chr(10)) for text in texts)})"
    if "anyOf" in schema:
        check_keywords(schema, "anyOf")
        return _text_rule(next(option for option in schema["anyOf"] if reads_as_text(option)))
    check_keywords(schema, "type")
    return "[^<]*"
