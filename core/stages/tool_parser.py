"""Tool parsers: how a model writes the tools it calls. Text to tool calls, also while it streams (used by stage 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pydantic import BaseModel, ConfigDict

from core.errors import RequestError

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.request import GrammarSpec

AUTO, REQUIRED = "auto", "required"
"""What `ToolParser.grammar` may be asked for beside the name of a tool: calls where the model wants them; at least one."""


@dataclass(frozen=True, slots=True)
class ToolParserContext:
    model: ModelSpec
    parsers: tuple[str, ...] = ()  # names of the installed tool parsers that provide "tools"


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of one tool call. `name` comes once, with its first delta; `arguments` add up to JSON text.

    `call_id` comes with the name where the model wrote one. Without it the frontend makes one, so that what a parser says
    depends on the text alone.
    """

    index: int  # 0, 1, … within the choice, in the order in which the calls begin
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What is certain after a piece of text: content for the client, and calls. Both are deltas.

    Content comes before the calls of the same piece, or after them: the two are separate streams.
    """

    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ToolStream(Protocol):
    """One choice's text. What all that comes out adds up to depends on the whole text only, not on its pieces.

    Nothing is lost: what is no call is content. White space between calls, and between a call and the ends of the text, may
    be left out. A call whose arguments have begun to come out cannot be taken back: text that spoils it afterwards is
    content, and the arguments stay what came before.
    """

    def push(self, text: str) -> ParsedText:
        """The next piece. Text that may turn out to be a call is held back. Never raises on any text.

        In time that is linear in the text, and without regular expressions that backtrack or anything that evaluates it.
        """
        ...

    def finish(self) -> ParsedText:
        """The text has ended: what is held back is content, unless it is a whole call. Called once, after all pieces."""
        ...


class ToolParser(Protocol):
    """Config group `tool_parser`. Called on the event loop: must not block.

    One that parses `provides` the word "tools" (and "grammar"); beside another one, requests with tools are refused. After
    `plugins.quarantine_after` failures it is switched off, and they are refused, too.

    Example::

        import json
        from collections.abc import Mapping, Sequence
        from typing import Any

        from core.request import GrammarSpec
        from core.stages.tool_parser import ParsedText, ToolCallDelta, ToolParserContext
        from pydantic import BaseModel, ConfigDict


        class JsonCall:  # an answer that is {"name": …, "parameters": …} and nothing else
            class Settings(BaseModel):
                model_config = ConfigDict(frozen=True, extra="forbid")

            def __init__(self, settings: Settings, context: ToolParserContext):
                pass

            def stream(self, tools: Sequence[Mapping[str, Any]]) -> "JsonStream":
                return JsonStream([tool["function"]["name"] for tool in tools])

            def grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
                return None  # it does not provide "grammar"

            @property
            def special_tokens(self) -> Sequence[str]:
                return ()


        class JsonStream:
            def __init__(self, names: Sequence[str]):
                self._names, self._held, self._first = names, list[str](), ""

            def push(self, text: str) -> ParsedText:
                self._held.append(text)
                self._first = self._first or text.lstrip()[:1]
                return ParsedText() if self._first in ("", "{") else self._content()

            def finish(self) -> ParsedText:
                try:
                    call = json.loads("".join(self._held))
                    name, arguments = call["name"], json.dumps(call["parameters"], allow_nan=False)
                except (ValueError, TypeError, KeyError, RecursionError):
                    return self._content()
                is_known = name in self._names
                return (
                    ParsedText(tool_calls=(ToolCallDelta(0, None, name, arguments),)) if is_known else self._content()
                )

            def _content(self) -> ParsedText:
                held, self._held = self._held, []
                return ParsedText("".join(held))
    """

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> ToolStream:
        """A new stream for one choice of a request with these tools (OpenAI's shape, checked, never empty).

        Raises RequestError (param `tools`) for tools that it cannot serve. A call of a tool that is none of these is content.
        """
        ...

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> GrammarSpec | None:
        """The language of an answer whose calls are whole, of these tools, and have arguments that their schemas accept
        (`parameters`; any object where a tool has none). Its own streams find the calls in every text of it.

        `choice`: "auto" (content, calls, or both), "required" (calls alone), or the name of the tool that is called.
        `parallel`: several calls may follow each other; else there is one at most. None: it cannot say so in a grammar.
        Optional (API 1.3), with the word `grammar`; without it `tool_choice` is `auto` or `none`, and no tool is strict.
        """
        ...

    @property
    def special_tokens(self) -> Sequence[str]:
        """Markers that may be special tokens of a model. They are shown in the text of a request with tools, whatever its
        `skip_special_tokens` says. Optional (API 1.3)."""
        ...


class NoTools:
    """`tool_parser: none`. A request with tools is refused, with the names of parsers that would serve it."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings, context: ToolParserContext):
        self._parsers = context.parsers

    def stream(self, tools: Sequence[Mapping[str, Any]]) -> NoReturn:
        able = " or ".join(f"tool_parser={name}" for name in self._parsers)
        hint = f"serve with {able}" if able else "none is installed"
        raise RequestError(f"`tools` need a tool parser; {hint}.", param="tools", code="unsupported")

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> None:
        return None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return ()
