"""HTTP/1.1 by hand: requests that no library would send, and connections cut at any byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


def request_bytes(
    path: str,
    body: bytes = b"",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    length: int | str | None = None,
    host: str = "127.0.0.1",
) -> bytes:
    """One request that asks for the connection to be closed. `length`: what Content-Length says, "" for no such header."""
    fields = {"Host": host, "Connection": "close", "Content-Type": "application/json"}
    if length != "":
        fields["Content-Length"] = str(len(body) if length is None else length)
    fields |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """What came before the connection ended. `status` 0: nothing that looks like HTTP."""

    data: bytes

    @property
    def status(self) -> int:
        words = self.data.split(b" ", 2)
        return int(words[1]) if len(words) == 3 and words[0].startswith(b"HTTP/1") else 0

    def json(self) -> dict[str, Any]:
        """The body of an answer with Content-Length."""
        answer: dict[str, Any] = json.loads(self.data.partition(b"\r\n\r\n")[2])
        return answer


async def exchange(port: int, data: bytes, *, cut_after: int | None = None, seconds: float = 60.0) -> RawAnswer:
    """Send `data`, read to the end of the connection, or close it after `cut_after` bytes of the answer.

    TimeoutError when the connection does not end in time.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(seconds):
            return RawAnswer(await _exchange(reader, writer, data, cut_after))
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes, cut_after: int | None
) -> bytes:
    writing = asyncio.create_task(_write(writer, data))  # a server may answer and close while we still write
    received = b""
    with suppress(OSError):
        while cut_after is None or len(received) < cut_after:
            part = await reader.read(65536 if cut_after is None else min(cut_after - len(received), 65536))
            if not part:
                break
            received += part
    writing.cancel()
    await asyncio.wait([writing])
    return received


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(OSError):
        writer.write(data)
        await writer.drain()


async def send_part(port: int, data: bytes) -> None:
    """Send bytes and close at once."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
