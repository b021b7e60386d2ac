"""Streams under trouble: errors inside, silence, clients that leave, shutdown. Rows D1-D5 and I1 of the bug list, R8."""

import json
import random
import re
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import pytest

from core.errors import ConfigError, EngineDeadError, GenerationError, OverloadedError
from core.pipeline import PipelineDescription
from core.request import FinishReason
from core.stages.frontend import FrontendContext
from core.testing.fake_front import FakeFront, Script
from core.testing.harness.frontend_thread import serving, wait_until
from plugins.frontends.openai_http import OpenAIHttp

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]


def make(front, drain_timeout=0.0, **settings):
    context = FrontendContext(front, PipelineDescription(()), drain_timeout=drain_timeout)
    return OpenAIHttp(OpenAIHttp.Settings(port=0, **settings), context)


@pytest.fixture(scope="module")
def server():
    front = FakeFront()
    with serving(make(front, keep_alive_seconds=0.1)) as url:
        yield front, url


@pytest.fixture
def front(server):
    front = server[0]
    front.script, front.refuse = Script(), None
    front.requests.clear()
    front.aborted.clear()
    yield front
    wait_until(lambda: not front.open)


def stream(client, path=CHAT, **body):
    """Headers and the raw blocks of an event stream, comments included."""
    body = {"stream": True, **({"messages": HELLO} if path == CHAT else {}), **body}
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        text = answer.read().decode()
    assert text.endswith("\n\n")
    return answer.headers, text.removesuffix("\n\n").split("\n\n")


def address(url):
    return "127.0.0.1", int(url.rsplit(":", 1)[1])


def raw_request(path, body, headers=""):
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    return (head + headers + "\r\n").encode() + data


# --- requests that were not scheduled in time ---------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_expired_before_the_first_byte_is_503_with_the_time_to_come_back(client, front, streaming):
    front.script = Script(error=OverloadedError("waited 5 s", retry_after=2.2))
    answer = client.post(CHAT, json={"messages": HELLO, "n": 2, "stream": streaming, "ttl": 5})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json()["error"] == {
        "message": "waited 5 s",
        "type": "server_error",
        "param": None,
        "code": "overloaded",
    }
    assert front.requests[-1].ttl == 5


def test_expired_after_a_keep_alive_is_one_event(client, front):
    front.script = Script(first_delay=0.3, error=OverloadedError("waited 5 s"))
    _, blocks = stream(client, n=2)
    assert blocks[0] == ": keep-alive" and set(blocks[:-1]) == {": keep-alive"}
    assert json.loads(blocks[-1].removeprefix("data: "))["error"]["code"] == "overloaded"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("reason", list(FinishReason))
def test_finish_reasons_are_openais_whatever_a_front_says(client, front, reason, streaming):
    front.script = Script(text="one", finish_reason=reason)
    text = client.post(CHAT, json={"messages": HELLO, "stream": streaming}).text
    told = set(re.findall(r'"finish_reason":(?:"(\w+)"|null)', text)) - {""}
    assert told == (set() if reason in ("error", "expired") else {"length" if reason == "length" else "stop"})
    assert ('"error"' in text) == (not told)


@pytest.mark.parametrize("ttl", ["0", "-1", "NaN", "1e999", "86401", "true", '"5"', "[1]"])
def test_a_ttl_without_sense_is_a_400(client, front, ttl):
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "ttl": {ttl}}}'
    answer = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and not front.requests


# --- form -----------------------------------------------------------------------------------------


def test_headers_and_end(client, front):
    headers, blocks = stream(client)
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    assert blocks[-1] == "data: [DONE]" and sum(block == "data: [DONE]" for block in blocks) == 1
    assert front.aborted == []


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", 10**9])
def test_d1_bad_n_is_refused_before_any_event(client, n):
    answer = client.post(CHAT, json={"messages": HELLO, "n": n, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("error", [GenerationError("nan"), EngineDeadError("gone"), RuntimeError("secret")])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_d2_one_error_event_and_no_done(client, front, error, path):
    front.script = Script("hello world one and two", error=error, error_at=3)
    extra = {} if path == CHAT else {"prompt": "hello"}
    _, blocks = stream(client, path, **extra)
    errors = [block for block in blocks if "error" in json.loads(block.removeprefix("data: "))]
    assert errors == blocks[-1:] and len(blocks) > 2
    assert set(json.loads(errors[0].removeprefix("data: "))["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in errors[0]


def test_d2_the_other_streams_go_on(server, front):
    def script(request):
        broken = request.params.seed == 3
        return Script(delay=0.005, error=GenerationError("nan") if broken else None, error_at=5)

    front.script = script
    import concurrent.futures

    def one(seed):
        with httpx.Client(base_url=server[1], timeout=10) as client:
            return stream(client, seed=seed, max_tokens=12)[1][-1]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(one, range(8)))
    assert [end == "data: [DONE]" for end in ends] == [seed != 3 for seed in range(8)]


def test_an_error_in_one_prompt_ends_the_call_once(client, front):
    def script(request):
        broken = request.request_id.endswith("-1")
        return Script(delay=0.005, error=GenerationError("nan") if broken else None, error_at=2)

    front.script = script
    _, blocks = stream(client, "/v1/completions", prompt=["a", "b", "c"], max_tokens=100)
    assert sum('"error"' in block for block in blocks) == 1 and '"error"' in blocks[-1]
    wait_until(lambda: not front.open)
    assert len(front.aborted) == 3
    answer = client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 100})
    assert answer.status_code == 500


def test_d5_comments_while_nothing_is_produced(client, front):
    front.script = Script("hello world", first_delay=0.45)
    _, blocks = stream(client)
    assert 2 <= sum(block == ": keep-alive" for block in blocks) <= 6
    assert blocks[0] == ": keep-alive" and blocks[-1] == "data: [DONE]"


def test_an_error_after_the_first_comment_is_an_event(client, front):
    front.script = Script(first_delay=0.3, error=GenerationError("nan"))
    _, blocks = stream(client)
    assert blocks[0] == ": keep-alive" and '"error"' in blocks[-1]


def test_an_early_error_is_plain_http(client, front):
    front.script = Script(error=GenerationError("nan"))
    answer = client.post(CHAT, json={"messages": HELLO, "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]])
def test_i1_closing_the_connection_aborts(server, front, streaming, prompt):
    front.script = Script(delay=0.01)
    body = {"prompt": prompt, "max_tokens": 1000, "stream": streaming, "n": 2}
    with socket.create_connection(address(server[1])) as connection:
        connection.sendall(raw_request("/v1/completions", body))
        count = 3 if isinstance(prompt, list) else 1
        wait_until(lambda: len(front.open) == count)
    wait_until(lambda: not front.open, seconds=4.0)
    assert len(front.aborted) == count


def test_i1_half_close_counts_as_leaving(server, front):
    front.script = Script(delay=0.01)
    with socket.create_connection(address(server[1])) as connection:
        connection.sendall(raw_request(CHAT, {"messages": HELLO, "max_tokens": 1000}))
        wait_until(lambda: len(front.open) == 1)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: not front.open, seconds=4.0)


def test_i1_a_pipelined_request_does_not_hide_the_disconnect(server, front):
    front.script = Script(delay=0.01)
    with socket.create_connection(address(server[1])) as connection:
        one = raw_request(CHAT, {"messages": HELLO, "max_tokens": 1000})
        connection.sendall(one + one)
        wait_until(lambda: len(front.open) == 1)
        time.sleep(0.05)
    wait_until(lambda: not front.open, seconds=4.0)
    assert len(front.requests) == 1


def test_leaving_before_the_first_delta(server, front):
    front.script = Script(first_delay=30.0)
    for streaming in (True, False):
        with socket.create_connection(address(server[1])) as connection:
            connection.sendall(raw_request(CHAT, {"messages": HELLO, "stream": streaming}))
            wait_until(lambda: len(front.open) == 1)
        wait_until(lambda: not front.open, seconds=4.0)


def test_disconnect_at_random_bytes(server, front):
    """F30 in small: closed while sending, queued, in the middle of events, after the finish reason, before [DONE]."""
    front.script = Script(delay=0.0005)
    rng = random.Random(7)
    for _ in range(150):
        request = raw_request(
            CHAT, {"messages": HELLO, "max_tokens": 6, "stream": rng.random() < 0.7, "n": rng.choice([1, 2])}
        )
        with socket.create_connection(address(server[1]), timeout=5) as connection:
            if rng.random() < 0.3:
                connection.sendall(request[: rng.randrange(len(request))])
                continue
            connection.sendall(request)
            left = rng.randrange(5000)
            while left > 0 and (data := connection.recv(min(left, 512))):
                left -= len(data)
                if data.endswith(b"0\r\n\r\n") or b'"usage"' in data:
                    break
    wait_until(lambda: not front.open, seconds=6.0)
    with httpx.Client(base_url=server[1]) as client:
        assert client.get("/health").status_code == 200
        assert stream(client)[1][-1] == "data: [DONE]"


def test_f22_a_client_that_never_reads_is_dropped():
    front = FakeFront(Script("word " * 2000), max_model_len=1 << 20)
    with serving(make(front, limits={"write_seconds": 0.3})) as url:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(address(url))
            body = {"messages": HELLO, "max_tokens": 100_000, "stream": True, "logprobs": True, "top_logprobs": 20}
            connection.sendall(raw_request(CHAT, body))
            wait_until(lambda: len(front.open) == 1)
            wait_until(lambda: not front.open, seconds=8.0)
            assert len(front.aborted) == 1


# --- shutdown -------------------------------------------------------------------------------------


def test_drain_lets_running_streams_finish_and_refuses_new_work():
    front = FakeFront(Script(delay=0.05))
    frontend = make(front, drain_timeout=20.0)
    with serving(frontend) as url, httpx.Client(base_url=url, timeout=10) as client:
        with client.stream("POST", CHAT, json={"messages": HELLO, "max_tokens": 12, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            frontend.stop()
            with httpx.Client(base_url=url) as other:
                health = other.get("/health")
                assert (health.status_code, health.json()["status"]) == (503, "draining")
                refused = other.post(CHAT, json={"messages": HELLO})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                assert refused.headers["retry-after"] == "1"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_until(lambda: frontend.url is None)
    assert front.aborted == []


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("drain_timeout", [0.0, 0.3])
def test_what_runs_at_the_limit_gets_an_error(drain_timeout, streaming):
    front = FakeFront(Script(delay=0.02))
    frontend = make(front, drain_timeout=drain_timeout)
    with serving(frontend) as url, httpx.Client(base_url=url, timeout=10) as client:
        import threading

        threading.Timer(0.2, frontend.stop).start()
        started = time.monotonic()
        answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 1500, "stream": streaming})
        assert time.monotonic() - started < 8.0
        if streaming:
            assert answer.status_code == 200
            assert json.loads(answer.text.strip().rsplit("data: ", 1)[1])["error"]["code"] == "shutting_down"
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert len(front.aborted) == 1 and not front.open


SERVER = """
    import asyncio, sys
    from core.pipeline import PipelineDescription
    from core.stages.frontend import FrontendContext
    from core.testing.fake_front import FakeFront, Script
    from plugins.frontends.openai_http import OpenAIHttp

    context = FrontendContext(FakeFront(Script(delay=0.02)), PipelineDescription(()), drain_timeout=float(sys.argv[1]))
    asyncio.run(OpenAIHttp(OpenAIHttp.Settings(port=0), context).run())
"""


@pytest.mark.parametrize(
    ("signal_name", "count", "drain"), [("SIGTERM", 1, 0), ("SIGINT", 1, 0), ("SIGTERM", 2, 60), ("SIGINT", 2, 60)]
)
def test_r8_signals(signal_name, count, drain):
    import signal

    command = [sys.executable, "-c", textwrap.dedent(SERVER), str(drain)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert line.startswith("Nonet serving fake-model on http://127.0.0.1:"), process.stderr.read()
        url = line.split()[-1]
        with httpx.Client(base_url=url, timeout=10) as client:
            with client.stream("POST", CHAT, json={"messages": HELLO, "max_tokens": 1500, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                for _ in range(count):
                    process.send_signal(getattr(signal, signal_name))
                    time.sleep(0.3)
                started = time.monotonic()
                last = [line for line in lines if line][-1]
                assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert process.wait(timeout=10) == 0
        assert time.monotonic() - started < 8.0


def test_port_in_use_is_one_clear_line():
    with serving(make(FakeFront())) as url:
        port = address(url)[1]
        second = OpenAIHttp(OpenAIHttp.Settings(port=port), FrontendContext(FakeFront(), PipelineDescription(())))
        with pytest.raises(ConfigError, match=rf"frontend.port: cannot listen on 127.0.0.1:{port}"), serving(second):
            pass


async def test_cancelling_run_closes_everything():
    import asyncio

    front = FakeFront(Script(delay=0.01))
    frontend = make(front)
    running = asyncio.create_task(frontend.run())
    while frontend.url is None:
        await asyncio.sleep(0.01)
    url = frontend.url
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        call = asyncio.create_task(client.post(CHAT, json={"messages": HELLO, "max_tokens": 1000}))
        while not front.open:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await call).status_code == 503
    assert not front.open and frontend.url is None
    with pytest.raises(OSError):
        socket.create_connection(address(url), timeout=1)
