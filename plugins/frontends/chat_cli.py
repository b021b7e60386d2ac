"""A terminal chat: streams, keeps the history without its reasoning, and Ctrl-C stops a reply and not the program."""

from __future__ import annotations

import asyncio
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.patch_stdout import patch_stdout
from pydantic import ValidationError

from core.errors import EngineDeadError, NonetError, RequestError, near_matches
from core.outputs import RequestOutput
from core.stages.frontend import FrontendContext, GenerateRequest
from core.stages.renderer import ChatPrompt
from plugins.frontends.chat_settings import ChatSettings
from plugins.frontends.reasoning import printed, reasoning_of, with_shown
from plugins.frontends.sampling_fields import GrammarFields, SamplingFields

HELP = """/system TEXT      set the system message (empty: none); starts the chat anew
/set FIELD VALUE  change a sampling field: /set temperature 0.2
/set FIELD        its value; /set FIELD null clears it
/show             sampling fields and system message
/stats            TTFT, TPOT and tokens/s of the last reply
/reset            forget the conversation
/help             this list
/exit             leave (or Ctrl-D)"""

NOT_SET = (  # two that are refused, and those that a line cannot hold
    *("n", "logprobs", "logits_processors", "logit_bias", "allowed_token_ids", "bad_words", "repetition_detection"),
    *GrammarFields.model_fields,
)
SETTABLE = tuple(name for name in SamplingFields.model_fields if name not in NOT_SET)
CLEARED: dict[str, Any] = {"stop": (), "stop_token_ids": ()}  # what null means where a field cannot be null


class ChatCli:
    """Config group `frontend`. Reads lines from the terminal, or from a pipe."""

    Settings = ChatSettings

    def __init__(self, settings: ChatSettings, context: FrontendContext):
        self._fields = settings
        self._front = context.front
        self._messages: list[dict[str, str]] = []
        self._system = settings.system
        self._last: RequestOutput | None = None
        self._partial = ""  # what of the current reply has come, without its reasoning
        self._turn = 0
        self._model = context.front.model.name
        self._commands: dict[str, Callable[[str], None]] = {
            "system": self._set_system,
            "set": self._set,
            "show": self._show,
            "stats": self._stats,
            "reset": self._reset,
            "help": lambda _: print(HELP),
        }

    async def run(self) -> None:
        session: PromptSession[str] | None = PromptSession() if sys.stdin.isatty() else None
        print(f"Chatting with {self._model}. /help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves.")
        while True:
            try:
                line = await self._read(session)
            except KeyboardInterrupt:  # at the prompt: only clears the line
                continue
            except EOFError:
                return
            if line.strip() in ("/exit", "/quit"):
                return
            await self._handle(line)

    async def _read(self, session: PromptSession[str] | None) -> str:
        if session is not None:
            with patch_stdout():
                return await session.prompt_async("> ")
        return await read_line()

    async def _handle(self, line: str) -> None:
        if not line.strip():
            return
        if not line.startswith("/"):
            await self._reply_to(line)
            return
        name, _, rest = line[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            print(f"unknown command /{name}{near_matches(name, [*self._commands, 'exit'])}")
        else:
            command(rest.strip())

    async def _reply_to(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        self._partial = ""  # here, not in the task: Ctrl-C may end the task before its first step
        task = asyncio.ensure_future(self._stream())
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            with quiet_keyboard():
                reply = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the program ends, not this reply alone
            print(" [stopped]")
            reply = self._partial
        except EngineDeadError:
            raise
        except NonetError as error:
            print(f"error: {error}")
            self._messages.pop()
            return
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        self._messages.append({"role": "assistant", "content": reply})

    async def _stream(self) -> str:
        markers = self._front.reasoning_parser.special_tokens
        request = with_shown(self._request(), self._front.renderer.tokenizer, markers)
        reasoning = reasoning_of(self._front, request)
        with printed() as reply:
            async with aclosing(self._front.generate(request)) as outputs:
                async for output in outputs:
                    for choice in output.outputs:
                        split = reasoning.take(choice, output.prompt_token_ids)
                        self._partial += split.content
                        reply.add(split)
                    self._last = output
        print()
        return self._partial

    def _request(self) -> GenerateRequest:
        self._turn += 1
        system = [{"role": "system", "content": self._system}] if self._system else []
        return GenerateRequest(
            f"chat-{self._turn}",
            ChatPrompt([*system, *self._messages]),
            self._fields.params(),
            max_tokens=self._max_tokens(),
            grammar_param=self._fields.grammar_param,
            grammar_backend_param=self._fields.grammar_backend_param,
            stream=True,
        )

    def _max_tokens(self) -> int | None:
        """A long conversation leaves less room than the setting asks for; then the rest of the context is taken."""
        wanted = self._fields.max_tokens
        used = sum(len(message["content"]) for message in self._messages) // 2
        return None if wanted is None or used + wanted > self._front.model.max_model_len else wanted

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._reset("")

    def _set(self, rest: str) -> None:
        field, _, value = rest.partition(" ")
        if not field:
            print(f"usage: /set FIELD VALUE, as in /set temperature 0.2; fields: {', '.join(SETTABLE)}")
            return
        if field not in SamplingFields.model_fields:
            print(f"unknown field {field!r}{near_matches(field, SamplingFields.model_fields)}")
            return
        if not value.strip():
            print(f"{field} = {getattr(self._fields, field)}   (/set {field} VALUE changes it)")
            return
        parsed: Any = CLEARED.get(field) if value in ("null", "none") else value
        try:
            values = {**self._fields.model_dump(), field: parsed}
            self._fields = type(self._fields).model_validate(values)
            print(f"{field} = {getattr(self._fields, field)}")
        except ValidationError as error:
            print(f"{field}: {error.errors()[0]['msg']}")
        except RequestError as error:
            print(error)

    def _show(self, _: str) -> None:
        for name in SETTABLE:
            print(f"{name} = {getattr(self._fields, name)}")
        print(f"system = {self._system}")

    def _stats(self, _: str) -> None:
        timings = self._last.outputs[-1].timings if self._last and self._last.outputs else None
        usage = self._last.usage if self._last else None
        if timings is None or usage is None or timings.ttft is None:
            print("no finished reply yet")
            return
        tpot = f"{timings.tpot * 1000:.1f} ms, {1 / timings.tpot:.1f} tokens/s" if timings.tpot else "one token only"
        print(
            f"TTFT {timings.ttft * 1000:.0f} ms, TPOT {tpot}; "
            f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), reply {usage.completion_tokens}"
        )

    def _reset(self, _: str) -> None:
        self._messages.clear()
        print("conversation cleared")


@contextmanager
def quiet_keyboard() -> Iterator[None]:
    """While a reply streams, keys are not mixed into it, and are dropped before the next prompt. Ctrl-C stays a signal.

    Does nothing where stdin is no terminal: what waits in a pipe is the next line.
    """
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    quiet = termios.tcgetattr(fd)
    quiet[3] &= ~termios.ECHO  # 3: the local flags
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcflush(fd, termios.TCIFLUSH)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def read_line() -> str:
    """The next line of a stdin that is no terminal. Raises EOFError.

    In a daemon thread, and past `sys.stdin` and its lock: a read that waits for ever must not keep the program from ending.
    """
    loop = asyncio.get_running_loop()
    line: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            got = stdin.readline()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: line.done() or line.set_result(got))

    threading.Thread(target=read, name="stdin", daemon=True).start()
    got = await line
    if not got:
        raise EOFError
    return got.decode("utf-8", "replace").rstrip("\r\n")
