"""The real server when more is asked of it than it can do: F40 (its books), F41, F44; queue limits, tenants, deadlines.

How fast it refuses, and what is left of its goodput, is measured by `core.lab.overload`: no test here reads a clock.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.testing.harness.http_calls import COMPLETIONS, Outcome, call, completion_body, connected, idle_metrics
from core.testing.harness.ledger import REASONS, Ledger, counters
from core.testing.harness.server import RunningServer, install_plugin, memory_bytes, metric
from core.testing.tiny_models import make_tiny_model

HERE = Path(__file__).parent
PROMPT = "The engine was described as one engine."
KEYS = {"gold": "sk-gold-0123456789", "iron": "sk-iron-9876543210", "tin": "sk-tin-5555555555"}
MAX_RUNNING, MAX_WAITING, MAX_PER_TENANT = 4, 24, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overload")
    make_tiny_model(folder / "tiny", max_position_embeddings=4096)
    (folder / "keys").write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    modules = [HERE / f"chaos_{name}.py" for name in ("plugin", "sampler", "ledger")]
    environ = install_plugin(folder / "site", "chaos", modules)
    values = [
        f"model.source={folder / 'tiny'}",
        "model.dtype=float32",
        "executor.num_threads=1",
        "cache.num_blocks=1024",
        f"scheduler.max_num_running_reqs={MAX_RUNNING}",
        f"admission.max_waiting={MAX_WAITING}",
        f"admission.max_in_flight_per_tenant={MAX_PER_TENANT}",
        "admission.max_queue_time=null",
        f"frontend.api_key_file={folder / 'keys'}",
        "frontend.access_log=true",
        "observers=[prometheus,chaos_ledger,jsonl]",
        f"observers.chaos_ledger.path={folder / 'ledger.jsonl'}",
        f"observers.jsonl.path={folder / 'trace.jsonl'}",
    ]
    with RunningServer(values, environ=environ) as running:
        yield running


@asynccontextmanager
async def tenant(server: RunningServer, name: str) -> AsyncIterator[httpx.AsyncClient]:
    async with connected(server, headers={"Authorization": f"Bearer {KEYS[name]}"}) as client:
        yield client
        await idle_metrics(client)


@pytest.fixture
async def gold(server: RunningServer) -> AsyncIterator[httpx.AsyncClient]:
    async with tenant(server, "gold") as client:
        yield client


@pytest.fixture
async def iron(server: RunningServer) -> AsyncIterator[httpx.AsyncClient]:
    async with tenant(server, "iron") as client:
        yield client


@pytest.fixture
async def tin(server: RunningServer) -> AsyncIterator[httpx.AsyncClient]:
    async with tenant(server, "tin") as client:
        yield client


async def num_503(client: httpx.AsyncClient) -> int:
    return int(metric((await client.get("/metrics")).text, "nonet_http_requests_total", status="503"))


def check_refused(outcome: Outcome) -> None:
    assert outcome.failed and (outcome.status, outcome.code) == (503, "overloaded"), outcome


async def test_f41_a_burst_is_served_as_far_as_the_queue_goes(
    server: RunningServer, folder: Path, gold: httpx.AsyncClient, iron: httpx.AsyncClient, tin: httpx.AsyncClient
) -> None:
    """F40, R10: what is told to clients is what is counted, to the unit. Memory stays."""
    ledger, before = Ledger.open(folder / "ledger.jsonl", await idle_metrics(gold)), await num_503(gold)
    clients = (gold, iron, tin)
    memory, outcomes = [], []
    for number in range(4):
        bodies = [completion_body(f"{PROMPT} {number} {i}", 150, stream=i % 2 == 0) for i in range(150)]
        round_ = await asyncio.gather(*(call(clients[i % 3], body) for i, body in enumerate(bodies)))
        served = sum(outcome.complete for outcome in round_)
        assert served >= MAX_WAITING
        outcomes += round_
        memory.append(memory_bytes(server.pid))
    refused = [outcome for outcome in outcomes if not outcome.complete]
    assert refused
    for outcome in refused:
        check_refused(outcome)
    assert memory[-1] - memory[0] < 16 << 20

    counted = ledger.close(await idle_metrics(gold))
    assert await num_503(gold) - before == len(refused)
    assert {name: counted[name] for name in REASONS if counted[name]} == {"length": len(outcomes) - len(refused)}
    assert counted["generation_tokens"] == sum(len(outcome.token_ids) for outcome in outcomes)
    assert len(ledger.lines) == len(outcomes) - len(refused)


@asynccontextmanager
async def occupied(client: httpx.AsyncClient, count: int) -> AsyncIterator[list[Outcome]]:
    """Streams that run, and those behind them; the client leaves at the end."""
    outcomes = [Outcome() for _ in range(count)]
    body = completion_body(PROMPT, 3500, stream=True)
    tasks = [asyncio.create_task(call(client, body, outcome)) for outcome in outcomes]
    while sum(bool(outcome.token_ids) for outcome in outcomes) < min(count, MAX_RUNNING):
        await asyncio.sleep(0.01)
    try:
        yield outcomes
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_f44_who_takes_all_its_places_leaves_those_of_others(
    gold: httpx.AsyncClient, iron: httpx.AsyncClient
) -> None:
    async with occupied(gold, 60) as outcomes:
        while sum(outcome.status == 503 and bool(outcome.errors) for outcome in outcomes) < 60 - MAX_PER_TENANT:
            await asyncio.sleep(0.01)
        refused = [outcome for outcome in outcomes if outcome.status == 503]
        assert len(refused) == 60 - MAX_PER_TENANT
        assert all("your key" in outcome.errors[0]["message"] for outcome in refused)
        waiting = [asyncio.create_task(call(iron, completion_body(PROMPT, 3))) for _ in range(8)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting), "they have a place in the queue"
    served = await asyncio.gather(*waiting)
    assert all(outcome.complete for outcome in served)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_that_waits_past_its_ttl_is_one_503(
    gold: httpx.AsyncClient, iron: httpx.AsyncClient, stream: bool, n: int
) -> None:
    before, refused = counters((await gold.get("/metrics")).text), await num_503(gold)
    async with occupied(gold, MAX_RUNNING):
        body = completion_body("late", 5, stream=stream, n=n, ttl=0.3)
        answer = await iron.post(COMPLETIONS, json=body)
        patient = asyncio.create_task(call(iron, completion_body("late", 5, ttl=60)))
        await asyncio.sleep(0)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await patient).complete
    after = counters(await idle_metrics(iron))
    assert after["expired"] - before["expired"] == n
    assert after["length"] - before["length"] == 1
    assert await num_503(gold) - refused == 1


async def test_a_key_is_shown_by_its_name_and_never_itself(
    server: RunningServer, folder: Path, gold: httpx.AsyncClient
) -> None:
    assert (await call(gold, completion_body(PROMPT, 2))).complete
    await call(gold, {"prompt": KEYS["gold"], "max_tokens": 0})
    shown = [(await gold.get(path)).text for path in ("/metrics", "/plugins", "/openapi.json")]
    trace = (folder / "trace.jsonl").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = [json.loads(line) for line in trace.splitlines()]
    tenants = Counter(row["tenant"] for row in rows if row["kind"] == "request")
    assert set(tenants) <= set(KEYS) and tenants["gold"]
    for text in (*shown, trace, server.log()):
        assert not any(key in text for key in KEYS.values())
