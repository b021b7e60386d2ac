"""The front half over a real inline client and a model-less engine: one call, one end, nothing kept."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from contextlib import aclosing
from functools import partial

import pytest

from core.batch import SamplerOutput
from core.errors import EngineDeadError, GenerationError, OverloadedError, RequestError
from core.metrics import Metrics
from core.model.interface import StepResult
from core.observers import ObserverContext
from core.outputs import StepOutput, TokenDelta
from core.pipeline import PipelineDescription
from core.request import FinishReason
from core.stages.renderer import ChatPrompt, TextPrompt
from core.testing.engines import fake_spec
from core.testing.fakes import VOCAB_SIZE
from core.testing.harness.fake_executors import FakeExecutor
from core.testing.harness.fronts import FrontHarness, ids_of, oracle, request
from plugins.schedulers.fcfs import Fcfs

Harness = partial(FrontHarness, Fcfs)
ids = ids_of


async def collect(front, call):
    async with aclosing(front.generate(call)) as outputs:
        return [output async for output in outputs]


async def test_a_call_ends_once_with_usage_timings_and_its_text():
    async with Harness() as h:
        outputs = await collect(h.front, request())
        assert ids(outputs) == oracle()
        assert "".join(c.text for o in outputs for c in o.outputs) == h.tokenizer.decode(
            oracle(), skip_special_tokens=True
        )
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (outputs[-1].usage.prompt_tokens, outputs[-1].usage.completion_tokens) == (3, 8)
        timings = outputs[-1].outputs[-1].timings
        assert 0 <= timings.queue <= timings.ttft <= timings.e2e
        assert timings.tpot >= 0
        assert [r.finish_reasons for r in await h.seen()] == [(FinishReason.LENGTH,)]
        await h.assert_whole()


async def test_choices_are_separate_streams_and_usage_adds_up():
    async with Harness() as h:
        outputs = await collect(h.front, request(n=3))
        assert [ids(outputs, i) for i in range(3)] == [oracle(choice=i) for i in range(3)]
        assert outputs[-1].usage.completion_tokens == 24
        assert outputs[-1].usage.prompt_tokens == 3
        await h.assert_whole()


async def test_fifty_calls_at_once_each_get_their_own_answer():
    async with Harness() as h:
        calls = [request(f"r{i}", prompt=range(1, 4 + i % 7), max_tokens=3 + i % 5) for i in range(50)]
        answers = await asyncio.gather(*(collect(h.front, call) for call in calls))
        for i, answer in enumerate(answers):
            assert ids(answer) == oracle(range(1, 4 + i % 7), 3 + i % 5)
        await h.assert_whole()


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_closing_early_aborts_and_frees(after):
    async with Harness() as h:
        stream = h.front.generate(request(max_tokens=500))
        for _ in range(after):
            await anext(stream)
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await h.assert_whole()
        assert [r.finish_reasons for r in await h.seen()] == ([(FinishReason.ABORT,)] if after else [])


async def test_a_cancelled_consumer_aborts_too():
    async with Harness() as h:
        task = asyncio.ensure_future(collect(h.front, request(max_tokens=900)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await h.assert_whole()


async def test_a_stop_string_ends_the_call_and_the_engine_stops_too():
    async with Harness() as h:
        text = h.tokenizer.decode(oracle(max_tokens=200), skip_special_tokens=True)
        stop = text[20:23]
        outputs = await collect(h.front, request(max_tokens=200, stop=(stop,)))
        got = "".join(c.text for o in outputs for c in o.outputs)
        assert got == text[: text.index(stop)]
        last = outputs[-1].outputs[-1]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
        assert outputs[-1].usage.completion_tokens < 200
        await h.assert_whole()


async def test_a_failed_request_raises_once_and_the_others_finish():
    def fault(batch):
        for request_id, length in zip(batch.request_ids, batch.seq_lens.tolist(), strict=True):
            if request_id.startswith("bad") and length > 6:
                raise ValueError("poison")

    async with Harness(fault=fault) as h:
        good = [collect(h.front, request(f"g{i}")) for i in range(7)]
        bad = collect(h.front, request("bad"))
        *answers, failed = await asyncio.gather(*good, bad, return_exceptions=True)
        assert isinstance(failed, GenerationError)
        assert "poison" in str(failed)
        assert all(ids(answer) == oracle() for answer in answers)
        assert [r.error for r in await h.seen() if r.request_id == "bad"] == ["executor: ValueError: poison"]
        await h.assert_whole()


async def test_what_came_before_an_error_is_delivered_first():
    def fault(batch):
        if int(batch.seq_lens[0]) > 6:
            raise ValueError("late")

    async with Harness(fault=fault) as h:
        stream = h.front.generate(request())
        got = []
        with pytest.raises(GenerationError):
            async for output in stream:
                got += ids([output])
        assert got == oracle()[: len(got)]
        assert got
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_wrong_requests_are_refused_before_anything_is_registered():
    async with Harness() as h:
        for call, param in (
            (request(prompt=[VOCAB_SIZE]), "prompt"),
            (request(prompt=[]), "prompt"),
            (request(prompt=[1] * 1024), "prompt"),
            (request(max_tokens=1023), "max_tokens"),
            (request(max_tokens=0), "max_tokens"),
            (request(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids"),
        ):
            with pytest.raises(RequestError) as caught:
                await collect(h.front, call)
            assert caught.value.param == param
        await h.assert_whole()
        assert await h.seen() == []


@pytest.mark.parametrize("max_tokens", [None, 1])
@pytest.mark.parametrize("num_prompt", [128, 200])
async def test_h1_a_prompt_past_the_kv_cache_is_refused_like_one_past_the_context(num_prompt, max_tokens):
    async with Harness(num_blocks=8) as h:
        with pytest.raises(RequestError, match="the KV cache holds 128") as caught:
            await collect(h.front, request(prompt=[1] * num_prompt, max_tokens=max_tokens))
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        assert len(ids(await collect(h.front, request(prompt=[1] * 127, max_tokens=None)))) == 1
        await h.assert_whole()


async def test_past_the_queue_bound_the_answer_is_overloaded_and_the_rest_unharmed():
    async with Harness(max_in_flight=4) as h:
        calls = [h.front.generate(request(f"r{i}", max_tokens=300)) for i in range(4)]
        for call in calls:
            await anext(call)
        with pytest.raises(OverloadedError) as caught:
            await anext(h.front.generate(request("late")))
        assert caught.value.retry_after > 0
        h.front._intake._rendered = lambda request: 1 / 0  # a refusal costs no rendering
        with pytest.raises(OverloadedError):
            await anext(h.front.generate(request("late too", prompt=[1] * 2000)))
        del h.front._intake._rendered
        for call in calls:
            await call.aclose()
        await h.assert_whole()
        assert ids(await collect(h.front, request("again"))) == oracle()


async def test_many_prompts_are_admitted_all_or_none():
    async with Harness(max_in_flight=4) as h:
        with pytest.raises(RequestError, match="max_in_flight=4"):  # could never be admitted together
            await h.front.generate_many([request(f"r{i}") for i in range(5)])
        await h.assert_whole()
        answers = await h.front.generate_many([request(f"r{i}") for i in range(4)])
        assert [ids([o async for o in answer]) for answer in answers] == [oracle()] * 4
        started = await h.front.generate_many([request(f"s{i}", max_tokens=400) for i in range(3)])
        for answer in started:
            await answer.aclose()  # also one that was never iterated gives everything back
        await h.assert_whole()


async def test_request_ids_are_labels_and_may_repeat():
    async with Harness() as h:
        calls = [request("same", prompt=(8 + i, 9, 10), max_tokens=4 + i) for i in range(4)]
        answers = await asyncio.gather(*(collect(h.front, call) for call in calls))
        assert [ids(answer) for answer in answers] == [oracle((8 + i, 9, 10), 4 + i) for i in range(4)]
        assert {output.request_id for answer in answers for output in answer} == {"same"}
        many = await h.front.generate_many(calls)
        assert [ids([o async for o in answer]) for answer in many] == [ids(answer) for answer in answers]
        await h.assert_whole()


async def test_an_id_used_again_after_aclose_gets_its_own_tokens_only():
    async with Harness(fault=lambda batch: time.sleep(0.05)) as h:
        first = h.front.generate(request("r", max_tokens=50))
        await anext(first)
        await first.aclose()
        assert ids(await collect(h.front, request("r", prompt=(20, 21, 22, 23), max_tokens=4))) == oracle(
            (20, 21, 22, 23), 4
        )


@pytest.mark.parametrize("after_s", [0.0, 0.05])
async def test_aclose_ends_a_pending_anext_of_another_task(after_s):
    async with Harness(fault=lambda batch: time.sleep(0.2)) as h:
        answer = h.front.generate(request(max_tokens=50))
        pending = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(after_s)
        await answer.aclose()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(pending, 5)
        await h.assert_whole()


async def test_a_detokenizer_that_raises_fails_the_calls_of_that_step_and_no_others():
    async with Harness() as h:
        detokenizer, push = h.front._pipeline.detokenizer, h.front._pipeline.detokenizer.push
        detokenizer.push = lambda deltas: 1 / 0 if deltas else push(deltas)
        with pytest.raises(GenerationError, match=r"^detokenizer=chaos \(plugin chaos, acme 1.0\): ZeroDivisionError"):
            await asyncio.wait_for(collect(h.front, request()), 5)
        detokenizer.push = push
        assert ids(await collect(h.front, request("later"))) == oracle()
        await h.assert_whole()


async def test_a_front_that_fails_ends_every_call_and_says_so():
    async with Harness() as h:
        h.front._note = lambda delta: 1 / 0
        with pytest.raises(EngineDeadError, match="the front failed"):
            await asyncio.wait_for(collect(h.front, request()), 5)
        await asyncio.wait_for(h.front.wait_dead(), 5)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(collect(h.front, request("later")), 5)


async def test_a_request_that_the_sampler_leaves_out_is_answered_with_an_error():
    async with Harness() as h:
        submit = h.executor.submit

        class Empty:
            def result(self):
                return StepResult(SamplerOutput({}))

        h.executor.__class__ = type("Forgetful", (FakeExecutor,), {"__slots__": (), "submit": lambda s, batch: Empty()})
        with pytest.raises(GenerationError):
            await asyncio.wait_for(collect(h.front, request()), 5)
        assert submit
        await h.assert_whole()


async def test_prompts_that_cannot_all_be_sent_leave_none_behind():
    async with Harness() as h:
        send_add, sent = h.client.send_add, []

        def full_at_the_second(sequences):
            sent.append(sequences)
            if len(sent) == 2:
                raise OverloadedError("full")
            send_add(sequences)

        h.client.send_add = full_at_the_second
        with pytest.raises(OverloadedError):
            await h.front.generate_many([request("a", max_tokens=500), request("b")])
        await h.assert_whole()


async def test_an_error_delta_stops_the_sequence_in_the_engine_too():
    async with Harness(fault=lambda batch: time.sleep(0.01)) as h:
        step, count = h.engine.step, itertools.count()

        def too_large_at_the_second():
            output = step()
            if not output.deltas or next(count) != 1:
                return output
            errors = [
                TokenDelta(request_id=d.request_id, finish_reason=FinishReason.ERROR, error="too large")
                for d in output.deltas
            ]
            return StepOutput(deltas=errors, stats=output.stats)

        h.engine.step = too_large_at_the_second
        with pytest.raises(GenerationError, match="too large"):
            await collect(h.front, request(max_tokens=900))
        await h.assert_whole()


async def test_the_pool_is_checked_when_the_engine_has_become_idle(monkeypatch):
    checked = []
    async with Harness() as h:
        cache = type(h.cache)
        check = cache.check
        monkeypatch.setattr(cache, "check", lambda self: (checked.append(1), check(self)))
        await collect(h.front, request())
        for _ in range(100):
            if checked:
                break
            await asyncio.sleep(0.02)
        assert checked


@pytest.mark.parametrize("answer", [(), None, ("not", "sequences")])
async def test_an_admission_that_makes_other_sequences_than_asked_for_fails_the_call(answer):
    async with Harness() as h:
        h.front._pipeline.admission.admit = lambda *arguments: answer
        with pytest.raises(GenerationError, match=r"^admission=chaos \(plugin chaos, acme 1.0\): admit returned"):
            await asyncio.wait_for(collect(h.front, request(n=2)), 5)
        await h.assert_whole()


async def test_calls_that_are_being_rendered_count_as_load():
    async with Harness() as h:
        release = threading.Event()
        h.front._intake._rendered = lambda request: (release.wait(5), 1 / 0)
        pending = asyncio.ensure_future(collect(h.front, request(n=3)))
        await asyncio.sleep(0.05)
        assert h.front.load().in_flight == 3
        release.set()
        with pytest.raises(ZeroDivisionError):
            await pending
        assert h.front.load().in_flight == 0


async def test_a_call_that_was_being_rendered_when_the_front_closed_is_refused():
    async with Harness() as h:
        rendered, release = h.front._intake._rendered, threading.Event()
        h.front._intake._rendered = lambda request: (release.wait(5), rendered(request))[1]
        pending = asyncio.ensure_future(collect(h.front, request()))
        await asyncio.sleep(0.05)
        closing = asyncio.ensure_future(h.front.close())
        await asyncio.sleep(0)
        release.set()
        with pytest.raises((EngineDeadError, asyncio.CancelledError)):
            await asyncio.wait_for(pending, 5)
        await closing


async def test_an_engine_that_dies_fails_every_call_once():
    async with Harness() as h:
        calls = [asyncio.ensure_future(collect(h.front, request(f"r{i}", max_tokens=800))) for i in range(6)]
        await asyncio.sleep(0.05)
        h.client.kill()
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert isinstance(await asyncio.wait_for(h.front.wait_dead(), 5), EngineDeadError)
        assert h.front.health().status in ("dead", "closed")
        with pytest.raises((EngineDeadError, OverloadedError)):
            await collect(h.front, request("late"))
        assert not h.front._calls


class Broken:
    def step_finished(self, stats):
        raise RuntimeError("observer")

    def request_finished(self, record):
        raise RuntimeError("observer")

    def close(self):
        raise RuntimeError("observer")


async def test_an_observer_that_raises_fails_nothing():
    async with Harness(observers=(Broken(),)) as h:
        assert ids(await collect(h.front, request())) == oracle()


async def test_p4_a_clock_that_steps_back_fails_no_request_and_no_metric(caplog):
    numbers = random.Random(4)
    metrics = Metrics(Metrics.Settings(), ObserverContext(fake_spec(), PipelineDescription(())))

    def clock():
        return numbers.uniform(-1000.0, 1000.0)

    async with Harness(clock=clock, observers=(metrics,), num_blocks=8, queue_timeout=None) as h:
        calls = [request(f"r{i}", prompt=range(20), max_tokens=30) for i in range(8)]  # preempted, and prefix hits
        for answer in await asyncio.gather(*(collect(h.front, call) for call in calls)):
            assert ids(answer) == oracle(range(20), 30)
        (before_first_token,) = await h.front.enter([request("early", max_tokens=90)])
        h.front.leave(before_first_token)
        late = h.front.generate(request("late", max_tokens=90))
        await anext(late)
        await late.aclose()
        await h.assert_whole()
    assert len(h.records) == 10
    spans = [span for record in h.records for span in record.spans]
    assert spans and all(0 <= span.busy_s <= span.end - span.start for span in spans)
    assert not [record for record in caplog.records if record.name == "nonet.front"]
    assert b"nonet_request_latency_seconds_count 10.0" in metrics.exposition()


async def test_chat_and_text_prompts_are_rendered_off_the_loop():
    async with Harness(vocab_size=330) as h:
        rendered = await h.front.render(ChatPrompt([{"role": "user", "content": "hello"}]))
        assert "user" in rendered.text
        assert (await h.front.render(TextPrompt("hello"))).token_ids
