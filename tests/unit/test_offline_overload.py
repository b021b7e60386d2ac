"""`generate input=…` against an admission that turns lines away: they come back, unless they said how long they may wait."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from core.errors import OverloadedError, RequestError
from core.pipeline import PipelineDescription
from core.stages.frontend import FrontendContext
from core.testing.fake_front import FakeFront
from plugins.frontends.offline import Offline


async def answers(tmp_path: Path, front: FakeFront, *lines: dict[str, object]) -> list[dict[str, object]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = Offline.Settings(input=source, output=target, max_tokens=3)
    try:
        await Offline(settings, FrontendContext(front, PipelineDescription(()))).run()
    except RequestError:
        pass
    return [json.loads(line) for line in target.read_text().splitlines()]


async def test_a_line_that_is_turned_away_comes_back(tmp_path: Path) -> None:
    front = FakeFront(refuse=OverloadedError("full", retry_after=0.01))
    asyncio.get_running_loop().call_later(0.1, setattr, front, "refuse", None)
    (row,) = await answers(tmp_path, front, {"prompt": "hello", "priority": -2})
    assert "choices" in row and [request.priority for request in front.requests] == [-2]


@pytest.mark.parametrize("ttl", [0.5, 30])
async def test_one_with_a_ttl_does_not(tmp_path: Path, ttl: float) -> None:
    front = FakeFront(refuse=OverloadedError("full", retry_after=0.01))
    (row,) = await answers(tmp_path, front, {"prompt": "hello", "ttl": ttl})
    assert row["error"] == "full"
    front.refuse = None
    assert "choices" in (await answers(tmp_path, front, {"prompt": "hello", "ttl": ttl}))[0]
    assert front.requests[-1].ttl == ttl
