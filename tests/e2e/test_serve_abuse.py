"""The real server under clients that leave, lie and overreach: F30, F32, F33; bugs G1-G3, H1, H5, I1-I6, N3.

Every loop is seeded and bounded.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.testing.harness.http_calls import (
    COMPLETIONS,
    Outcome,
    bounded,
    call,
    completion_body,
    connected,
    idle_metrics,
    take_line,
)
from core.testing.harness.ledger import REASONS, Ledger, counters
from core.testing.harness.mutation import mutated
from core.testing.harness.raw_http import exchange, request_bytes, send_part
from core.testing.harness.server import RunningServer, install_plugin, memory_bytes, metric
from core.testing.tiny_models import make_tiny_model

HERE = Path(__file__).parent
CHAT = "/v1/chat/completions"
BODY_LIMIT = 4 << 20
CONTEXT = 4096
VOCABULARY = 330
PROMPT = "The engine was described as one engine."
LONG = completion_body(PROMPT, 4000, stream=True)
# ChatML that refuses what Gemma's template refuses: roles that do not alternate.
TEMPLATE = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and the path of the ledger."""
    folder = tmp_path_factory.mktemp("abuse")
    tiny = make_tiny_model(folder / "tiny", max_position_embeddings=CONTEXT)
    config = json.loads((tiny / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tiny / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}), encoding="utf-8")
    return folder


def overrides(folder: Path) -> list[str]:
    """float32: answers must not depend on batch mates, and bfloat16 kernels keep something for each batch size."""
    return [f"model.source={folder / 'tiny'}", "model.dtype=float32", "executor.num_threads=1", "cache.num_blocks=2048"]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    modules = [HERE / f"chaos_{name}.py" for name in ("plugin", "sampler", "ledger")]
    environ = install_plugin(folder / "site", "chaos", modules)
    values = ["observers=[prometheus,chaos_ledger]", f"observers.chaos_ledger.path={folder / 'ledger.jsonl'}"]
    values += ["admission.default_max_tokens=16", "frontend.limits.body_seconds=2"]
    with RunningServer([*overrides(folder), *values], environ=environ) as running:
        yield running


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[httpx.AsyncClient]:
    """After each test: the engine is the same one, nothing runs, no block is held."""
    engine = server.engine_pid()
    async with connected(server) as client:
        yield client
        await idle_metrics(client)
    assert server.engine_pid() == engine


@asynccontextmanager
async def neighbour(client: httpx.AsyncClient, max_tokens: int = 400) -> AsyncIterator[Outcome]:
    """A greedy stream beside the block; afterwards it must say what it says alone."""
    body = completion_body("A neighbour, undisturbed", max_tokens, stream=True)
    alone = await call(client, body)
    outcome = Outcome()
    task = asyncio.create_task(call(client, body, outcome))
    while not outcome.token_ids:
        await asyncio.sleep(0.005)
    yield outcome
    await asyncio.wait_for(task, 120)
    assert alone.complete and outcome.complete
    assert outcome.token_ids == alone.token_ids


async def refused(client: httpx.AsyncClient, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
    """The error of a body that must be a 400."""
    answer = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, (body, answer.text)
    return error_of(answer.json())


def error_of(body: dict[str, Any]) -> dict[str, Any]:
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


# --- clients that leave ----------------------------------------------------------------------------


async def cut_call(port: int, body: dict[str, Any], rng: random.Random) -> Outcome:
    """A call whose client closes at a random byte, of its request or of the answer."""
    data = request_bytes(COMPLETIONS, json.dumps(body).encode())
    outcome = Outcome()
    if rng.random() < 0.2:
        await send_part(port, data[: rng.randrange(1, len(data))])
        return outcome
    answer = await exchange(port, data, cut_after=rng.randrange(1, 6000))
    for line in answer.data.decode(errors="replace").split("\n")[:-1]:  # the last line may be a part of one
        take_line(outcome, line)
    return outcome


@pytest.mark.slow
async def test_the_ledger_of_300_requests_balances(
    server: RunningServer, client: httpx.AsyncClient, folder: Path
) -> None:
    """F30, C5: concurrency 32, 30 % of the clients close at a random byte."""
    rng = random.Random(30)
    ledger = Ledger.open(folder / "ledger.jsonl", await idle_metrics(client))
    bodies = [completion_body(f"{PROMPT} {rng.random()}", rng.randint(1, 60), stream=True) for _ in range(300)]
    cut = [rng.random() < 0.3 for _ in bodies]
    jobs = [cut_call(server.port, b, rng) if c else call(client, b) for b, c in zip(bodies, cut, strict=True)]
    outcomes: list[Outcome] = await bounded(jobs, 32)
    counted = ledger.close(await idle_metrics(client))

    rows = {line["id"]: line for line in ledger.lines}
    assert len(rows) == len(ledger.lines), "a request ended twice"
    strangers = set(rows) - {outcome.id for outcome in outcomes}
    assert len(strangers) <= sum(c and not o.id for c, o in zip(cut, outcomes, strict=True))
    for outcome, was_cut in zip(outcomes, cut, strict=True):
        if not was_cut:
            assert outcome.complete and outcome.num_done == 1, outcome
        if outcome.id:
            check_row(rows[outcome.id], outcome, was_cut)
    reasons = Counter(reason for line in ledger.lines for reason in line["reasons"])
    assert {name: counted[name] for name in REASONS} == {name: reasons[name] for name in REASONS}
    assert reasons["abort"] > 0 and reasons["error"] == 0
    assert counted["generation_tokens"] == sum(line["completion_tokens"] for line in ledger.lines)
    assert counted["prompt_tokens"] == sum(line["prompt_tokens"] for line in ledger.lines)


def check_row(row: dict[str, Any], outcome: Outcome, was_cut: bool) -> None:
    if not was_cut:
        assert row["reasons"] == outcome.finish_reasons
        assert row["completion_tokens"] == len(outcome.token_ids)
    else:
        assert row["reasons"] in (["abort"], ["length"])
        assert row["completion_tokens"] >= len(outcome.token_ids)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("half", [False, True], ids=["close", "half-close"])
async def test_a_closed_connection_stops_its_generation(
    server: RunningServer, client: httpx.AsyncClient, stream: bool, half: bool
) -> None:
    """I1, R9: closed after it began to run. A half-close counts as leaving too: no answer is read after it."""
    aborted = counters(await idle_metrics(client))["abort"]
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        request_bytes(COMPLETIONS, json.dumps({**LONG, "stream": stream}).encode(), headers={"Connection": ""})
    )
    await until_running(client)
    if half:
        writer.write_eof()
        await asyncio.sleep(0.05)
    writer.close()
    text = await idle_metrics(client, seconds=10)
    assert counters(text)["abort"] == aborted + 1


async def until_running(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while metric((await client.get("/metrics")).text, "nonet_requests_running") == 0:
            await asyncio.sleep(0.01)


async def test_clients_that_leave_at_the_last_moment(server: RunningServer, client: httpx.AsyncClient) -> None:
    """I4: closed between finish_reason and [DONE], where an abort crosses the end; and closed twice."""
    data = request_bytes(COMPLETIONS, json.dumps(completion_body(PROMPT, 3, stream=True)).encode())
    whole = await exchange(server.port, data)
    assert b"[DONE]" in whole.data
    sizes = [len(whole.data) - back for back in range(1, 61)]
    answers = await bounded([exchange(server.port, data, cut_after=size) for size in sizes], 8)
    assert sum(b'"finish_reason":"length"' in answer.data for answer in answers) > 10


@pytest.mark.slow
async def test_blocks_come_back_after_800_requests(client: httpx.AsyncClient) -> None:
    """I2: concurrency 8, then idle; the gauge is back at its start (cached blocks can be evicted)."""
    free = metric(await idle_metrics(client), "nonet_kv_blocks_free")
    bodies = [completion_body(f"{index} {PROMPT}", 1 + index % 8, stream=index % 2 == 0) for index in range(800)]
    outcomes = await bounded([call(client, body) for body in bodies], 8)
    assert all(outcome.complete for outcome in outcomes)
    assert metric(await idle_metrics(client), "nonet_kv_blocks_free") == free


@pytest.mark.slow
async def test_memory_does_not_grow_with_requests(server: RunningServer, client: httpx.AsyncClient) -> None:
    """I6, small: anonymous memory of both processes over 600 unique prompts after 200 to warm up.

    The prompts share their words, of which the tokenizer keeps the last 10,000.
    """
    rng = random.Random(6)
    known = [str(rng.random()) for _ in range(100)]

    async def run(count: int) -> tuple[int, int]:
        texts = [" ".join(rng.choices(known, k=8)) for _ in range(count)]
        bodies = [completion_body(text, 4, stream=index % 2 == 0) for index, text in enumerate(texts)]
        outcomes = await bounded([call(client, body) for body in bodies], 8)
        assert all(outcome.complete for outcome in outcomes)
        return memory_bytes(server.pid), memory_bytes(server.engine_pid())

    first = await run(200)
    last = await run(600)
    grown = [(after - before) / 600 for before, after in zip(first, last, strict=True)]
    assert max(grown) < 4 << 10, f"bytes per request, front and engine: {grown}"


# --- bodies ----------------------------------------------------------------------------------------


def raw_bodies() -> dict[str, tuple[bytes, set[int]]]:
    """F32: name -> the bytes of a request, and the statuses it may get."""

    def post(body: bytes, **options: Any) -> bytes:
        return request_bytes(COMPLETIONS, body, **options)

    good = b'{"prompt":"hello","max_tokens":1}'
    chunked = {"Transfer-Encoding": "chunked"}
    part = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    filler = b'{"max_tokens":1,"prompt":"' + b"a " * (BODY_LIMIT // 2)
    keys = b"{" + b",".join(b'"k%d":1' % index for index in range(250_000)) + b"}"
    return {
        "good": (post(good), {200}),
        "empty": (post(b""), {400}),
        "at the limit": (post(filler[: BODY_LIMIT - 2] + b'"}'), {400}),
        "over the limit": (post(filler[: BODY_LIMIT - 1] + b'"}'), {413}),
        "200 MB declared": (post(good, length=200_000_000), {413}),
        "8 MB in chunks without end": (post(part * 128, length="", headers=chunked), {413}),
        "chunks without end": (post(b"5\r\n{    \r\n", length="", headers=chunked), {408}),
        "bad chunk": (post(b"zz\r\n{}\r\n0\r\n\r\n", length="", headers=chunked), {400}),
        "length and chunks": (post(b"0\r\n\r\n", length=5, headers=chunked), {400}),
        "length too large": (post(good, length=len(good) + 9), {408}),
        "length too small": (post(good, length=len(good) - 3), {400}),
        "length is no number": (post(good, length="ten"), {400}),
        "negative length": (post(good, length=-1), {400}),
        "gzip": (post(b"\x1f\x8b\x08" + bytes(64), headers={"Content-Encoding": "gzip"}), {415}),
        "other type": (post(good, headers={"Content-Type": "text/plain"}), {415}),
        "not UTF-8": (post(b'{"prompt":"\xff\xfe"}'), {400}),
        "byte order mark": (post(b"\xef\xbb\xbf" + good), {400}),
        "NaN": (post(b'{"prompt":"a","temperature":NaN}'), {400}),
        "Infinity": (post(b'{"prompt":"a","temperature":-Infinity}'), {400}),
        "1e999": (post(b'{"prompt":"a","temperature":1e999}'), {400}),
        "nested": (post(b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), {400}),
        "key twice": (post(b'{"prompt":"a","prompt":"b"}'), {400}),
        "many keys": (post(keys), {400}),
        "huge integer": (post(b'{"prompt":"a","seed":' + b"9" * 100_000 + b"}"), {400}),
        "NUL byte": (post(b'{"prompt":"\x00"}'), {400}),
        "NUL escaped": (post(b'{"prompt":"\\u0000","max_tokens":1}'), {200}),
        "half a surrogate": (post(b'{"prompt":"\\ud800"}'), {400}),
        "no object": (post(b"[1]"), {400}),
    }


@pytest.mark.slow
async def test_bodies_that_no_client_sends(server: RunningServer, client: httpx.AsyncClient) -> None:
    """F32, P6: each is answered, in the right shape, and memory stays."""
    cases = raw_bodies()
    await exchange(server.port, cases["at the limit"][0])  # what the first large body costs is kept by the allocator
    before = memory_bytes(server.pid)
    async with neighbour(client, 1000):
        answers = await bounded([exchange(server.port, data) for data, _ in cases.values()], 2)
    told = dict(zip(cases, answers, strict=True))
    wrong = {name: told[name].data[:300] for name, (_, wanted) in cases.items() if told[name].status not in wanted}
    assert not wrong
    assert all(error_of(answer.json()) for answer in answers if answer.status >= 400)
    grown = memory_bytes(server.pid) - before
    assert grown < 32 << 20, f"{grown >> 20} MiB"


@pytest.mark.slow
async def test_1000_mutated_bodies(client: httpx.AsyncClient) -> None:
    """F33: no 5xx, no hang, and every refusal in OpenAI's shape."""
    rng = random.Random(33)
    statuses: Counter[int] = Counter()

    async def send(path: str, data: bytes) -> None:
        answer = await client.post(path, content=data, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (path, data, answer.text)
        if answer.status_code >= 400:
            error_of(answer.json())
        statuses[answer.status_code] += 1

    async with asyncio.timeout(240):
        await bounded([send(*mutated(rng)) for _ in range(1000)], 8)
    assert statuses.total() == 1000 and statuses[200] > 50 and statuses[400] > 300, statuses


async def test_numbers_at_the_edges(client: httpx.AsyncClient) -> None:
    """What float32 makes zero or infinite is refused or harmless. Found: repetition_penalty 5e-324 was a 500."""
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    edges = (5e-324, 1e-46, 1.2e-38, 1e-30, 0.01, 1.0, 2.0, 10.0, 100.0, -0.0, -2.0)
    bodies = [
        completion_body(PROMPT, 3, **{"temperature": temperature, name: edge, "seed": 1})
        for name in names
        for edge in edges
        for temperature in (0, 1e-45, 1.0)
    ]
    bodies += [completion_body(PROMPT, 3, temperature=1.0, logit_bias={"65": edge}, seed=1) for edge in edges]
    outcomes = await bounded([call(client, body) for body in bodies], 8)
    assert {outcome.status for outcome in outcomes} == {200, 400}
    assert all(outcome.complete or outcome.failed for outcome in outcomes)


# --- requests that overreach -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_running", [0, 8])
async def test_a_prompt_that_is_too_long_is_one_error(client: httpx.AsyncClient, num_running: int) -> None:
    """H1, D4: the same code whatever the load, and no stream is opened for it."""
    tasks = [asyncio.create_task(call(client, LONG)) for _ in range(num_running)]
    if tasks:
        await until_running(client)
    for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
        for stream in (False, True):
            error = await refused(client, {"prompt": [65] * length, "max_tokens": 1, "stream": stream})
            assert error["code"] == "context_length_exceeded"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_counts_without_measure(server: RunningServer, client: httpx.AsyncClient) -> None:
    """H5: refused by a bound, before anything is expanded."""
    before = memory_bytes(server.pid)
    async with neighbour(client):
        for body, param in (
            ({"prompt": "a", "n": 10**6}, "n"),
            ({"prompt": "a", "best_of": 10**6}, "best_of"),
            ({"prompt": ["a"] * 10**5}, "prompt"),
            ({"prompt": "a", "logprobs": 10**6}, "logprobs"),
            ({"prompt": "a", "stop": ["a"] * 10**5}, "stop"),
        ):
            assert (await refused(client, body))["param"] == param
    assert memory_bytes(server.pid) - before < 32 << 20


BAD_IDS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"logit_bias": bias}, "logit_bias")
        for bias in ({"191222": -100}, {"-1": 5}, {"abc": 1}, {"5": "nan"}, {"5": 1e9})
    ),
    ({"stop_token_ids": [VOCABULARY + 10], "min_tokens": 5}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": [VOCABULARY + 10]}, "allowed_token_ids"),
    *(({"prompt": ids}, "prompt") for ids in ([VOCABULARY], [-1], [2**31], [2**63], [1.0], [True], [[]])),
]


async def test_token_ids_past_the_vocabulary(client: httpx.AsyncClient) -> None:
    """G1 to G3: each names its parameter; a greedy neighbour does not notice."""
    async with neighbour(client):
        for values, param in BAD_IDS:
            error = await refused(client, {"prompt": "a", "max_tokens": 8, **values})
            assert (error["param"] or "").split("[")[0].split(".")[0] == param, (values, error)


async def test_bad_roles_harm_nobody(client: httpx.AsyncClient) -> None:
    """N3, N4: what the template refuses is a 400 with its words; 20 good chats follow."""

    def user(text: Any, role: str = "user") -> dict[str, Any]:
        return {"role": role, "content": text}

    for messages in ([user("a"), user("b")], [user("a"), user("b", "assistant"), user("c", "system")]):
        error = await refused(client, {"messages": messages}, CHAT)
        assert "must alternate" in error["message"]
    for messages in ([user(None)], [user("a", "narrator")], [user("a", "tool")], [{}], []):
        assert (await refused(client, {"messages": messages}, CHAT))["param"].startswith("messages")
    good = [client.post(CHAT, json={"messages": [user(f"Hello {index}")], "max_tokens": 4}) for index in range(20)]
    async with asyncio.timeout(30):
        assert {answer.status_code for answer in await asyncio.gather(*good)} == {200}
