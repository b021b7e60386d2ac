"""The process border under fire: real engine processes that are killed, frozen, orphaned and lied to.

Scenarios F01 to F04, F07, F08, F20 and F21, with the fake engine; every wait is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from core import client as client_module
from core.border.child import EngineChild
from core.client import EngineProcessSettings, EngineStatus, ProcessClient
from core.errors import ConfigError, EngineDeadError, OverloadedError, PluginError, RequestError
from core.request import EngineRequest, FinishReason, SamplingParams
from core.testing.harness.fake_engine import fake_tokens
from core.version import nonet_version
from core.wire import (
    Add,
    AnyMessage,
    Boot,
    Heartbeat,
    Hello,
    Loading,
    Output,
    Ready,
    Shutdown,
    StartFailed,
    Stopped,
    decode,
    encode,
)

FACTORY = "core.testing.harness.fake_engine:build"
ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., ProcessClient]


@pytest.fixture(autouse=True)
def socket_home(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """Sockets go where the test can see that none is left; so are children."""
    home = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    before = set(psutil.Process().children(recursive=True))
    yield home
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    for child in left:
        child.kill()
    files = list(home.iterdir())
    subprocess.run(["rm", "-rf", str(home)], check=True)
    assert not left, "a child was left behind"
    assert files == [], "a socket directory was left behind"


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[ProcessClient] = []

    def build(policy: dict[str, Any] | None = None, plugins: list[str] | None = None, **fake: Any) -> ProcessClient:
        settings = EngineProcessSettings(**{"start_timeout": 20, **(policy or {})})
        client = ProcessClient(json.dumps(fake), plugins=plugins, settings=settings, _factory=FACTORY)
        made.append(client)
        return client

    yield build
    for client in made:
        await client.close()


def sequence(name: str, max_tokens: int = 5) -> EngineRequest:
    prompt = [5, *name.encode()]
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens), seed=1)


async def finish(client: ProcessClient, name: str) -> list[int]:
    tokens: list[int] = []
    while True:
        for delta in (await asyncio.wait_for(client.receive(), 10)).deltas:
            if delta.request_id == name:
                tokens += delta.token_ids
                if delta.finish_reason is not None:
                    assert delta.finish_reason is FinishReason.LENGTH
                    return tokens


async def death(client: ProcessClient) -> str:
    """Receive until the engine's death is told."""
    while True:
        try:
            await asyncio.wait_for(client.receive(), 10)
        except EngineDeadError as error:
            return str(error)


async def until(condition: Callable[[], object], seconds: float = 8.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # an orphan whose new parent does not reap
    except psutil.NoSuchProcess:
        return True


async def check_serves(client: ProcessClient, name: str) -> None:
    await until(lambda: client.health().status is EngineStatus.OK)
    client.send_add([sequence(name)])
    assert await finish(client, name) == fake_tokens(sequence(name))


# --- death and restart (F01, P1) ---


async def test_a_killed_engine_fails_all_pending_and_is_replaced(make: Make) -> None:
    client = make(step_s=0.02)
    await client.start()
    names = [f"r{index}" for index in range(16)]
    client.send_add([sequence(name, 10_000) for name in names])
    receivers = [asyncio.create_task(death(client)) for _ in names]
    await asyncio.sleep(0.2)
    first = client.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    messages = await asyncio.wait_for(asyncio.gather(*receivers), 2)  # R5
    assert all("SIGKILL" in message for message in messages)
    assert client.health().status is not EngineStatus.FROZEN
    await check_serves(client, "after")
    assert client.generation == 2
    assert client.pid != first
    assert gone(first)


async def test_calls_during_a_restart_are_refused_and_not_lost(make: Make) -> None:
    client = make(load_s=0.5, step_s=0.01)
    await client.start()
    client.send_add([sequence("a", 10_000)])
    pending = asyncio.create_task(client.reset_prefix_cache())
    os.kill(client.pid or 0, signal.SIGSTOP)  # so that the call stays unanswered
    await asyncio.sleep(0.05)
    os.kill(client.pid or 0, signal.SIGKILL)
    await until(lambda: client.health().status is EngineStatus.STARTING, 1.0)  # health 503 within a second
    with pytest.raises(OverloadedError, match="starting"):
        client.send_add([sequence("b")])
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(pending, 1)
    client.send_abort(["a"])
    await until(lambda: client.health().status is EngineStatus.OK)
    with pytest.raises(OverloadedError):  # the death is not received yet: the front would fail this one with it
        client.send_add([sequence("b")])
    await death(client)
    await check_serves(client, "b")


async def test_outputs_sent_before_the_death_arrive_before_it(make: Make) -> None:
    client = make(die_at=8)
    await client.start()
    request = sequence("a", 100)
    client.send_add([request])
    tokens: list[int] = []
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        while True:
            output = await asyncio.wait_for(client.receive(), 5)
            tokens += [token for delta in output.deltas for token in delta.token_ids]
    assert tokens == fake_tokens(request)[: len(tokens)]


async def test_restarts_in_a_row_are_bounded(make: Make) -> None:
    client = make({"max_restarts": 2}, raise_at=1)
    await client.start()
    for life in range(1, 4):
        await until(lambda: client.health().status is EngineStatus.OK)
        assert client.generation == life
        client.send_add([sequence("a")])
        assert "told to raise" in await death(client)
    await until(lambda: client.health().status is EngineStatus.DEAD)
    assert "gave up after 2 restarts" in client.health().detail
    with pytest.raises(EngineDeadError, match="gave up"):
        client.send_add([sequence("a")])
    assert "gave up" in await death(client)


async def test_a_served_request_resets_the_count_of_restarts(make: Make) -> None:
    client = make({"max_restarts": 1})
    await client.start()
    for life in range(1, 4):
        await check_serves(client, f"r{life}")
        os.kill(client.pid or 0, signal.SIGKILL)
        await death(client)
    await check_serves(client, "last")
    assert client.generation == 4


async def test_policy_exit_does_not_restart(make: Make) -> None:
    client = make({"on_engine_death": "exit"})
    await client.start()
    os.kill(client.pid or 0, signal.SIGKILL)
    assert "SIGKILL" in await death(client)
    await until(lambda: client.health().status is EngineStatus.DEAD)
    assert client.generation == 1
    assert client.pid is None


async def test_a_restart_that_cannot_start_gives_up(make: Make) -> None:
    """The second life is built from settings that have become unreadable."""
    client = make({"max_restarts": 1})
    await client.start()
    client._hello = ("{bad json", None)
    os.kill(client.pid or 0, signal.SIGKILL)
    await death(client)
    await until(lambda: client.health().status is EngineStatus.DEAD)
    assert "Invalid JSON" in client.health().detail


# --- freeze and back-pressure (F03, F04, P2) ---


async def test_a_frozen_engine_is_seen_and_comes_back(make: Make) -> None:
    client = make({"probe_timeout": 0.6}, step_s=0.005)
    await client.start()
    client.send_add([sequence("a", 200)])
    answer = asyncio.create_task(finish(client, "a"))
    await asyncio.sleep(0.1)
    os.kill(client.pid or 0, signal.SIGSTOP)
    try:
        await until(lambda: client.health().status is EngineStatus.FROZEN, 3)
        assert client.health().step_age > 0.6
    finally:
        os.kill(client.pid or 0, signal.SIGCONT)
    assert await answer == fake_tokens(sequence("a", 200))
    await until(lambda: client.health().status is EngineStatus.OK, 3)
    assert client.generation == 1


async def test_a_frozen_engine_takes_no_new_work_and_is_replaced_in_the_end(make: Make) -> None:
    client = make({"probe_timeout": 0.3, "freeze_timeout": 1.5}, step_s=0.005)
    await client.start()
    client.send_add([sequence("a", 500)])
    frozen = client.pid or 0
    os.kill(frozen, signal.SIGSTOP)
    await until(lambda: client.health().status is EngineStatus.FROZEN, 5)
    with pytest.raises(OverloadedError, match="does not answer"):
        client.send_add([sequence("b", 3)])
    await death(client)
    await until(lambda: client.health().status is EngineStatus.OK, 20)
    assert client.pid != frozen
    client.send_add([sequence("c", 3)])
    assert await finish(client, "c") == fake_tokens(sequence("c", 3))


async def test_a_long_step_counts_as_frozen_until_it_ends(make: Make) -> None:
    client = make({"probe_timeout": 0.3}, step_s=1.0)
    await client.start()
    client.send_add([sequence("a", 1)])
    await until(lambda: client.health().status is EngineStatus.FROZEN, 3)
    assert await finish(client, "a") == fake_tokens(sequence("a", 1))
    assert client.health().status is EngineStatus.OK


async def test_a_frozen_engine_can_be_closed(make: Make) -> None:
    client = make({"close_timeout": 0.5})
    await client.start()
    os.kill(client.pid or 0, signal.SIGSTOP)
    await asyncio.wait_for(client.close(), 5)
    assert client.health().status is EngineStatus.CLOSED


async def test_a_slow_front_stops_the_engine_and_loses_nothing(make: Make) -> None:
    client = make()
    await client.start()
    engine = psutil.Process(client.pid)
    request = sequence("a", 4000)
    client.send_add([request])

    def used() -> float:
        times = engine.cpu_times()
        return times.user + times.system

    await asyncio.sleep(0.6)
    memory, busy = engine.memory_info().rss, used()
    await asyncio.sleep(0.6)
    assert used() - busy < 0.3  # it waits; a stepping engine takes all of the time
    assert engine.memory_info().rss - memory < 10 * 2**20
    assert client.health().status is EngineStatus.OK
    assert await finish(client, "a") == fake_tokens(request)


async def test_a_request_past_the_frame_bound_is_refused_alone(make: Make) -> None:
    client = make()
    await client.start()
    params = SamplingParams(max_tokens=2)
    large = EngineRequest(request_id="large", prompt_token_ids=[70_000] * 2_000_000, params=params, seed=0)
    too_large = EngineRequest(request_id="too", prompt_token_ids=[70_000] * 4_000_000, params=params, seed=0)
    with pytest.raises(RequestError, match="too large") as caught:
        client.send_add([large, too_large])
    assert caught.value.status == 413
    two = [large, msgspec.structs.replace(large, request_id="large2")]  # together past the bound, each within it
    client.send_add(two)
    await finish(client, "large2")
    unsendable = msgspec.structs.replace(large, prompt_token_ids=[1], params=SamplingParams(logit_bias={1: object()}))
    with pytest.raises(RequestError, match="cannot cross"):
        client.send_add([unsendable])
    await check_serves(client, "after")


# --- the front dies (F02) ---

FRONT = """
import asyncio, json, os, sys
from core.client import ProcessClient
from core.request import EngineRequest, SamplingParams

async def main():
    client = ProcessClient(sys.argv[1], _factory="core.testing.harness.fake_engine:build")
    starting = asyncio.create_task(client.start())
    while client.pid is None:
        await asyncio.sleep(0.001)
    print(client.pid, flush=True)
    await starting
    params = SamplingParams(max_tokens=10**4)
    client.send_add([EngineRequest(request_id="a", prompt_token_ids=[1], params=params, seed=0)])
    await asyncio.sleep(0.3)
    print("busy", flush=True)
    if sys.argv[2] == "return":
        return
    await asyncio.sleep(60)

asyncio.run(main())
"""


def start_front(home: Path, how: str = "wait", **fake: Any) -> tuple[subprocess.Popen[str], int]:
    """A front process with an engine of its own; the engine's pid."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(home)}
    command = [sys.executable, "-c", FRONT, json.dumps(fake), how]
    front = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert front.stdout is not None
    return front, int(front.stdout.readline())


@pytest.mark.parametrize(
    "fake",
    [{"step_s": 0.01}, {"step_s": 30.0}, {"step_s": 30.0, "hold_interpreter": True}],
    ids=["busy", "long step", "long native call"],
)
async def test_the_engine_does_not_outlive_a_killed_front(socket_home: Path, fake: dict[str, Any]) -> None:
    front, engine = start_front(socket_home, **fake)
    assert front.stdout is not None
    assert front.stdout.readline() == "busy\n"
    front.kill()
    front.wait()
    await until(lambda: gone(engine), 2)
    assert list(socket_home.iterdir()) == []


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.4], ids=["spawned", "connecting", "loading"])
async def test_the_engine_does_not_outlive_a_front_killed_during_the_start(socket_home: Path, delay: float) -> None:
    front, engine = start_front(socket_home, load_s=30.0)
    await asyncio.sleep(delay)
    front.kill()
    front.wait()
    await until(lambda: gone(engine), 2)
    assert list(socket_home.iterdir()) == []


async def test_the_engine_ends_with_a_front_that_forgets_to_close(socket_home: Path) -> None:
    front, engine = start_front(socket_home, "return", step_s=0.01)
    await asyncio.to_thread(front.wait, 10)
    assert front.returncode == 0
    await until(lambda: gone(engine), 2)


# --- starting (F07) ---


async def test_an_engine_that_exits_while_it_starts(make: Make) -> None:
    client = make(fail_start="exit")
    with pytest.raises(EngineDeadError, match="exit status 7"):
        await asyncio.wait_for(client.start(), 10)
    assert client.generation == 1


async def test_a_start_has_a_time_limit(make: Make) -> None:
    client = make({"start_timeout": 0.7}, load_s=30.0)
    with pytest.raises(EngineDeadError, match="start_timeout=0.7"):
        await asyncio.wait_for(client.start(), 10)
    assert client.pid is None


async def test_the_real_factory_reports_bad_settings(make: Make) -> None:
    """The engine process as `serve` starts it, with settings that no pipeline can be made from."""
    client = ProcessClient('{"no_such_key": 1}')
    with pytest.raises((ConfigError, EngineDeadError), match="no_such_key|groups"):
        await asyncio.wait_for(client.start(), 60)


async def test_progress_is_told_in_order(make: Make) -> None:
    seen: list[tuple[str, int, int]] = []
    client = make(load_steps=3)
    await client.start(lambda what, done, total: seen.append((what, done, total)))
    assert seen[0] == ("engine process", 1, 1)
    assert seen[1:] == [("weights", step, 3) for step in (1, 2, 3)]


async def test_plugin_sets_are_compared(make: Make) -> None:
    same = make(plugins=["b==2", "a==1"])
    same._hello = (json.dumps({"plugins": ["a==1", "b==2"]}), ["b==2", "a==1"])
    await same.start()
    other = make(plugins=["a==1", "front-only==1"])
    other._hello = (json.dumps({"plugins": ["a==1", "engine-only==2"]}), ["a==1", "front-only==1"])
    with pytest.raises(PluginError) as caught:
        await other.start()
    assert "only in the front: front-only==1" in str(caught.value)
    assert "only in the engine: engine-only==2" in str(caught.value)


async def test_versions_are_compared(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "nonet_version", lambda: "99.1")
    client = make()
    with pytest.raises(PluginError, match=r"version.*99\.1"):
        await client.start()


# --- signals (F08) ---


async def test_sigterm_ends_the_engine_cleanly_and_sigint_does_not(make: Make) -> None:
    client = make({"on_engine_death": "exit"}, step_s=0.01)
    await client.start()
    os.kill(client.pid or 0, signal.SIGINT)
    await asyncio.sleep(0.2)
    await check_serves(client, "a")
    os.kill(client.pid or 0, signal.SIGTERM)
    assert "SIGTERM" in await death(client)


async def test_sigterm_while_starting(make: Make) -> None:
    client = make(load_s=30.0)
    starting = asyncio.create_task(client.start())
    await until(lambda: client.health().detail.startswith("engine process"))
    os.kill(client.pid or 0, signal.SIGTERM)
    with pytest.raises(EngineDeadError, match="SIGTERM"):
        await asyncio.wait_for(starting, 5)


async def test_a_new_child_is_deaf_to_ctrl_c_from_its_first_moment(make: Make) -> None:
    client = make()
    starting = asyncio.create_task(client.start())
    while not starting.done():
        if client.pid is not None:
            os.kill(client.pid, signal.SIGINT)
        await asyncio.sleep(0.005)
    await starting
    await check_serves(client, "a")


async def test_sigusr1_writes_the_stacks(capfd: pytest.CaptureFixture[str], make: Make) -> None:
    client = make()
    await client.start()
    os.kill(client.pid or 0, signal.SIGUSR1)
    await asyncio.sleep(0.3)
    await check_serves(client, "a")
    assert "process.py" in capfd.readouterr().err


# --- strangers and bad frames (F20, F21, P10) ---

JUNK = (
    b"",
    b"\x00",
    b"\x01",
    b"\xff" * 1000,
    os.urandom(1 << 20),
    b"\x80\x04\x95\x1d" + b"\x00" * 40,
    b"GET / HTTP/1.1",
)


async def test_strangers_are_dropped_and_counted(make: Make, socket_home: Path) -> None:
    """The child is held before it connects, so that strangers find the socket at all; after that it is gone."""
    client = make()
    starting = asyncio.create_task(client.start())
    await until(lambda: client.pid)
    os.kill(client.pid or 0, signal.SIGSTOP)
    (directory,) = socket_home.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "engine").stat().st_mode) & 0o077 == 0
    context = zmq.Context()
    dealers = [context.socket(zmq.DEALER) for _ in range(3)]
    forged = (encode(Stopped(reason="forged")), encode(StartFailed(message="forged", error="ConfigError")))
    for dealer in dealers:
        dealer.connect(f"ipc://{directory / 'engine'}")
        for frame in (*JUNK, *forged):
            dealer.send(frame)
        dealer.send_multipart([b"a", b"b", forged[0]])
    for size in (0, 1, 100, 100_000):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(directory / "engine"))
            with contextlib.suppress(OSError):  # the front may hang up at once
                raw.sendall(os.urandom(size))
    try:
        await until(lambda: client.dropped >= 3 * (len(JUNK) + 3))  # random bytes may read as frames of ZMTP 1.0
    finally:
        os.kill(client.pid or 0, signal.SIGCONT)
        for dealer in dealers:
            dealer.close(linger=0)
        context.term()
    await starting
    assert list(socket_home.iterdir()) == []
    await check_serves(client, "a")


def receive(router: zmq.Socket[bytes], kind: type[AnyMessage]) -> Any:
    """The next message of a kind, others skipped."""
    while True:
        assert router.poll(5000)
        message = decode(router.recv_multipart()[1])
        if isinstance(message, kind):
            return message


async def test_the_engine_survives_bad_frames(socket_home: Path) -> None:
    """A front that is out of its mind: the child drops and counts, and goes on."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    directory = Path(tempfile.mkdtemp())
    router.bind(f"ipc://{directory}/engine")
    command = [sys.executable, "-P", "-c", "from core.process import main; main()"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert child.stdin is not None
    boot = Boot(address=f"ipc://{directory}/engine", identity="the-child", factory=FACTORY)
    child.stdin.write(msgspec.json.encode(boot) + b"\n")
    child.stdin.flush()
    try:
        receive(router, Loading)
        hello = Hello(version=nonet_version(), settings="{}")
        router.send_multipart([b"the-child", encode(hello)])
        receive(router, Ready)
        bad = [*JUNK, encode(Stopped(reason="not yours")), b"\x02" + encode(Shutdown())[1:], encode(hello)[:-1]]
        for frame in bad:
            router.send_multipart([b"the-child", frame])
        router.send_multipart([b"the-child", encode(hello)])  # legal, but not now
        router.send_multipart([b"the-child", encode(Add(requests=[sequence("a", 1)]))])
        output = receive(router, Output)
        while not output.output.deltas:
            output = receive(router, Output)
        assert output.output.deltas[0].token_ids == fake_tokens(sequence("a", 1))
        while (beat := receive(router, Heartbeat)).dropped < len(bad):
            pass
        assert beat.dropped == len(bad)
        router.send_multipart([b"the-child", encode(Shutdown())])
        assert receive(router, Stopped).reason == "shutdown"
        assert await asyncio.to_thread(child.wait, 5) == 0
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        router.close(linger=0)
        context.term()


def tamper(monkeypatch: pytest.MonkeyPatch, change: Callable[[AnyMessage], list[AnyMessage]]) -> None:
    """Change what the front receives from its child."""
    receive_one = EngineChild.receive
    waiting: list[AnyMessage] = []

    def tampered(self: EngineChild) -> AnyMessage | None:
        while not waiting:
            message = receive_one(self)
            if message is None:
                return None
            waiting.extend(change(message))
        return waiting.pop(0)

    monkeypatch.setattr(EngineChild, "receive", tampered)


async def test_repeated_outputs_are_ignored(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper(monkeypatch, lambda message: [message, message] if isinstance(message, Output) else [message])
    client = make()
    await client.start()
    for name in ("a", "b"):
        client.send_add([sequence(name, 20)])
        assert await finish(client, name) == fake_tokens(sequence(name, 20))


async def test_a_lost_output_ends_the_life_of_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are missing and nobody knows whose: every pending request fails, none is silently short."""
    lost: list[AnyMessage] = []

    def lose_the_third(message: AnyMessage) -> list[AnyMessage]:
        if isinstance(message, Output) and message.sequence == 3 and not lost:
            lost.append(message)
            return []
        return [message]

    tamper(monkeypatch, lose_the_third)
    client = make()
    await client.start()
    client.send_add([sequence("a", 50)])
    assert "output 3 of the engine was lost" in await death(client)
    await check_serves(client, "after")
    assert client.generation == 2


# --- nothing is kept (F09, R3) ---


async def test_start_and_stop_keep_nothing(make: Make) -> None:
    this = psutil.Process()
    threads = this.num_threads()
    files = []
    for life in range(4):
        client = make()
        await client.start()
        await check_serves(client, f"r{life}")
        await client.close()
        files.append(this.num_fds())
        await until(lambda: this.num_threads() <= threads)  # a thread that has said its last word is still ending
    assert files[1:] == [files[1]] * 3


def test_sockets_are_never_on_the_network() -> None:
    for name in ("border/child.py", "border/thread_client.py", "process.py", "client.py", "wire.py"):
        text = (ROOT / "core" / name).read_text(encoding="utf-8")
        assert "tcp://" not in text, name
        assert "recv_pyobj" not in text, name
