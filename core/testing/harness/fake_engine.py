"""An engine without a model: tokens are a function of the request, and every way to fail can be asked for.

It is an `EngineLoop` for tests of the process border, the clients and the frontends; settings come as JSON.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from core import errors
from core.errors import ConfigError
from core.model.roofline import Roofline
from core.outputs import StepOutput, StepStats, TokenDelta
from core.request import EngineRequest, FinishReason
from core.wire import EngineInfo

VOCAB_SIZE = 997


class FakeSettings(BaseModel):
    """Times in seconds. `die_at`, `raise_at`: the step (from 1) that kills the process, or raises."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_s: float = 0.0
    hold_interpreter: bool = False  # sleep like a native call that never gives the interpreter lock back
    load_s: float = 0.0
    load_steps: int = 2
    fail_start: str = ""  # name of an error class of core.errors, or "exit"
    die_at: int = 0
    raise_at: int = 0
    refuse_add: str = ""  # a request id whose add raises
    tokens_per_step: int = 1
    plugins: list[str] = []


def fake_tokens(request: EngineRequest) -> list[int]:
    """All output tokens of a request: a function of its prompt, seed, choice and max_tokens alone."""
    start = sum(request.prompt_token_ids) + 31 * request.seed + 17 * request.choice
    return [(start + 7 * position * position) % VOCAB_SIZE for position in range(request.params.max_tokens)]


class FakeEngineLoop:
    def __init__(self, settings: FakeSettings) -> None:
        self._settings = settings
        self._requests: dict[str, EngineRequest] = {}
        self._left: dict[str, list[int]] = {}
        self.step_count = 0
        self.closed = False

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            if request.request_id == self._settings.refuse_add:
                raise ValueError(f"request {request.request_id} refused")
            if request.request_id not in self._requests:
                self._requests[request.request_id] = request
                self._left[request.request_id] = fake_tokens(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)

    def step(self) -> StepOutput:
        self.step_count += 1
        if self._requests:
            self._sleep()
        if self.step_count == self._settings.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.step_count == self._settings.raise_at:
            raise RuntimeError("the fake engine was told to raise")
        deltas = [self._advance(request_id) for request_id in list(self._requests)]
        stats = StepStats(step=self.step_count, num_requests=len(deltas), running=len(self._requests))
        return StepOutput(deltas=deltas, stats=stats)

    def has_work(self) -> bool:
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        return not self._requests

    def roofline(self) -> Roofline | None:
        return Roofline(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)

    def info(self) -> EngineInfo:
        return EngineInfo(
            model_name="fake",
            max_model_len=1 << 20,
            num_kv_blocks=64,
            block_size=16,
            dtype="float32",
            device="cpu",
            plugins=self._settings.plugins,
        )

    def close(self) -> None:
        self.closed = True

    def _advance(self, request_id: str) -> TokenDelta:
        left = self._left[request_id]
        tokens, self._left[request_id] = left[: self._settings.tokens_per_step], left[self._settings.tokens_per_step :]
        ended = not self._left[request_id]
        if ended:
            self._forget(request_id)
        return TokenDelta(request_id=request_id, token_ids=tokens, finish_reason=FinishReason.LENGTH if ended else None)

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._left.pop(request_id, None)

    def _sleep(self) -> None:
        if self._settings.hold_interpreter:
            ctypes.PyDLL(None).usleep(int(self._settings.step_s * 1e6))  # PyDLL keeps the interpreter lock
        else:
            time.sleep(self._settings.step_s)


def build(settings_json: str, progress: Callable[[str, int, int], None]) -> FakeEngineLoop:
    """Engine factory, with the signature of `core.assembly.build_engine_from_json`."""
    try:
        settings = FakeSettings.model_validate_json(settings_json)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    for step in range(settings.load_steps):
        time.sleep(settings.load_s / settings.load_steps)
        progress("weights", step + 1, settings.load_steps)
    if settings.fail_start == "exit":
        os._exit(7)
    if settings.fail_start:
        kind: type[Exception] = getattr(errors, settings.fail_start, RuntimeError)
        raise kind(f"the fake engine\ncannot start: {settings.fail_start}")
    return FakeEngineLoop(settings)
