"""The client of `bench url=…`: what it reads off the bytes of a server, however they are cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from core.errors import ConfigError, NonetError
from core.lab.bench.calls import Call, WorkItem
from core.lab.bench.http_target import HttpTarget, address_of, ask, discovered_model, settled_form, text_of, unchunked

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}
DONE = b"data: [DONE]\n\n"


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream(*events: bytes) -> bytes:
    return HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"


@asynccontextmanager
async def answering(
    *pieces: bytes, pause: float = 0.0, bodies: list[dict[str, Any]] | None = None
) -> AsyncIterator[HttpTarget]:
    """A server that answers every call with these bytes, piece after piece."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line), 0
        )
        body = await reader.readexactly(length)
        if bodies is not None:
            bodies.append(json.loads(body))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield HttpTarget(address_of(f"http://127.0.0.1:{port}/v1/"), "m", 1000)


async def called(*pieces: bytes, pause: float = 0.0, item: WorkItem | None = None) -> Call:
    call = Call(item or WorkItem([1, 2, 3], 5))
    async with answering(*pieces, pause=pause) as target:
        await target.call(call)
    return call


ANSWER = (
    event(choices=[{"text": 'a "data: {" b'}]),
    event(choices=[{"text": "c"}]),
    event(choices=[], usage=USAGE),
    DONE,
)


async def test_an_answer_in_one_piece() -> None:
    call = await called(stream(*ANSWER))
    assert (call.error, len(call.arrivals)) == ("", 1)
    assert (call.num_tokens, call.num_prompt_tokens, call.num_cached_tokens) == (5, 3, 2)
    assert call.sent < call.arrivals[0] <= call.ended


async def test_each_moment_at_which_events_came_is_one_arrival() -> None:
    first, *others = (chunk(one) for one in ANSWER)
    call = await called(HEAD + first, *others, b"0\r\n\r\n", pause=0.02)
    assert (call.error, len(call.arrivals)) == ("", 3)  # two texts, and the usage
    assert call.ttft is not None and call.arrivals[1] - call.arrivals[0] > 0.01
    assert call.tpot == pytest.approx((call.arrivals[-1] - call.arrivals[0]) / 4)


@pytest.mark.parametrize("at", range(len(HEAD), len(stream(*ANSWER)), 3))
async def test_wherever_it_is_cut_no_event_is_lost_or_counted_twice(at: int) -> None:
    whole = stream(*ANSWER)
    call = await called(whole[:at], whole[at:], pause=0.005)
    starts = [index for index in range(len(whole)) if whole.startswith(b"\ndata: {", index)]
    ends = [start + len(b"\ndata: {") for start in starts]
    expected = any(end <= at for end in ends) + any(end > at for end in ends)
    assert (call.error, call.num_tokens, len(call.arrivals)) == ("", 5, expected)


async def test_what_is_no_answer_says_why() -> None:
    refused = await called(b'HTTP/1.1 503 Busy\r\nconnection: close\r\n\r\n{"error": {"message": "too much"}}')
    assert refused.error == 'HTTP 503: {"error": {"message": "too much"}}' and not refused.arrivals
    cut = await called(HEAD + chunk(ANSWER[0]))
    assert cut.error == "the stream ended early: no [DONE]"
    failed = await called(stream(ANSWER[0], event(error={"code": "engine_dead"})))
    assert "engine_dead" in failed.error
    gone = Call(WorkItem([1], 1))
    async with answering() as target:
        pass
    await target.call(gone)
    assert gone.error.startswith("ConnectionRefusedError")


async def test_a_server_without_usage_is_counted_by_its_events() -> None:
    first, *others = (chunk(one) for one in (*ANSWER[:2], DONE))
    call = await called(HEAD + first, *others, b"0\r\n\r\n", pause=0.02)
    assert (call.num_tokens, call.num_prompt_tokens, call.num_cached_tokens) == (2, 3, None)


async def test_what_is_sent() -> None:
    bodies: list[dict[str, Any]] = []
    async with answering(stream(*ANSWER), bodies=bodies) as target:
        target.extra = {"return_token_ids": True}
        await target.call(Call(WorkItem([7, 8], 4)))
        target.prompts = "text"
        await target.call(Call(WorkItem([7, 8], 4, schema={"type": "object"}, temperature=1.0, seed=3)))
    plain, bound = bodies
    assert (plain["prompt"], plain["max_tokens"], plain["ignore_eos"]) == ([7, 8], 4, True)
    assert plain["return_token_ids"] and plain["stream_options"] == {"include_usage": True} and "seed" not in plain
    assert bound["prompt"] == text_of([7, 8]) and bound["seed"] == 3 and "ignore_eos" not in bound
    assert bound["structured_outputs"]["json"] == {"type": "object"}


async def test_ids_where_they_are_taken_and_text_elsewhere() -> None:
    async with answering(stream(*ANSWER)) as target:
        assert await settled_form(target) == "ids"
    refusal = b"HTTP/1.1 400 Bad\r\nconnection: close\r\n\r\n{}"
    async with answering(refusal) as target:
        with pytest.raises(NonetError, match="neither a prompt of ids nor one of text: HTTP 400"):
            await settled_form(target)


async def test_the_model_is_the_servers_first() -> None:
    body = json.dumps({"data": [{"id": "tiny"}, {"id": "other"}]}).encode()
    async with answering(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + body) as target:
        assert await asyncio.to_thread(discovered_model, target.address) == "tiny"
    with pytest.raises(NonetError, match="is the server up"):
        ask(target.address, "/v1/models")


def test_addresses() -> None:
    assert address_of("http://127.0.0.1:8000/v1").geturl() == "http://127.0.0.1:8000"
    for wrong in ("http://127.0.0.1:99999", "http://127.0.0.1:0", "127.0.0.1:8000", "https://example.org", "http://"):
        with pytest.raises(ConfigError, match="url=") as refused:
            address_of(wrong)
        assert ("TLS" in str(refused.value)) == wrong.startswith("https")


def test_chunks_are_taken_apart() -> None:
    parts: Sequence[bytes] = (b"one", b"two\r\nthree", b"x" * 300)
    assert unchunked(b"".join(map(chunk, parts)) + b"0\r\n\r\n") == b"".join(parts)
    assert unchunked(chunk(b"one") + b"5\r\nab") == b"oneab"
