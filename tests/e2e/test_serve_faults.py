"""The real server when processes die, freeze and are told to stop: reliability F01 to F03, F05, F08, F09; bugs D2, P1 to P3.

Limits are those that are promised, with room for a loaded machine; no time is measured for its own sake.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from core.testing.harness.http_calls import Outcome, call, completion_body, connected, idle_metrics
from core.testing.harness.server import RunningServer, install_plugin, metric
from core.testing.tiny_models import make_tiny_model

HERE = Path(__file__).parent
PROMPT = "The engine was described as one engine."
SHORT = completion_body(PROMPT, 12)
LONG = completion_body(PROMPT, 3000, stream=True)  # half a minute at least: never over before the test is
Start = Callable[..., RunningServer]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A server of the tiny model whose steps take 10 ms and more."""
    folder = tmp_path_factory.mktemp("faults")
    tiny = make_tiny_model(folder / "tiny", max_position_embeddings=4096)
    environ = install_plugin(folder / "site", "chaos", [HERE / "chaos_plugin.py", HERE / "chaos_sampler.py"])
    fixed = [
        f"model.source={tiny}",
        "model.dtype=float32",  # answers must not depend on batch mates
        "executor.num_threads=1",
        "cache.num_blocks=4096",
        "sampler.name=chaos",
        "sampler.pause=0.01",
    ]

    def build(*overrides: str, **options: Any) -> RunningServer:
        return RunningServer([*fixed, *overrides], environ=environ, **options)

    return build


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[RunningServer]:
    """Shared by the tests that leave it in good health."""
    with start("scheduler.max_num_running_reqs=16", "process.probe_timeout=1") as running:
        yield running


def begin(client: httpx.AsyncClient, body: dict[str, Any], count: int) -> tuple[list[Outcome], list[asyncio.Task[Any]]]:
    outcomes = [Outcome() for _ in range(count)]
    return outcomes, [asyncio.create_task(call(client, body, outcome)) for outcome in outcomes]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.01)


async def until_all_started(outcomes: list[Outcome], num_tokens: int = 1) -> None:
    await until(lambda: all(len(outcome.token_ids) >= num_tokens for outcome in outcomes))


async def tokens_of(client: httpx.AsyncClient, body: dict[str, Any] = SHORT) -> list[int]:
    outcome = await call(client, body)
    assert outcome.complete, outcome
    return outcome.token_ids


# --- the engine process dies or freezes ------------------------------------------------------------


@pytest.mark.slow
async def test_a_killed_engine_ends_every_call_and_is_started_again(server: RunningServer) -> None:
    """F01, P1: 16 running and 16 queued streams, kill -9 at a random time."""
    moments = random.Random(1)
    body = {**LONG, "max_tokens": 400}
    async with connected(server) as client:
        expected = await tokens_of(client)
        for _ in range(3):
            engine = server.engine_pid()
            outcomes, tasks = begin(client, body, 32)
            await asyncio.sleep(moments.uniform(0, 2))
            os.kill(engine, signal.SIGKILL)
            await asyncio.to_thread(server.wait_health, 503, None, 5)
            _, hanging = await asyncio.wait(tasks, timeout=10)
            assert not hanging, f"{len(hanging)} calls hang after the engine's death"
            assert all(outcome.complete or outcome.failed for outcome in outcomes), outcomes
            assert {outcome.code for outcome in outcomes if outcome.failed} <= {"engine_dead", "overloaded"}
            await asyncio.to_thread(server.wait_ok)
            assert await tokens_of(client) == expected
            assert not psutil.pid_exists(engine)
            ours = {server.pid, server.engine_pid(), *server.compiler_pids()}
            assert sorted(process.pid for process in server.processes()) == sorted(ours)
        await idle_metrics(client)


@pytest.mark.slow
async def test_a_frozen_engine_is_noticed_and_goes_on_where_it_was(server: RunningServer) -> None:
    """F03, P2: kill -STOP under 16 streams, then -CONT."""
    body = {**LONG, "max_tokens": 150}
    async with connected(server) as client:
        expected = await tokens_of(client, body)
        outcomes, tasks = begin(client, body, 16)
        await until_all_started(outcomes, 10)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            await asyncio.to_thread(server.wait_health, 503, "frozen", 10)
            age = metric((await client.get("/metrics")).text, "nonet_engine_step_age_seconds")
            assert age > 1
            await asyncio.sleep(1)
            assert not any(task.done() for task in tasks)
        finally:
            os.kill(engine, signal.SIGCONT)
        await asyncio.to_thread(server.wait_ok)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert all(outcome.complete and outcome.num_done == 1 for outcome in outcomes)
        assert [outcome.token_ids for outcome in outcomes] == [expected] * 16
        assert server.engine_pid() == engine


@pytest.mark.slow
async def test_one_request_fails_alone(server: RunningServer) -> None:
    """F05, D2: the sampler raises at the fifth token of one of 16 requests; ten rounds, streamed and whole."""
    prompts = [f"{PROMPT} Number {index}." for index in range(15)]
    async with connected(server) as client:
        solo = [await tokens_of(client, completion_body(prompt, 12)) for prompt in prompts]
        engine = server.engine_pid()
        for turn in range(10):
            streamed = turn % 2 == 0
            bodies = [completion_body(prompt, 12, stream=streamed) for prompt in prompts]
            bodies.insert(turn, completion_body(PROMPT, 12, stream=streamed, seed=666))
            outcomes = await asyncio.gather(*(call(client, body) for body in bodies))
            bad = outcomes.pop(turn)
            assert bad.failed and bad.code == "generation_failed", bad
            assert bad.status == (200 if streamed else 500)
            assert len(bad.token_ids) == (4 if streamed else 0)
            assert all(outcome.complete for outcome in outcomes)
            assert [outcome.token_ids for outcome in outcomes] == solo
        assert server.engine_pid() == engine
        await idle_metrics(client)


async def test_gauges_fall_to_zero_when_all_clients_leave(server: RunningServer) -> None:
    """P3: 100 streams closed at once; no new traffic."""
    async with connected(server) as client:
        before = metric((await client.get("/metrics")).text, "nonet_requests_finished_total", finish_reason="abort")
    async with connected(server) as client:
        outcomes, tasks = begin(client, LONG, 100)
        await until(lambda: any(outcome.token_ids for outcome in outcomes))  # whichever came first
        async with connected(server) as watcher, asyncio.timeout(30):  # on a busy machine others are still on their way
            while metric((await watcher.get("/metrics")).text, "nonet_requests_in_flight") < 16:
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=30)
    async with connected(server) as client:
        text = await idle_metrics(client)
        assert metric(text, "nonet_requests_in_flight") == 0
        aborted = metric(text, "nonet_requests_finished_total", finish_reason="abort") - before
        assert 16 <= aborted <= 100


# --- the HTTP process dies -------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_engine_does_not_outlive_a_killed_front(start: Start) -> None:
    """F02: kill -9 of the HTTP process under load; three rounds on one port."""
    port = 0
    for _ in range(3):
        with start(port=port) as server:
            port = server.port
            async with connected(server) as client:
                assert (await call(client, SHORT)).complete
                outcomes, tasks = begin(client, LONG, 4)
                await until_all_started(outcomes)
                server.send_signal(signal.SIGKILL)
                assert server.wait_exit() == -signal.SIGKILL
                server.assert_gone(seconds=10)
                await asyncio.wait_for(asyncio.gather(*tasks), 10)
                assert all(outcome.broken for outcome in outcomes)


@pytest.mark.slow
async def test_starts_and_stops_leave_nothing(start: Start) -> None:
    """F09: five cycles with five requests each. `stop` checks processes and socket directories."""
    for _ in range(5):
        with start("sampler.pause=0") as server:
            async with connected(server) as client:
                answers = await asyncio.gather(*(call(client, SHORT) for _ in range(5)))
            assert all(answer.complete for answer in answers)
            assert server.stop() == 0


# --- signals (the table in plugins/frontends/openai_http/drain.py) ---------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_without_drain_time_a_signal_ends_running_calls_with_an_error(
    start: Start, number: signal.Signals
) -> None:
    """F08: 8 streams, 8 whole answers, drain_timeout 0."""
    with start("process.drain_timeout=0") as server:
        async with connected(server) as client:
            streams, tasks = begin(client, LONG, 8)
            whole, more = begin(client, {**LONG, "stream": False}, 8)
            await until_all_started(streams)
            sent = time.monotonic()
            assert server.stop(number) == 0
            assert time.monotonic() - sent < 4 + 6
            await asyncio.wait_for(asyncio.gather(*tasks, *more), 10)
        assert all(outcome.failed and outcome.code == "shutting_down" for outcome in streams), streams
        assert all(outcome.failed and outcome.code == "shutting_down" for outcome in whole), whole
        assert {outcome.status for outcome in streams} == {200} and {outcome.status for outcome in whole} == {503}


async def test_an_idle_server_ends_at_once(start: Start) -> None:
    """F08: the drain time is for running calls only."""
    with start("process.drain_timeout=30") as server:
        sent = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - sent < 4 + 6


@pytest.mark.slow
async def test_a_drain_lets_calls_end_until_its_limit(start: Start) -> None:
    """F08: drain_timeout 3; four calls end in time, four do not; new ones are refused and /health says so."""
    with start("process.drain_timeout=3") as server:
        async with connected(server) as client:
            long, long_tasks = begin(client, LONG, 4)
            await until_all_started(long)
            short, short_tasks = begin(client, {**LONG, "max_tokens": 15}, 4)
            await until_all_started(short)
            server.send_signal(signal.SIGTERM)
            sent = time.monotonic()
            await asyncio.to_thread(server.wait_health, 503, "draining", 2)
            late = await call(client, SHORT)
            assert (late.status, late.code) == (503, "shutting_down")
            await asyncio.wait_for(asyncio.gather(*long_tasks, *short_tasks), 15)
            assert await asyncio.to_thread(server.wait_exit) == 0
            assert 2.5 < time.monotonic() - sent < 3 + 2 + 6
        server.assert_gone()
        assert all(outcome.complete and outcome.num_done == 1 for outcome in short), short
        assert all(outcome.failed and outcome.code == "shutting_down" for outcome in long), long


@pytest.mark.slow
async def test_a_second_signal_does_not_wait(start: Start) -> None:
    """F08: drain_timeout 60, SIGTERM twice."""
    with start("process.drain_timeout=60") as server:
        async with connected(server) as client:
            outcomes, tasks = begin(client, LONG, 8)
            await until_all_started(outcomes)
            server.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait_health, 503, "draining", 5)
            sent = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - sent < 2 + 6
            await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert all(outcome.failed or outcome.broken for outcome in outcomes), outcomes


@pytest.mark.slow
async def test_a_signal_while_the_engine_is_dead(start: Start) -> None:
    """F08: the engine is being started again, slowly, when SIGTERM comes."""
    with start("sampler.start_pause=3") as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        await asyncio.to_thread(server.wait_health, 503, "starting", 10)
        sent = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - sent < 5 + 6


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 0.1, 0.2, 4], ids=["begun", "imports", "still imports", "model loads"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_while_it_starts(start: Start, number: signal.Signals, seconds: float) -> None:
    """F08: the load would take a minute more."""
    with start("sampler.start_pause=60", wait=False) as server:
        server.engine_pid()  # the first that it begins
        time.sleep(seconds)
        sent = time.monotonic()
        status = server.stop(number)
        assert time.monotonic() - sent < 5 + 6
        assert status == {signal.SIGTERM: 0, signal.SIGINT: 130}[number]
        assert "Traceback" not in server.log()
