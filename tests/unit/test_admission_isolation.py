"""An admission that fails, in every way, under 32 running calls: one call ends with its name, 31 are unhurt."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial

import msgspec
import pytest

from core.errors import GenerationError, OverloadedError, RequestError
from core.testing import isolation
from core.testing.harness.fronts import FrontHarness, request
from core.testing.isolation import (
    BLOCK_S,
    QUICK,
    Around,
    boom,
    is_victim,
    leave,
    raising,
    returning,
    unspeakable,
    victim,
)
from plugins.schedulers.fcfs import Fcfs

Harness = partial(FrontHarness, Fcfs)
check = partial(isolation.check, Fcfs)
NAN = math.nan


def admitting(act):
    def admit(inner, call, token_ids, params, load):
        if not is_victim(call.request_id):
            return inner.admit(call, token_ids, params, load)
        return act(inner, call, token_ids, params, load)

    return lambda inner: Around(inner, admit=admit)


def sequences_with(**values):
    def act(inner, *arguments):
        return tuple(msgspec.structs.replace(sequence, **values) for sequence in inner.admit(*arguments))

    return act


def params_with(**values):
    def act(inner, *arguments):
        (sequence,) = inner.admit(*arguments)
        return [msgspec.structs.replace(sequence, params=msgspec.structs.replace(sequence.params, **values))]

    return act


def late_change(inner, call, token_ids, params, load):
    sequences = inner.admit(call, token_ids, params, load)
    token_ids.append(1)
    return sequences


ADMISSION = {
    "raise": (boom, "RuntimeError: boom"),
    "SystemExit": (leave, "SystemExit: 3"),
    "CancelledError": (raising(asyncio.CancelledError()), "CancelledError"),
    "None": (returning(None), "admit returned None"),
    "nothing": (returning(()), "admit returned a tuple, not one sequence for each of 1 choices"),
    "two": (lambda inner, *a: inner.admit(*a) * 2, "admit returned a tuple, not one"),
    "a generator": (lambda inner, *a: iter(inner.admit(*a)), "admit returned a tuple_iterator"),
    "words": (returning(("words",)), "admit returned a str as a sequence"),
    "another id": (sequences_with(request_id="r1~1#0"), "admit returned 'r1~1#0' as the sequence of choice 0"),
    "another choice": (sequences_with(choice=1), "admit returned"),
    "another prompt": (sequences_with(prompt_token_ids=[1]), "admit returned another prompt"),
    "NaN arrival": (sequences_with(arrival_time=NAN), "admit returned a sequence whose arrival_time is nan"),
    "NaN priority": (sequences_with(priority=NAN), "admit returned a malformed sequence"),
    "a word as priority": (sequences_with(priority="high"), "admit returned a malformed sequence"),
    "a huge seed": (sequences_with(seed=1 << 80), "admit returned a sequence whose seed"),
    "no params": (sequences_with(params=None), "admit returned a sequence whose params are None"),
    "NaN params": (params_with(min_p=NAN), "admit returned a sequence whose min_p is nan"),
    "no tokens": (params_with(max_tokens=0), "admit returned max_tokens=0"),
    "past the context": (params_with(max_tokens=1022), "admit returned max_tokens=1022 for a prompt of 3"),
    "mutate": (late_change, "it changed the prompt"),
}


@pytest.mark.parametrize("name", ADMISSION)
async def test_admission(solo, name):
    act, reason = ADMISSION[name]
    await check(solo, "admission", admitting(act), reason=reason)


async def test_admission_that_blocks_is_reported(solo):
    def slow(inner, *arguments):
        time.sleep(BLOCK_S)
        return inner.admit(*arguments)

    (incident,) = await check(solo, "admission", admitting(slow), limits=QUICK, fails=False)
    assert incident.reason.startswith("blocked 0.3 s in one call")


@pytest.mark.parametrize("act", [boom, leave, unspeakable, raising(OverloadedError("x", retry_after=math.inf))])
async def test_check_room_that_raises_fails_calls_by_name(act):
    async with Harness(wrap={"admission": lambda inner: Around(inner, check_room=act)}) as h:
        for _ in range(3):
            with pytest.raises(GenerationError, match=r"^admission=chaos "):
                await h.answer(request())
        assert [i.failures for i in h.front.incidents()] == [3]
        await h.assert_whole()


async def test_overload_and_refusal_of_the_admission_are_its_answer():
    for error in (OverloadedError("full", retry_after=2), RequestError("no", param="n")):
        async with Harness(wrap={"admission": admitting(raising(error))}) as h:
            with pytest.raises(type(error)):
                await h.answer(victim())
            assert h.front.incidents() == ()
            await h.assert_whole()
