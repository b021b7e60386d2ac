"""Offline frontend: one prompt whose answer is printed, or a JSONL file of prompts answered into another.

A line of the input is a JSON object with exactly one of `prompt` (text), `prompt_token_ids` (numbers) and `messages` (a chat,
through the model's template), and optionally an `id` and any field of `SamplingFields`, which wins over the command line's:

    {"id": "a", "prompt": "Once upon a time", "max_tokens": 32}
    {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}

A line of the output is `{"id", "choices": [{"text", "reasoning"?, "token_ids", "finish_reason", "stop_reason", "logprobs"?}],
"usage"}` or `{"id", "error"}`, in the order of the input; `docs/generate.md` has it all.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator
from tqdm import tqdm

from core.batch import TokenLogprobs
from core.errors import ConfigError, NonetError, OverloadedError, RequestError, near_matches
from core.outputs import RequestOutput
from core.stages.frontend import MAX_TTL_S, FrontendContext, GenerateRequest
from core.stages.renderer import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from plugins.frontends.reasoning import ReasoningOfChoice, printed, reasoning_of, with_shown
from plugins.frontends.sampling_fields import GrammarFields, SamplingFields


class Line(SamplingFields):
    """One line of the input file: exactly one of prompt, prompt_token_ids or messages, and sampling fields of its own."""

    id: str | int | None = None  # as read from a file: the line's number, from 1, where the line has none
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    ttl: float | None = Field(
        default=None, gt=0, le=MAX_TTL_S, description="seconds that it may wait for its first step"
    )

    def as_prompt(self, chat: bool) -> Prompt:
        given = [value for value in (self.prompt, self.prompt_token_ids, self.messages) if value is not None]
        if len(given) != 1:
            raise RequestError("give exactly one of prompt, prompt_token_ids and messages", param="prompt")
        if self.messages is not None:
            return ChatPrompt(self.messages)
        if self.prompt_token_ids is not None:
            return TokenPrompt(self.prompt_token_ids)
        text = self.prompt or ""
        return ChatPrompt([{"role": "user", "content": text}]) if chat else TextPrompt(text)


@dataclass(frozen=True, slots=True)
class Refused:
    """A line that is no request."""

    id: str | int
    error: str


class Offline:
    """`generate prompt="…"` prints the text alone; `generate input=in.jsonl output=out.jsonl` keeps the lines' order."""

    class Settings(SamplingFields):
        prompt: str | None = Field(default=None, description="text to continue; - reads stdin")
        chat: bool = Field(default=False, description="put the prompt through the chat template as a user message")
        input: Path | None = Field(default=None, description="JSONL, one request per line")
        output: Path | None = Field(default=None, description="JSONL of answers; null: stdout")
        concurrency: int = Field(default=64, ge=1, le=4096)

        @field_validator("input")
        @classmethod
        def _readable(cls, path: Path | None) -> Path | None:
            """Settings are checked before the model is read, which takes far longer than to see that a file is missing.
            Raises ConfigError and not ValueError: `input=` is what the user wrote, and pydantic lets it through as it is.
            """
            if path is not None:
                _check_readable(path)
            return path

    def __init__(self, settings: Settings, context: FrontendContext):
        if (settings.prompt is None) == (settings.input is None):
            raise ConfigError('generate needs prompt="…" or input=file.jsonl, one of the two')
        if settings.prompt is not None and settings.logprobs is not None:
            raise ConfigError("logprobs are not shown where the text alone is printed (prompt=…); use input=file.jsonl")
        self._settings = settings
        self._front = context.front

    async def run(self) -> None:
        if self._settings.input is None:
            await self._print_one()
        else:
            await self._answer_file(self._settings.input)

    async def _print_one(self) -> None:
        settings = self._settings
        text = sys.stdin.read() if settings.prompt == "-" else settings.prompt
        line = _line({"prompt": text}, settings)
        request = self._request("0", line)
        if settings.n > 1:
            outputs = [output async for output in self._front.generate(request)]
            for index in range(settings.n):
                print(_choice(outputs, index, reasoning_of(self._front, request))["text"])
            return
        reasoning = reasoning_of(self._front, request)
        with printed() as answer:
            async with aclosing(self._front.generate(request)) as stream:
                async for output in stream:
                    for part in output.outputs:
                        answer.add(reasoning.take(part, output.prompt_token_ids))
        print()

    async def _answer_file(self, path: Path) -> None:
        lines = list(_read_lines(path, self._settings))
        self._write("", "a")  # a file that cannot be written is noticed before the work, not after it
        slots = asyncio.Semaphore(self._settings.concurrency)
        bar = tqdm(total=len(lines), desc="requests", file=sys.stderr, disable=None)

        async def answer(index: int, line: Line | Refused) -> dict[str, Any]:
            async with slots:
                answered = asdict(line) if isinstance(line, Refused) else await self._answer(str(index), line)
            bar.update()
            return answered

        answers = await asyncio.gather(*(answer(i, line) for i, line in enumerate(lines)))
        bar.close()
        self._write("".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers))
        failed = sum("error" in answer for answer in answers)
        if failed:
            raise RequestError(f"{failed} of {len(answers)} lines failed; their `error` fields say why")

    async def _answer(self, key: str, line: Line) -> dict[str, Any]:
        try:
            request = self._request(key, line)
            outputs = await self._outputs(request)
            reasoning = [reasoning_of(self._front, request) for _ in range(line.n)]
            choices = [_choice(outputs, index, each) for index, each in enumerate(reasoning)]
        except NonetError as error:
            return {"id": line.id, "error": str(error)}
        usage = outputs[-1].usage
        assert usage is not None
        num_reasoning = sum(each.num_tokens for each in reasoning)
        counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        counts |= {"reasoning_tokens": num_reasoning} if num_reasoning else {}
        return {"id": line.id, "choices": choices, "usage": counts}

    async def _outputs(self, request: GenerateRequest) -> list[RequestOutput]:
        """Comes back later where the queue is full, as an admission asks of clients; a line with a `ttl` will not wait."""
        while True:
            try:
                async with aclosing(self._front.generate(request)) as stream:
                    return [output async for output in stream]
            except OverloadedError as error:
                if request.ttl is not None:
                    raise
                await asyncio.sleep(error.retry_after)

    def _request(self, key: str, line: Line) -> GenerateRequest:
        request = GenerateRequest(
            f"offline-{key}",
            line.as_prompt(self._settings.chat),
            line.params(),
            max_tokens=line.max_tokens,
            grammar_param=line.grammar_param,
            grammar_backend_param=line.grammar_backend_param,
            priority=line.priority,
            ttl=line.ttl,
        )
        markers = self._front.reasoning_parser.special_tokens if isinstance(request.prompt, ChatPrompt) else ()
        return with_shown(request, self._front.renderer.tokenizer, markers)

    def _write(self, text: str, mode: Literal["w", "a"] = "w") -> None:
        path = self._settings.output
        if path is None:
            sys.stdout.write(text)
            return
        try:
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"output={path}: {error.strerror or error}") from None


def _line(values: dict[str, Any], settings: Offline.Settings) -> Line:
    """Its own values, else the command line's. A grammar of its own, whatever field it comes in, takes the place of that one's.

    Raises ValidationError, RequestError.
    """
    grammar_fields = GrammarFields.model_fields.keys()
    names = SamplingFields.model_fields.keys() - grammar_fields
    line = Line.model_validate({**{name: getattr(settings, name) for name in names}, **values})
    return line.with_grammar_of(settings) if grammar_fields.isdisjoint(values) else line


def _check_readable(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"input={path}: no such file")
    if path.is_dir():
        raise ConfigError(f"input={path}: is a folder; name a JSONL file, one request per line")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"input={path}: may not be read; see its permissions")


def _read_lines(path: Path, settings: Offline.Settings) -> Iterator[Line | Refused]:
    """A line that is no request becomes its error message, so that the others are still answered."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"input={path}: is not UTF-8 text (byte {error.start}); convert it first") from None
    except OSError as error:
        raise ConfigError(f"input={path}: {error.strerror or error}") from None
    for number, row in enumerate(text.split("\n"), start=1):  # `splitlines` would also split at U+2028 inside a prompt
        if row.strip():
            yield _read_line(number, row, settings)


def _read_line(number: int, row: str, settings: Offline.Settings) -> Line | Refused:
    name: str | int = number
    try:
        values = json.loads(row)
        if not isinstance(values, dict):
            raise ValueError("a line must be a JSON object")
        given = values.get("id")
        name = number if given is None or not isinstance(given, str | int) else given
        values["id"] = number if given is None else given
        return _line(values, settings)
    except ValidationError as error:
        return Refused(name, f"line {number}: " + "; ".join(_problem(found) for found in error.errors()))
    except (ValueError, RecursionError, RequestError) as error:
        return Refused(name, f"line {number}: {error}")


def _problem(found: Any) -> str:
    field = ".".join(map(str, found["loc"]))
    if found["type"] == "extra_forbidden":
        return f"unknown field {field!r}{near_matches(field, Line.model_fields)}"
    return f"{field}: {found['msg']}"


def _choice(outputs: list[RequestOutput], index: int, reasoning: ReasoningOfChoice) -> dict[str, Any]:
    parts = [choice for output in outputs for choice in output.outputs if choice.index == index]
    said = [reasoning.take(part, outputs[0].prompt_token_ids) for part in parts]
    thought = "".join(split.reasoning for split in said)
    logprobs = [_logprobs(token) for part in parts for token in part.logprobs]
    return {
        "text": "".join(split.content for split in said),
        **({"reasoning": thought} if thought else {}),
        "token_ids": [token for part in parts for token in part.token_ids],
        "finish_reason": parts[-1].finish_reason,
        "stop_reason": parts[-1].stop_reason,
        **({"logprobs": logprobs} if logprobs else {}),
    }


def _logprobs(token: TokenLogprobs) -> dict[str, Any]:
    """`top` holds [token id, logprob] pairs, best first."""
    return {"token_id": token.token_id, "logprob": token.logprob, "rank": token.rank, "top": token.top}
