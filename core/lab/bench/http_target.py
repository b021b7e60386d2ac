"""An OpenAI-compatible server over HTTP with streaming. It shares the machine with its client, so the client does little: bytes
are searched for the beginnings of events as they come, and JSON is read once, at an answer's end."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from core.errors import ConfigError, NonetError
from core.lab.bench.calls import Call, WorkItem

COMPLETIONS = "/v1/completions"
EVENT, DONE = b"\ndata: {", b"\ndata: [DONE]"  # a line break stands before either, also where the body begins
LIMIT_S = 900.0  # of a call
CLOSE_S = 1.0  # that a server has to close the connection after its last word; one that is left early counts an abort
PromptForm = Literal["ids", "text"]
# Each is about one token in most vocabularies.
TEXT = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but what all were when "
    "we there can an your which their said if do will each about how up out them then she many some so these would other into "
    "has more her two like him see time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know"
)
WORDS = TEXT.split()


@dataclass(slots=True)
class HttpTarget:
    """See `core.lab.bench.calls.Target`. A connection per call."""

    address: SplitResult
    model: str
    vocab_size: int
    prompts: PromptForm = "ids"
    extra: Mapping[str, Any] = field(default_factory=dict)  # more of each body

    def counting(self) -> None:
        """The server's steps are its own."""

    async def call(self, call: Call) -> None:
        request = self._request(call.item)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        reply, call.sent = Reply(call, ended), time.perf_counter()
        try:
            transport, _ = await loop.create_connection(
                lambda: reply, self.address.hostname or "", self.address.port or 80
            )
            try:
                transport.write(request)
                async with asyncio.timeout(LIMIT_S):
                    await ended
            finally:
                transport.abort()
        except (OSError, TimeoutError) as error:
            call.error = f"{type(error).__name__}: {error}"
        call.ended = call.ended or time.perf_counter()
        reply.settle()

    def _request(self, item: WorkItem) -> bytes:
        body = json.dumps(self.body(item)).encode()
        host = f"{self.address.hostname}:{self.address.port or 80}"
        head = (
            f"POST {self.address.path.rstrip('/')}{COMPLETIONS} HTTP/1.1\r\nhost: {host}\r\naccept: text/event-stream\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body

    def body(self, item: WorkItem) -> dict[str, Any]:
        made: dict[str, Any] = {
            "model": self.model,
            "prompt": item.prompt_token_ids if self.prompts == "ids" else text_of(item.prompt_token_ids),
            "max_tokens": item.output_len,
            "temperature": item.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if item.seed is not None:
            made["seed"] = item.seed
        if item.schema is None:
            made["ignore_eos"] = True
        else:
            made["structured_outputs"] = {"json": item.schema, "disable_any_whitespace": True}
        return {**made, **self.extra}


def text_of(ids: list[int]) -> str:
    """Equal prefixes of ids are equal prefixes of texts."""
    return " ".join(WORDS[number % len(WORDS)] for number in ids)


class Reply(asyncio.Protocol):
    """One answer: when its events came, and what the last of them says."""

    def __init__(self, call: Call, ended: asyncio.Future[None]):
        self._call = call
        self._ended = ended
        self._pieces: list[bytes] = []
        self._tail = b""  # of what came before: a beginning may come in two pieces

    def data_received(self, data: bytes) -> None:
        """Events that come in one piece came at one moment."""
        now = time.perf_counter()
        self._pieces.append(data)
        seen = self._tail + data
        if EVENT in seen[-len(data) - len(EVENT) + 1 :]:
            self._call.arrivals.append(now)
        if DONE in seen and not self._call.ended:
            self._call.ended = now
            asyncio.get_running_loop().call_later(CLOSE_S, self._end)
        self._tail = seen[-len(DONE) + 1 :]

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and not self._call.ended:
            self._call.error = f"{type(error).__name__}: {error}"
        self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def settle(self) -> None:
        """Takes in what the answer says of itself, once nothing is measured any more."""
        call, whole = self._call, b"".join(self._pieces)
        head, _, body = whole.partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1:2]
        if call.error:
            return
        if status != [b"200"]:
            call.arrivals.clear()
            call.error = f"HTTP {status[0].decode() if status else 'without a status'}: {said(body)}"
            return
        events = events_of(unchunked(body) if b"transfer-encoding: chunked" in head.lower() else body)
        failed = next((event["error"] for event in events if "error" in event), None)
        if failed is not None or not events or DONE.strip() not in body:
            call.error = f"the stream ended early: {json.dumps(failed)[:300] if failed else 'no [DONE]'}"
            return
        _take_usage(call, next((event["usage"] for event in reversed(events) if event.get("usage")), None))


def _take_usage(call: Call, usage: Mapping[str, Any] | None) -> None:
    """Of a server that tells no usage, each event counts as a token."""
    if usage is None:
        call.num_tokens, call.num_prompt_tokens = len(call.arrivals), len(call.item.prompt_token_ids)
        return
    call.num_tokens, call.num_prompt_tokens = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
    details = usage.get("prompt_tokens_details") or {}
    call.num_cached_tokens = details.get("cached_tokens")


def said(body: bytes) -> str:
    text = body.decode(errors="replace")
    return text[text.find("{") if "{" in text else 0 :].strip()[:300]


def unchunked(body: bytes) -> bytes:
    """The body of a chunked answer (RFC 9112, section 7.1); what is cut off is left out."""
    parts, at = [], 0
    while (line := body.find(b"\r\n", at)) >= 0:
        size = int(body[at:line].split(b";")[0] or b"0", 16)
        if not size:
            break
        parts.append(body[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return b"".join(parts)


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The last ones: usage and errors are told at the end."""
    lines = [line for line in body.splitlines() if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines[-3:]]


def address_of(url: str) -> SplitResult:
    """Raises ConfigError for what is no plain HTTP address."""
    address = urlsplit(url.removesuffix("/").removesuffix("/v1"))
    if address.scheme != "http" or not address.hostname or not _has_port(address):
        why = "; TLS would be measured with it" if address.scheme == "https" else ""
        raise ConfigError(f"url={url}: an address as in url=http://127.0.0.1:8000{why}", "url")
    return address


def _has_port(address: SplitResult) -> bool:
    """One that can be, or none, which is 80."""
    try:
        return address.port is None or address.port > 0
    except ValueError:
        return False


def ask(address: SplitResult, path: str) -> dict[str, Any]:
    """Raises NonetError where nobody answers as an OpenAI-compatible server does."""
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=30)
    try:
        connection.request("GET", f"{address.path.rstrip('/')}{path}")
        answer = connection.getresponse()
        found = json.loads(answer.read())
        if answer.status != 200 or not isinstance(found, dict):
            raise NonetError(f"{address.geturl()}{path} answered HTTP {answer.status}: {str(found)[:200]}")
        return found
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NonetError(f"{address.geturl()}{path}: {type(error).__name__}: {error}; is the server up?") from None
    finally:
        connection.close()


def discovered_model(address: SplitResult) -> str:
    models = ask(address, "/v1/models").get("data") or []
    if not models:
        raise NonetError(f"{address.geturl()}/v1/models names no model; say which with model=NAME")
    return str(models[0]["id"])


async def settled_form(target: HttpTarget) -> PromptForm:
    """Whether the server takes token ids as a prompt. Raises NonetError where it takes no text either."""
    errors = []
    forms: tuple[PromptForm, ...] = ("ids", "text")
    for form in forms:
        target.prompts = form
        probe = Call(WorkItem(list(range(target.vocab_size // 2, target.vocab_size // 2 + 4)), 2))
        await target.call(probe)
        if not probe.error:
            return form
        errors.append(probe.error)
    raise NonetError(f"{target.address.geturl()} answered neither a prompt of ids nor one of text: {'; '.join(errors)}")
