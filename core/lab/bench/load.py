"""Ways to send the requests of a workload: so many at a time, or as they arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.lab.bench.calls import Call, Target, WorkItem
from core.lab.bench.prompts import Prompts


@dataclass(frozen=True, slots=True)
class Load:
    """What a workload runs against, in one round."""

    target: Target
    prompts: Prompts
    on_done: Callable[[], object] = lambda: None  # after each call that counts

    async def warm(self, items: Sequence[WorkItem]) -> None:
        """Run first, one after another, and not counted."""
        for item in items:
            await self.target.call(Call(item))
        self.target.counting()

    async def one(self, call: Call) -> Call:
        await self.target.call(call)
        self.on_done()
        return call

    async def closed(self, items: Sequence[WorkItem], concurrency: int) -> list[Call]:
        """`concurrency` at a time: the next is sent when one has ended."""
        slots = asyncio.Semaphore(concurrency)

        async def one(item: WorkItem) -> Call:
            async with slots:
                return await self.one(Call(item))

        return await asyncio.gather(*map(one, items))

    async def arriving(self, items: Sequence[WorkItem], rate: float) -> list[Call]:
        """A Poisson process of `rate` per second, however many are in flight."""
        tasks, at = list[asyncio.Task[Call]](), time.perf_counter()
        for item in items:
            at += self.prompts.gap(rate)
            await asyncio.sleep(max(at - time.perf_counter(), 0.0))
            tasks.append(asyncio.create_task(self.one(Call(item))))
        return await asyncio.gather(*tasks)
