"""OpenVINO GenAI with continuous batching behind as much of an OpenAI-compatible server as `bench url=…` asks for.

GenAI has no server of its own; this one is asyncio and one thread of steps, so that little is added to what the engine takes.
Arguments: model (a GGUF file or a folder), port, threads, sequences at once. Runs on loopback until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

HEAD = b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\nconnection: close\r\n\r\n"
Queue = asyncio.Queue["int | None"]


@dataclass(slots=True, eq=False)
class Stream:
    handle: Any
    tokens: Queue
    num_left: int


class Engine:
    """Steps in a thread of its own; token ids go to the queue of each request."""

    def __init__(self, model: str, num_threads: int, max_num_seqs: int):
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = max_num_seqs
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = False
        self._genai = genai
        self._pipeline = genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": num_threads}
        )
        self._loop = asyncio.get_running_loop()
        self._arrived = threading.Event()
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._num_requests = 0
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, prompt: list[int], max_tokens: int) -> Queue:
        import numpy as np
        import openvino as ov

        config = self._genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        tokens: Queue = asyncio.Queue()
        with self._lock:
            self._num_requests += 1
            handle = self._pipeline.add_request(
                self._num_requests, ov.Tensor(np.array([prompt], dtype=np.int64)), config
            )
            self._streams.append(Stream(handle, tokens, max_tokens))
        self._arrived.set()
        return tokens

    def _run(self) -> None:
        while True:
            if not self._pipeline.has_non_finished_requests():
                self._arrived.wait()
            self._arrived.clear()
            self._pipeline.step()
            with self._lock:
                streams = list(self._streams)
            told = [(stream, ids) for stream in streams if (ids := _read(stream.handle))]
            if told:
                self._loop.call_soon_threadsafe(_hand_over, told)
            with self._lock:
                self._streams = [stream for stream in self._streams if stream.num_left > 0]


def _read(handle: Any) -> list[int]:
    ids: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            ids += output.generated_ids
    return ids


def _hand_over(told: list[tuple[Stream, list[int]]]) -> None:
    for stream, ids in told:
        stream.num_left -= len(ids)
        for token in ids:
            stream.tokens.put_nowait(token)
        if stream.num_left <= 0:
            stream.tokens.put_nowait(None)


async def answer(engine: Engine, request: dict[str, Any]) -> AsyncIterator[bytes]:
    """Events of one completion, a token each."""
    prompt, count = request["prompt"], 0
    tokens = engine.add(prompt, request["max_tokens"])
    while (token := await tokens.get()) is not None:
        count += 1
        choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": None}
        yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"


async def serve(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        path = head.split(" ", 2)[1]
        if path != "/v1/completions":
            writer.write(HEAD % (200, b"OK", b"application/json") + b'{"data": [{"id": "m"}]}')
            return
        request = json.loads(body)
        if not isinstance(request["prompt"], list):
            writer.write(HEAD % (400, b"Bad Request", b"application/json") + b'{"error": "prompt: token ids"}')
            return
        writer.write(HEAD % (200, b"OK", b"text/event-stream"))
        async for event in answer(engine, request):
            writer.write(event)
        await writer.drain()
    finally:
        writer.close()


async def main(model: str, port: str, num_threads: str, max_num_seqs: str) -> None:
    engine = Engine(model, int(num_threads), int(max_num_seqs))
    server = await asyncio.start_server(lambda r, w: serve(engine, r, w), "127.0.0.1", int(port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
