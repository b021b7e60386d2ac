"""An engine process that is killed while KV is in host memory (F52): calls fail once, and the next engine is whole."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from core.assembly import read_model
from core.client import EngineStatus, ProcessClient
from core.errors import EngineDeadError
from core.outputs import StepStats
from core.request import EngineRequest
from core.session import make_client, open_session
from core.testing.engines import engine_request
from core.testing.tiny_models import make_tiny_model

POOL = ("cache.num_blocks=9", "cache.num_swap_blocks=30", "cache.swap_checksums=true", "scheduler.preemption=swap")


def requests(prefix: str) -> list[EngineRequest]:
    return [
        engine_request(f"{prefix}{i}", [(i * 31 + j) % 300 + 6 for j in range(9 + 6 * i)], max_tokens=50)
        for i in range(6)
    ]


async def answers(client: ProcessClient, sent: list[EngineRequest]) -> tuple[dict[str, list[int]], list[StepStats]]:
    client.send_add(sent)
    found: dict[str, list[int]] = {request.request_id: [] for request in sent}
    ended, steps = set(), []
    while len(ended) < len(sent):
        output = await asyncio.wait_for(client.receive(), 60)
        steps.append(output.stats)
        for delta in output.deltas:
            found[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                ended.add(delta.request_id)
    return found, steps


async def test_an_engine_killed_while_swapping_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    fixed = (f"model.source={folder}", "model.dtype=float32", "executor.num_threads=1", "process.separate=true")
    session = open_session([*fixed, *POOL])
    client = make_client(session, read_model(session.settings))
    assert isinstance(client, ProcessClient)
    await client.start()
    try:
        expected, _ = await answers(client, requests("r"))
        client.send_add(requests("k"))
        while not (await asyncio.wait_for(client.receive(), 60)).stats.swapped:
            pass
        os.kill(client.pid or 0, signal.SIGKILL)
        died = False
        while not died:
            try:
                await asyncio.wait_for(client.receive(), 60)
            except EngineDeadError as error:
                died = "SIGKILL" in str(error)
        deadline = time.monotonic() + 120
        while client.health().status is not EngineStatus.OK:
            assert time.monotonic() < deadline, "no engine took its place"
            await asyncio.sleep(0.05)
        found, steps = await answers(client, requests("r"))
        assert found == expected
        assert sum(stats.num_swapped_in_blocks for stats in steps) > 0
        last = steps[-1]
        assert (last.running, last.waiting, last.swapped) == (0, 0, 0)
        assert last.swap_blocks_free == last.swap_blocks_total == 30
        assert last.kv_blocks_free == last.kv_blocks_total == 9
    finally:
        await client.close()
