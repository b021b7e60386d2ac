"""One suite for both engine clients: a front cannot tell whether the engine is in its own process or beside it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from core.client import EngineClient, EngineProcessSettings, EngineStatus, InlineClient, ProcessClient
from core.errors import ConfigError, EngineDeadError, ModelFileError, NonetError, OverloadedError, PluginError
from core.model.roofline import Roofline
from core.outputs import StepOutput
from core.request import EngineRequest, FinishReason, SamplingParams
from core.testing.harness.fake_engine import FakeEngineLoop, build, fake_tokens

FACTORY = "core.testing.harness.fake_engine:build"
Make = Callable[..., EngineClient]


def make_inline(**settings: Any) -> InlineClient:
    return InlineClient(lambda: build(json.dumps(settings), lambda what, done, total: None))


def make_process(**settings: Any) -> ProcessClient:
    policy = EngineProcessSettings(on_engine_death="exit", start_timeout=20)
    return ProcessClient(json.dumps(settings), settings=policy, _factory=FACTORY)


@pytest.fixture(params=["inline", "process"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made: list[EngineClient] = []

    def build_client(**settings: Any) -> EngineClient:
        client = make_inline(**settings) if request.param == "inline" else make_process(**settings)
        made.append(client)
        return client

    yield build_client
    for client in made:
        await client.close()


def sequence(name: str, max_tokens: int = 5, seed: int = 3) -> EngineRequest:
    prompt = [1, 2, *name.encode()]
    return EngineRequest(
        request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens), seed=seed
    )


async def receive(client: EngineClient) -> StepOutput:
    return await asyncio.wait_for(client.receive(), 10)


async def finish(client: EngineClient, count: int) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
    """Tokens and finish reasons once `count` requests have ended."""
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    while len(reasons) < count:
        for delta in (await receive(client)).deltas:
            assert delta.request_id not in reasons, "a delta after the end"
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                reasons[delta.request_id] = delta.finish_reason
    return tokens, reasons


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.01)


async def test_tokens_come_whole_and_in_order(make: Make) -> None:
    client = make()
    await client.start()
    requests = [sequence(f"r{index}", max_tokens=1 + index % 7, seed=index) for index in range(40)]
    client.send_add(requests[:30])
    for request in requests[30:]:
        client.send_add([request])
    tokens, reasons = await finish(client, len(requests))
    assert tokens == {request.request_id: fake_tokens(request) for request in requests}
    assert set(reasons.values()) == {FinishReason.LENGTH}


async def test_info_progress_and_generation(make: Make) -> None:
    client = make(plugins=["a==1"])
    with pytest.raises(EngineDeadError):
        _ = client.info
    await client.start(lambda what, done, total: None)
    assert client.info.model_name == "fake"
    assert client.info.plugins == ["a==1"]
    assert client.generation == 1


async def test_an_aborted_request_ends_and_the_gauges_follow(make: Make) -> None:
    """Also when nothing else runs (P3): the abort itself causes a step that reports zero."""
    client = make(step_s=0.01)
    await client.start()
    client.send_add([sequence(f"r{index}", max_tokens=100_000) for index in range(8)])
    while (output := await receive(client)).stats.running < 8:
        pass
    client.send_abort([f"r{index}" for index in range(8)])
    while (output := await receive(client)).stats.running:
        pass
    assert output.deltas == []
    client.send_add([sequence("after")])
    assert (await finish(client, 1))[0] == {"after": fake_tokens(sequence("after"))}


async def test_unknown_ended_and_repeated_aborts_are_ignored(make: Make) -> None:
    client = make(step_s=0.002)
    await client.start()
    client.send_abort(["never-there"])
    client.send_abort([])
    client.send_add([sequence("a", 2), sequence("b", 50)])
    client.send_abort(["never-there", "never-there"])
    tokens, _ = await finish(client, 1)
    assert tokens["a"] == fake_tokens(sequence("a", 2))
    client.send_abort(["a", "a"])
    rest, reasons = await finish(client, 1)
    assert tokens["b"] + rest["b"] == fake_tokens(sequence("b", 50))
    assert reasons == {"b": FinishReason.LENGTH}


async def test_a_request_sent_twice_runs_once(make: Make) -> None:
    client = make(step_s=0.002)
    await client.start()
    client.send_add([sequence("a", 20), sequence("a", 20)])
    client.send_add([sequence("a", 20)])
    assert (await finish(client, 1))[0] == {"a": fake_tokens(sequence("a", 20))}
    client.send_add([sequence("b")])
    assert (await finish(client, 1))[0] == {"b": fake_tokens(sequence("b"))}


async def test_what_the_model_says_of_the_machine_comes_over(make: Make) -> None:
    client = make()
    await client.start()
    assert await asyncio.wait_for(client.measure_roofline(), 5) == Roofline(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


async def test_reset_prefix_cache(make: Make) -> None:
    client = make(step_s=0.01)
    await client.start()
    assert await asyncio.wait_for(client.reset_prefix_cache(), 5) is True
    client.send_add([sequence("a", 100_000)])
    assert await asyncio.wait_for(client.reset_prefix_cache(), 5) is False
    client.send_abort(["a"])
    assert await asyncio.gather(*[asyncio.wait_for(client.reset_prefix_cache(), 5) for _ in range(5)]) == [True] * 5


async def test_health_stays_ok_idle_and_busy(make: Make) -> None:
    client = make(step_s=0.05)
    assert client.health().status is EngineStatus.STARTING
    await client.start()
    await asyncio.sleep(0.4)
    status, step_age, _ = client.health()
    assert (status, step_age < 5) == (EngineStatus.OK, True)
    client.send_add([sequence("a", 4)])
    await finish(client, 1)
    assert client.health().status is EngineStatus.OK


async def test_nothing_is_sent_before_the_start(make: Make) -> None:
    client = make()
    with pytest.raises(OverloadedError, match="starting"):
        client.send_add([sequence("a")])
    with pytest.raises(OverloadedError):
        await client.reset_prefix_cache()
    client.send_abort(["a"])


@pytest.mark.parametrize("error", [ConfigError, PluginError, ModelFileError])
async def test_a_failed_start_raises_its_one_reason(make: Make, error: type[NonetError]) -> None:
    client = make(fail_start=error.__name__)
    with pytest.raises(error, match=r"the fake engine\s+cannot start"):
        await asyncio.wait_for(client.start(), 10)
    assert client.health().status is EngineStatus.DEAD
    with pytest.raises(EngineDeadError):
        await receive(client)
    with pytest.raises(EngineDeadError):
        client.send_add([sequence("a")])


async def test_an_unforeseen_start_error_names_itself(make: Make) -> None:
    client = make(fail_start="RuntimeError")
    with pytest.raises(EngineDeadError, match="RuntimeError: the fake engine"):
        await asyncio.wait_for(client.start(), 10)


async def test_a_bad_settings_key_is_named(make: Make) -> None:
    client = make(step_seconds=1)
    with pytest.raises(ConfigError, match="step_seconds"):
        await asyncio.wait_for(client.start(), 10)


async def test_a_step_that_raises_fails_every_receiver_and_every_call(make: Make) -> None:
    client = make(step_s=0.01, raise_at=5)
    await client.start()
    client.send_add([sequence("a", 1000)])

    async def to_the_end() -> str:
        while True:
            try:
                await receive(client)
            except EngineDeadError as error:
                return str(error)

    messages = await asyncio.gather(*[to_the_end() for _ in range(4)])
    assert all("told to raise" in message for message in messages)
    await until(lambda: client.health().status is EngineStatus.DEAD)
    assert "told to raise" in client.health().detail
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="told to raise"):
            await receive(client)
        with pytest.raises(EngineDeadError, match="told to raise"):
            client.send_add([sequence("b")])
        with pytest.raises(EngineDeadError, match="told to raise"):
            await client.reset_prefix_cache()
    client.send_abort(["a"])


async def test_a_message_that_raises_fails_alone(make: Make) -> None:
    client = make(step_s=0.005, refuse_add="bad")
    await client.start()
    client.send_add([sequence("good", 30)])
    client.send_add([sequence("bad")])
    tokens, reasons = await finish(client, 2)
    assert reasons == {"good": FinishReason.LENGTH, "bad": FinishReason.ERROR}
    assert tokens["good"] == fake_tokens(sequence("good", 30))


async def test_a_cancelled_receive_loses_nothing(make: Make) -> None:
    client = make(step_s=0.003)
    await client.start()
    client.send_add([sequence("a", 60)])
    tokens: list[int] = []
    while len(tokens) < 60:
        try:
            output = await asyncio.wait_for(client.receive(), 0.001)
        except TimeoutError:
            continue
        tokens += [token for delta in output.deltas for token in delta.token_ids]
    assert tokens == fake_tokens(sequence("a", 60))


async def test_sends_are_safe_from_other_threads(make: Make) -> None:
    client = make()
    await client.start()

    def send(part: int) -> None:
        for index in range(10):
            client.send_add([sequence(f"{part}-{index}")])

    threads = [threading.Thread(target=send, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    tokens, _ = await finish(client, 40)
    for thread in threads:
        thread.join()
    assert tokens == {
        f"{part}-{index}": fake_tokens(sequence(f"{part}-{index}")) for part in range(4) for index in range(10)
    }


async def test_a_front_that_does_not_receive_holds_the_engine_and_loses_nothing(make: Make) -> None:
    client = make()
    await client.start()
    request = sequence("a", 3000)
    client.send_add([request])
    await asyncio.sleep(0.5)
    assert client.health().status is EngineStatus.OK
    tokens, _ = await finish(client, 1)
    assert tokens == {"a": fake_tokens(request)}


async def test_too_many_queued_requests_are_refused(make: Make) -> None:
    """The engine sleeps in one long step; the front's queue ends somewhere."""
    client = make(step_s=0.8)
    await client.start()
    client.send_add([sequence("a", 1)])
    await asyncio.sleep(0.2)
    with pytest.raises(OverloadedError, match="keep up"):
        for index in range(5000):
            client.send_add([sequence(f"r{index}", 1)])
    assert client.health().status is EngineStatus.OK


async def test_close_when_idle(make: Make) -> None:
    client = make()
    await client.start()
    waiting = asyncio.create_task(client.receive())
    await asyncio.sleep(0.05)
    await asyncio.wait_for(client.close(), 5)
    with pytest.raises(EngineDeadError, match="closed"):
        await waiting
    assert client.health().status is EngineStatus.CLOSED
    with pytest.raises(EngineDeadError, match="shutting down"):
        client.send_add([sequence("a")])
    await client.close()


async def test_close_when_busy_stops_at_once(make: Make) -> None:
    client = make(step_s=0.01)
    await client.start()
    client.send_add([sequence("a", 100_000)])
    await receive(client)
    await asyncio.wait_for(client.close(), 5)
    with pytest.raises(EngineDeadError, match="closed"):
        while True:
            await receive(client)


async def test_close_with_a_drain_time_lets_requests_end(make: Make) -> None:
    client = make(step_s=0.01)
    await client.start()
    client.send_add([sequence("a", 30), sequence("b", 10)])
    await receive(client)
    closing = asyncio.create_task(client.close(drain_s=10))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="shutting down"):
        client.send_add([sequence("late")])
    _, reasons = await finish(client, 2)
    assert reasons == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    await asyncio.wait_for(closing, 5)


async def test_a_drain_time_has_an_end(make: Make) -> None:
    client = make(step_s=0.01)
    await client.start()
    client.send_add([sequence("a", 100_000)])
    await receive(client)
    closing = asyncio.create_task(client.close(drain_s=0.3))
    with pytest.raises(EngineDeadError, match="closed"):
        while True:
            await receive(client)
    await asyncio.wait_for(closing, 5)


async def test_close_before_and_during_the_start(make: Make) -> None:
    unstarted = make()
    await unstarted.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await receive(unstarted)
    client = make(load_s=0.8)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0.2)
    await asyncio.wait_for(client.close(), 5)
    with pytest.raises(EngineDeadError, match="closed"):
        await starting


async def test_a_cancelled_start_leaves_nothing(make: Make) -> None:
    client = make(load_s=0.8)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.start(), 0.2)
    await asyncio.wait_for(client.close(), 5)
    await until(lambda: not any(thread.name == "engine-client" for thread in threading.enumerate()))


async def test_kill_ends_waiting_receivers(make: Make) -> None:
    client = make(step_s=0.01)
    await client.start()
    client.send_add([sequence("a", 100_000)])
    client.kill()
    with pytest.raises(EngineDeadError):
        while True:
            await receive(client)
    await until(lambda: client.health().status is EngineStatus.DEAD)


def test_one_client_serves_several_event_loops() -> None:
    """Offline use calls `asyncio.run` again and again."""
    for client in (make_inline(), make_process()):
        asyncio.run(client.start())
        for name in "ab":
            client.send_add([sequence(name)])
            assert asyncio.run(finish(client, 1))[0] == {name: fake_tokens(sequence(name))}
        asyncio.run(client.close())
        assert client.health().status is EngineStatus.CLOSED


async def test_back_pressure_bounds_the_steps_ahead() -> None:
    """F04, counted where the engine can be seen: it stops a fixed number of steps ahead of the front."""
    engines: list[FakeEngineLoop] = []

    def build_engine() -> FakeEngineLoop:
        engines.append(build("{}", lambda what, done, total: None))
        return engines[0]

    client = InlineClient(build_engine)
    await client.start()
    client.send_add([sequence("a", 50_000)])
    await until(lambda: engines[0].step_count > 60)
    await asyncio.sleep(0.3)
    assert engines[0].step_count <= 66
    await receive(client)
    await until(lambda: engines[0].step_count > 64)
    assert engines[0].step_count <= 67
    await client.close()
    assert engines[0].closed


async def test_the_engine_is_closed_when_its_step_raised(caplog: pytest.LogCaptureFixture) -> None:
    engine = build('{"raise_at": 1}', lambda what, done, total: None)
    client = InlineClient(lambda: engine)
    with caplog.at_level(logging.ERROR):
        await client.start()
        client.send_add([sequence("a")])
        with pytest.raises(EngineDeadError):
            await receive(client)
    await until(lambda: engine.closed)
    assert "the step loop failed" in caplog.text
