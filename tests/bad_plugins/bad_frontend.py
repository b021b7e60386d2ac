"""Frontends that each break one promise of `core.stages.frontend`."""

from __future__ import annotations

import asyncio
import threading

from pydantic import BaseModel, ConfigDict

from core.request import SamplingParams
from core.stages.frontend import GenerateRequest
from core.stages.renderer import TextPrompt


class Idle:
    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings, context):
        self.front = context.front

    async def run(self):
        await asyncio.Event().wait()


class NeverEnds(Idle):
    """Goes on when its pipeline is gone."""

    caught_by = "test_run_ends_when_it_is_cancelled"

    async def run(self):
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue


class NeverStops(Idle):
    """`stop` is a wish."""

    caught_by = "test_run_ends_when_it_is_told_to_stop"

    def stop(self):
        pass


class HoldsCalls(Idle):
    """Leaves an answer half read, and never closes it."""

    caught_by = "test_nothing_is_held_at_the_end"

    async def run(self):
        request = GenerateRequest("r", TextPrompt("hello"), SamplingParams(), max_tokens=200)
        self.answer = self.front.generate(request)
        await self.answer.__anext__()
        await asyncio.Event().wait()


class StartsTooSoon(Idle):
    """Serves from the moment it is built."""

    caught_by = "test_building_it_starts_nothing"

    def __init__(self, settings, context):
        super().__init__(settings, context)
        threading.Thread(target=threading.Event().wait, args=(600,), daemon=True).start()
