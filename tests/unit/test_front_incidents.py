"""What the engine tells of its components, as the front keeps it."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from core.errors import GenerationError, NonetError
from core.outputs import PluginIncident
from core.testing.harness.fronts import FrontHarness, request
from core.testing.isolation import (
    is_victim,
    victim,
)
from plugins.schedulers.fcfs import Fcfs

Harness = partial(FrontHarness, Fcfs)


def engine_incident(reason, failures=1):
    return PluginIncident(group="sampler", name="chaos", plugin="chaos, acme 1.0", reason=reason, failures=failures)


async def test_incidents_of_the_engine_are_kept_until_the_next_engine():
    async with Harness() as h:
        step, queue = h.engine.step, [[engine_incident("one")], [engine_incident("two", 2)], []]
        h.engine.step = lambda: msgspec.structs.replace(step(), incidents=queue.pop(0) if queue else [])
        await h.answer(request())
        assert [(i.reason, i.failures) for i in h.front.incidents()] == [("two", 2)]
        h.front._incidents.lose_engine()
        assert [i.reason for i in h.front.incidents()] == ["two"]  # why it was lost, perhaps
        await h.answer(request("next"))
        assert h.front.incidents() == ()


async def test_the_engines_words_name_the_component():
    def fault(batch):
        if any(is_victim(request_id) for request_id in batch.request_ids):
            raise ValueError("poison")

    async with Harness(fault=fault) as h:
        with pytest.raises(NonetError):
            await h.answer(victim())
    error = GenerationError("sampler=chaos (plugin chaos, acme-chaos 1.0): ValueError: poison")
    assert error.part == "sampler=chaos (plugin chaos, acme-chaos 1.0)"
    assert GenerationError("ValueError: a=b (plugin c): d").part is None
