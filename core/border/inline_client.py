"""The engine in a thread of this process, for offline use, tests and one-process serving."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from core.border.step_loop import EngineLoop, StepLoop
from core.border.thread_client import TURN_S, ThreadClient
from core.errors import EngineDeadError, NonetError, described
from core.outputs import StepOutput
from core.request import EngineRequest
from core.wire import Add, FrontMessage, Reply

logger = logging.getLogger(__name__)


class InlineClient(ThreadClient[FrontMessage]):
    """The engine in a thread of this process. An engine whose step raised is dead for good: its state is not known."""

    def __init__(
        self, make_engine: Callable[[], EngineLoop], *, probe_timeout: float = 10.0, close_timeout: float = 2.0
    ) -> None:
        self._make_engine = make_engine
        self._work = threading.Event()
        self._killed = False
        super().__init__(probe_timeout, close_timeout)

    def kill(self) -> None:
        """A step in hand cannot be interrupted in the same process; its result is dropped."""
        self._killed = True
        self._wake()

    def _wake(self) -> None:
        self._work.set()

    def _pack(self, message: FrontMessage) -> FrontMessage:
        return message

    def _pack_add(self, requests: Sequence[EngineRequest]) -> list[FrontMessage]:
        return [Add(requests=list(requests))]

    def _run(self) -> str:
        self._generation = 1
        try:
            engine = self._make_engine()
        except NonetError:
            raise
        except BaseException as error:  # whatever ends this thread is the engine's death
            logger.exception("the engine could not be built")
            raise EngineDeadError(described(error)) from error
        try:
            if not self._closing:
                self._on_ready(engine.info())
                self._turns(StepLoop(engine))
        except BaseException as error:  # whatever ends this thread is the engine's death
            logger.exception("the step loop failed")
            return f"the engine failed: {described(error)}"
        finally:
            engine.close()
        return "the engine client is closed"

    def _turns(self, loop: StepLoop) -> None:
        while not (loop.done or self._killed):
            if not loop.has_work:
                self._work.wait(TURN_S)
            self._work.clear()
            with self._lock:
                messages = list(self._outbox)
                self._outbox.clear()
            for result in loop.turn(messages):
                self._pass_on(result)
            self._seen(time.monotonic())

    def _pass_on(self, result: StepOutput | Reply) -> None:
        """Hand a result over; a front that does not receive holds the engine up here."""
        if isinstance(result, Reply):
            self._on_reply(result)
            return
        while self._inbox.full and not self._killed:
            self._work.wait(TURN_S)
            self._work.clear()
        self._inbox.put(result)
