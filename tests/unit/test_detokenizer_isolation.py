"""A detokenizer that fails, in every way, under 32 running calls: the sequence that it fails for ends, the others go on."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from core.batch import TokenLogprobs
from core.errors import GenerationError, RequestError
from core.front.texts import Texts
from core.isolation.front import Guard
from core.isolation.incidents import Incidents
from core.outputs import StepOutput, TokenDelta
from core.request import EngineRequest, FinishReason, SamplingParams
from core.stages.detokenizer import DetokenizerContext, TextDelta
from core.stages.incremental import Incremental
from core.testing import isolation
from core.testing.harness.fronts import NAMES, FrontHarness, ids_of, oracle, request
from core.testing.isolation import (
    BLOCK_S,
    QUICK,
    VICTIM_PROMPT,
    Around,
    boom,
    is_victim,
    leave,
    raising,
    run_all,
    victim,
)
from core.testing.tokenizers import byte_level_bpe
from plugins.schedulers.fcfs import Fcfs

Harness = partial(FrontHarness, Fcfs)
check = partial(isolation.check, Fcfs)
NAN = math.nan
AT = 4  # output tokens of the victim before its detokenizer fails


class Detokenizer:
    """The built-in one, with `act(texts, deltas)` on what it says of a step in which the victim is due."""

    def __init__(self, inner, act=None, before=None, start=None, drop=None):
        self._inner = inner
        self._act = act
        self._before = before
        self._start = start
        self._drop = drop
        self._num_tokens = 0

    def start(self, call):
        if self._start is not None and is_victim(call.request_id):
            self._start()
        self._inner.start(call)

    def push(self, deltas):
        mine = [delta for delta in deltas if is_victim(delta.request_id)]
        self._num_tokens += sum(len(delta.token_ids) for delta in mine)
        due = mine and self._num_tokens > AT
        if due and self._before is not None:
            self._before(self._inner, deltas)
        texts = self._inner.push(deltas)
        return self._act(texts, mine[0]) if due and self._act is not None else texts

    def drop(self, request_ids):
        if self._drop is not None and any(map(is_victim, request_ids)):
            self._drop()
        self._inner.drop(request_ids)


def half_done(inner, deltas):
    inner.push(deltas[: len(deltas) // 2])
    raise RuntimeError("half done")


def changed(**values):
    """The victim's texts with other values."""
    return lambda texts, delta: [replace(t, **values) if is_victim(t.request_id) else t for t in texts]


def added(**values):
    return lambda texts, delta: [*texts, TextDelta(**{"request_id": delta.request_id, **values})]


def spoilt_deltas(inner, deltas):
    for delta in deltas:
        if is_victim(delta.request_id):
            delta.token_ids.append(1)


def emptied(inner, deltas):
    if any(is_victim(delta.request_id) for delta in deltas):
        deltas.clear()
        raise RuntimeError("emptied")


def without_end(texts, delta):
    return [replace(t, finish_reason=None) if is_victim(t.request_id) else t for t in texts]


DETOKENIZER = {
    "raise": ({"before": boom}, "RuntimeError: boom"),
    "raise half-way": ({"before": half_done}, "RuntimeError: half done"),
    "SystemExit": ({"before": leave}, "SystemExit: 3"),
    "KeyboardInterrupt": ({"before": raising(KeyboardInterrupt("^C"))}, "KeyboardInterrupt: ^C"),
    "RequestError": ({"before": raising(RequestError("no"))}, "RequestError: no"),
    "None": ({"act": lambda texts, delta: None}, "push returned None, not a list"),
    "a generator": ({"act": lambda texts, delta: iter(texts)}, "push returned a list_iterator"),
    "text alone": ({"act": lambda texts, delta: ["text"]}, "push returned something else than texts"),
    "an unknown id": ({"act": added(request_id="nobody")}, "push returned something else than texts"),
    "no text": ({"act": changed(text=None)}, "it told what is no text"),
    "NaN": ({"act": changed(text=NAN)}, "it told what is no text"),
    "half a pair": ({"act": changed(text="\ud800")}, "it told what is no text"),
    "other ids": ({"act": changed(token_ids=(1, 2, 3))}, "it told other token ids"),
    "NaN ids": ({"act": changed(token_ids=(NAN,))}, "it told other token ids"),
    "a list of ids": (
        {"act": lambda texts, d: [replace(t, token_ids=list(t.token_ids)) for t in texts]},
        "it told other",
    ),
    "ids twice": ({"act": lambda texts, delta: [*texts, *texts]}, "it told other token ids"),
    "an early end": ({"act": changed(finish_reason=FinishReason.STOP)}, "it ended a sequence in another way"),
    "an end in words": ({"act": changed(finish_reason="length")}, "it ended a sequence in another way"),
    "no end": ({"act": without_end}, "it did not tell the end of a sequence"),
    "no texts": ({"act": lambda texts, delta: []}, "it did not tell the end of a sequence"),
    "a stop string of its own": (
        {"act": changed(finish_reason=FinishReason.STOP, stop_reason="x", stop_matched=True)},
        "it told of a stop string that nobody asked for",
    ),
    "mutate": ({"before": spoilt_deltas}, "it told other token ids"),
    "empty": ({"before": emptied}, "RuntimeError: emptied"),
    "start": ({"start": boom}, "RuntimeError: boom"),
    "start and drop": ({"start": boom, "drop": boom}, "RuntimeError: boom"),
}


@pytest.mark.parametrize("name", DETOKENIZER)
async def test_detokenizer(solo, name):
    how, reason = DETOKENIZER[name]
    if name == "start and drop":
        async with Harness(wrap={"detokenizer": lambda inner: Detokenizer(inner, **how)}) as h:
            outcome, rest = await run_all(h)
            assert str(outcome) == f"detokenizer=chaos (plugin chaos, acme 1.0): {reason}"
            assert rest == solo
            await h.assert_whole()
        return
    await check(solo, "detokenizer", lambda inner: Detokenizer(inner, **how), reason=reason)


async def test_detokenizer_that_blocks_is_reported(solo):
    once = iter([BLOCK_S])
    wrapper = lambda inner: Detokenizer(inner, before=lambda *_: time.sleep(next(once, 0)))  # noqa: E731
    (incident,) = await check(solo, "detokenizer", wrapper, limits=QUICK, fails=False)
    assert incident.reason.startswith("blocked 0.3 s in one call")


async def test_drop_that_raises_fails_nothing(solo):
    wrapper = lambda inner: Detokenizer(inner, drop=boom)  # noqa: E731
    async with Harness(wrap={"detokenizer": wrapper}) as h:
        stream = h.front.generate(victim(n=2))
        await anext(stream)
        await stream.aclose()
        await h.assert_whole()
        assert [i.reason for i in h.front.incidents()] == ["RuntimeError: boom"]
        _, rest = await run_all(h)
        assert rest == solo


async def test_a_detokenizer_that_fails_now_and_then_for_nobody_in_particular(solo):
    """Each time, all sequences of the step are started anew; no client sees anything of it."""

    class Moody(Incremental):
        def push(self, deltas):
            texts = super().push(deltas)
            if len(deltas) > 1 and sum(deltas[0].token_ids) % 3 == 0:
                raise RuntimeError("moody")
            return texts

    wrapper = lambda inner: Moody(Moody.Settings(stream_interval=1), DetokenizerContext(inner._tokenizer))  # noqa: E731
    async with Harness(wrap={"detokenizer": wrapper}) as h:
        outcome, rest = await run_all(h)
        assert rest == solo
        assert ids_of(outcome) == oracle(VICTIM_PROMPT, 12)
        (incident,) = h.front.incidents()
        assert incident.reason == "RuntimeError: moody (for several sequences at once, and for none of them alone)"
        assert incident.failures > 1
        await h.assert_whole()


async def collected(answer):
    return [output async for output in answer]


async def test_a_detokenizer_that_tells_another_text_the_second_time():
    class Forgetful(Incremental):
        steps = 0

        def push(self, deltas):
            self.steps += 1
            if self.steps == 20:
                raise RuntimeError("once more")
            return [replace(text, text="X" * (self.steps > 20) + text.text) for text in super().push(deltas)]

    wrapper = lambda inner: Forgetful(Forgetful.Settings(stream_interval=1), DetokenizerContext(inner._tokenizer))  # noqa: E731
    async with Harness(wrap={"detokenizer": wrapper}) as h:
        calls = [request(f"r{i}", (8 + i, 9), 60) for i in range(4)]
        together = [collected(answer) for answer in await h.front.generate_many(calls)]  # all in every step
        answers = await asyncio.gather(*together, return_exceptions=True)
        assert all("it told another text" in str(answer) for answer in answers), answers
        await h.assert_whole()


def logprobs_of(outputs):
    return [entry.token_id for output in outputs for part in output.outputs for entry in part.logprobs]


async def test_logprobs_are_the_engines_own():
    async with Harness(
        wrap={"detokenizer": lambda inner: Detokenizer(inner, before=boom, act=None)},
    ) as h:
        step = h.engine.step

        def with_logprobs():
            output = step()
            deltas = [
                msgspec.structs.replace(d, logprobs=[TokenLogprobs(t, -1.0, 1) for t in d.token_ids])
                for d in output.deltas
            ]
            return StepOutput(deltas=deltas, stats=output.stats)

        h.engine.step = with_logprobs
        good = [request(f"r{i}", (8 + i, 9, 10), 10, stream_interval=1 + i % 4) for i in range(8)]
        answers = await asyncio.gather(*map(h.answer, [*good, victim()]), return_exceptions=True)
        assert isinstance(answers[-1], GenerationError)
        for call, answer in zip(good, answers, strict=False):
            assert logprobs_of(answer) == ids_of(answer) == oracle(call.prompt.token_ids, 10)
            for output in answer:
                for part in output.outputs:
                    assert tuple(entry.token_id for entry in part.logprobs) == part.token_ids


async def test_what_the_detokenizer_is_given_is_not_the_engines():
    def greedy(inner, call):
        inner.start(call)
        call.prompt_token_ids.clear()
        call.params.logit_bias[1] = 5.0

    async with Harness(wrap={"detokenizer": lambda inner: Around(inner, start=greedy)}) as h:
        calls = [request(f"r{i}", (8 + i, 9, 10), logit_bias={2: 1.0}) for i in range(8)]
        answers = await asyncio.gather(*map(h.answer, calls))
        assert [ids_of(answer) for answer in answers] == [oracle((8 + i, 9, 10)) for i in range(8)]
        await h.assert_whole()


def test_unknown_deltas_are_nobodys():
    detokenizer = Incremental(Incremental.Settings(), DetokenizerContext(byte_level_bpe()))
    texts = Texts(detokenizer, Guard(NAMES.of("detokenizer"), Incidents(), 5.0))
    assert not texts.push([TokenDelta(request_id="x", token_ids=[1])]).texts
    texts.start(EngineRequest(request_id="x", prompt_token_ids=[1], params=SamplingParams(), seed=0))
    error = TokenDelta(request_id="x", finish_reason=FinishReason.ERROR, error="lost")
    assert not texts.push([error]).texts
    assert len(texts) == 1
    texts.drop(["x", "y"])
    assert len(texts) == 0
