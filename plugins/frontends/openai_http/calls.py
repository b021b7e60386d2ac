"""One HTTP call while its answer is made: the outputs of its prompts in one stream, ended or aborted as one.

Whoever leaves (client, drain limit, an error in one prompt) goes through `stop` or the end of the `async with`, and both
close every iterator of the front, which frees what the engine holds (bugs I1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from core.errors import GenerationError, OverloadedError
from core.outputs import RequestOutput, Usage
from core.request import FinishReason
from core.stages.frontend import Deltas, FrontHalf, GenerateRequest
from plugins.frontends.openai_http.drain import Drain


@dataclass(frozen=True, slots=True)
class Delta:
    prompt: int  # index in the call's list of prompts
    output: RequestOutput


class Call:
    """`async with Call(...) as call`, then `await call.next()` until it returns None."""

    def __init__(self, front: FrontHalf, requests: Sequence[GenerateRequest], drain: Drain):
        self._front = front
        self._requests = list(requests)
        self._drain = drain
        self._items: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        # Outputs that were pulled and not yet sent: a slow reader makes the front merge deltas instead of queueing here.
        self._room = asyncio.Semaphore(len(self._requests) + 1)
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._usages: list[Usage | None] = [None] * len(self._requests)

    async def __aenter__(self) -> Call:
        """Raises ShuttingDownError."""
        self._drain.add(self)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drain.remove(self)
        self._cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def stop(self, error: Exception) -> None:
        """Abort now; `next` raises `error` after the outputs that came before it."""
        if not self._stopped:
            self._items.put_nowait(error)
        self._cancel()

    async def next(self, timeout: float | None = None) -> Delta | None:
        """The next output; None when every prompt has ended. Raises TimeoutError, or what ended the call."""
        if self._items.empty():
            async with asyncio.timeout(timeout):
                item = await self._items.get()
        else:
            item = self._items.get_nowait()
        if isinstance(item, Exception):
            raise item
        if item is not None:
            self._room.release()
        return item

    @property
    def usage(self) -> Usage:
        """Sums over the prompts; each prompt counts once, whatever n is."""
        known = [usage for usage in self._usages if usage is not None]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in known),
            completion_tokens=sum(usage.completion_tokens for usage in known),
            cached_tokens=sum(usage.cached_tokens for usage in known),
        )

    def _cancel(self) -> None:
        if self._task is not None and not self._stopped:
            self._task.cancel()
        self._stopped = True

    async def _run(self) -> None:
        iterators: list[Deltas] = []
        try:
            iterators += await self._iterators()
            await self._pump_all(iterators)
            self._items.put_nowait(None)
        except Exception as error:
            self._items.put_nowait(error)
        finally:
            for iterator in iterators:
                await iterator.aclose()

    async def _iterators(self) -> list[Deltas]:
        if len(self._requests) == 1:
            return [self._front.generate(self._requests[0])]
        return await self._front.generate_many(self._requests)

    async def _pump_all(self, iterators: list[Deltas]) -> None:
        if len(iterators) == 1:
            await self._pump(0, iterators[0])
            return
        tasks = [asyncio.create_task(self._pump(index, iterator)) for index, iterator in enumerate(iterators)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _pump(self, index: int, iterator: Deltas) -> None:
        async for output in iterator:
            for part in output.outputs:
                _check_end(part.finish_reason)
            if output.usage is not None:
                self._usages[index] = output.usage
            await self._room.acquire()
            self._items.put_nowait(Delta(index, output))


def _check_end(reason: FinishReason | None) -> None:
    """A front raises in place of these two ends; no client is to see them, whatever a front does."""
    if reason is FinishReason.ERROR:
        raise GenerationError("the engine ended a choice with an error")
    if reason is FinishReason.EXPIRED:
        raise OverloadedError("the request was not scheduled in the time that it may wait; try again later")
