"""Tool parsers that each break one promise of `core.stages.tool_parser`."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict

from core.request import GrammarSpec
from core.stages.tool_parser import ParsedText, ToolCallDelta

provides = ("tools",)
OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Parser:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings, context):
        pass


class Held:
    """Holds back what may become a marker, and forgets it at the end."""

    def __init__(self):
        self._text = ""

    def push(self, text):
        self._text += text
        at = next((n for n in range(len(OPEN), 0, -1) if self._text.endswith(OPEN[:n])), 0)
        content, self._text = self._text[: len(self._text) - at], self._text[len(self._text) - at :]
        return ParsedText(content)

    def finish(self):
        return ParsedText()


class LosesText(Parser):
    """Text that looked like the beginning of a call is gone when no call came."""

    caught_by = "test_what_is_no_call_is_content"

    def stream(self, tools):
        return Held()


class Pieces:
    """Looks for a marker in each piece by itself."""

    def push(self, text):
        if OPEN in text:
            before, _, rest = text.partition(OPEN)
            _, _, after = rest.partition(CLOSE)
            return ParsedText(before + after, (ToolCallDelta(0, name="weather", arguments="{}"),))
        return ParsedText(text)

    def finish(self):
        return ParsedText()


class DependsOnPieces(Parser):
    """A marker that is cut in two is content."""

    caught_by = "test_streamed_equals_whole_under_any_chunking"

    def stream(self, tools):
        return Pieces()


class Lines:
    """Each line that is {"tool": …, "with": {…}} is a call."""

    def __init__(self, names):
        self._names, self._held, self._num = names, "", 0

    def push(self, text):
        *lines, self._held = (self._held + text).split("\n")
        told = [self._read(f"{line}\n") for line in lines]
        return ParsedText("".join(one.content for one in told), tuple(call for one in told for call in one.tool_calls))

    def finish(self):
        held, self._held = self._held, ""
        return self._read(held)

    def _read(self, line):
        try:
            call = json.loads(line)
            name, arguments = call["tool"], call["with"]
            if name not in self._names or not isinstance(arguments, dict) or len(call) != 2:
                raise ValueError(name)
        except (ValueError, TypeError, KeyError, RecursionError):
            return ParsedText(line)
        self._num += 1
        arguments = json.dumps(arguments, ensure_ascii=False)
        return ParsedText(tool_calls=(ToolCallDelta(self._num - 1, None, name, arguments),))


class LineParser(Parser):
    def stream(self, tools):
        return Lines([tool["function"]["name"] for tool in tools])


def line_grammar(tools, choice, parallel, begin, any_whitespace=False):
    functions = [tool["function"] for tool in tools]
    structures = [
        {"begin": begin % function["name"], "schema": function["parameters"], "end": "}"}
        for function in functions
        if choice in ("auto", "required", function["name"])
    ]
    source = {
        "structures": structures,
        "triggers": [begin[:4]],
        "at_least_one": choice != "auto",
        "stop_after_first": not parallel,
        "separator": "\n",
    }
    return GrammarSpec(kind="structural_tag", source=json.dumps(source), any_whitespace=any_whitespace)


class WritesAnotherFormat(LineParser):
    """What its grammar allows, its own streams take for content."""

    provides = ("tools", "grammar")
    caught_by = "test_its_streams_find_the_calls_that_its_grammar_allows"

    def grammar(self, tools, choice, parallel):
        return line_grammar(tools, choice, parallel, '{"call": "%s", "with": ')


class AllowsManyCalls(LineParser):
    """Also where one is asked for."""

    provides = ("tools", "grammar")
    caught_by = "test_its_streams_find_the_calls_that_its_grammar_allows"

    def grammar(self, tools, choice, parallel):
        return line_grammar(tools, choice, True, '{"tool": "%s", "with": ')


class AllowsAnyTool(LineParser):
    """Also where one of them is asked for by its name."""

    provides = ("tools", "grammar")
    caught_by = "test_a_grammar_is_one_of_these_tools"

    def grammar(self, tools, choice, parallel):
        return line_grammar(tools, "required", parallel, '{"tool": "%s", "with": ')


class MakesNoGrammar(LineParser):
    """It says that it knows grammars."""

    provides = ("tools", "grammar")
    caught_by = "test_who_knows_grammars_has_one_for_plain_tools"

    def grammar(self, tools, choice, parallel):
        return None


class MarkersAreOneText(LineParser):
    """Each of its letters would be a marker."""

    caught_by = "test_markers_are_a_few_texts"
    special_tokens = "<tool_call>"
