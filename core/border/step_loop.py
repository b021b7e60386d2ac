"""The engine as its loop sees it, and one turn of that loop. The engine process and the in-process client share it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from core.errors import Terminated, described
from core.model.roofline import Roofline
from core.outputs import StepOutput, TokenDelta
from core.request import EngineRequest, FinishReason
from core.wire import Abort, Add, EngineInfo, FrontMessage, MeasureRoofline, Reply, ResetPrefixCache, Shutdown

logger = logging.getLogger(__name__)


class EngineLoop(Protocol):
    """Stages 4 to 9 behind one object; used by one thread only."""

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests. An id that is known already is ignored."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown and ended ids are ignored."""
        ...

    def step(self) -> StepOutput:
        """Run one step. With nothing to do it returns at once, without deltas but with the gauges."""
        ...

    def has_work(self) -> bool: ...

    def reset_prefix_cache(self) -> bool: ...

    def roofline(self) -> Roofline | None:
        """Measured now, which takes seconds; None where the model or its executor tells none."""
        ...

    def info(self) -> EngineInfo: ...

    def close(self) -> None: ...


class StepLoop:
    """Messages in, at most one step, results out. What `EngineLoop.step` raises passes through: it ends the loop."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._stop_at: float | None = None  # monotonic seconds; set by Shutdown
        self._unsettled = True  # the engine has not stepped idle since it last had work
        self.step = 0

    @property
    def has_work(self) -> bool:
        return self._engine.has_work()

    @property
    def done(self) -> bool:
        """A shutdown was asked for, and the work has ended or its time is over."""
        return self._stop_at is not None and (time.monotonic() >= self._stop_at or not self._engine.has_work())

    def turn(self, messages: Sequence[FrontMessage]) -> list[StepOutput | Reply]:
        """One turn. The first one, and one after the last work has ended, step without work: the gauges must be right."""
        results: list[StepOutput | Reply] = []
        for message in messages:
            results += self._apply(message)
        if not self.done and (messages or self._unsettled or self._engine.has_work()):
            self._unsettled = self._engine.has_work()
            results.append(self._engine.step())
            self.step += 1
        return results

    def _apply(self, message: FrontMessage) -> list[StepOutput | Reply]:
        """No message can end the loop: what raises is logged, and answered where someone waits for an answer."""
        try:
            return self._handle(message)
        except Terminated:
            raise
        except BaseException as error:  # a plugin may raise anything
            logger.exception("%s message failed", type(message).__name__)
            if isinstance(message, Add):  # some of it may have been queued
                self._engine.abort([request.request_id for request in message.requests])
            return _answer_failed(message, described(error))

    def _handle(self, message: FrontMessage) -> list[StepOutput | Reply]:
        match message:
            case Add(requests=requests):
                self._engine.add(requests)
            case Abort(request_ids=request_ids):
                self._engine.abort(request_ids)
            case ResetPrefixCache(call_id=call_id):
                return [Reply(call_id=call_id, ok=self._engine.reset_prefix_cache())]
            case MeasureRoofline(call_id=call_id):
                return [Reply(call_id=call_id, ok=True, roofline=self._engine.roofline())]
            case Shutdown(drain_s=drain_s):
                self._stop_at = time.monotonic() + drain_s
            case _:
                logger.warning("%s message ignored: the engine has started", type(message).__name__)
        return []


def _answer_failed(message: FrontMessage, error: str) -> list[StepOutput | Reply]:
    match message:
        case Add(requests=requests):
            return [StepOutput(deltas=[_error_delta(request.request_id, error) for request in requests])]
        case ResetPrefixCache(call_id=call_id) | MeasureRoofline(call_id=call_id):
            return [Reply(call_id=call_id, ok=False)]
    return []


def _error_delta(request_id: str, error: str) -> TokenDelta:
    return TokenDelta(request_id=request_id, finish_reason=FinishReason.ERROR, error=error)
