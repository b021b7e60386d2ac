"""The front half of the pipeline: stages 2 and 3 on the way in, 8 and the text side of 9 on the way out.

Every accepted call ends once: with its last delta, or with one exception. It is registered here (output side) and in the
engine (scheduling side); whichever side ends first, both tables are cleaned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from core.client import EngineClient, EngineStatus
from core.errors import EngineDeadError, GenerationError, NonetError, OverloadedError, described
from core.front.calls import Call, Choice
from core.front.intake import Intake
from core.front.load import LoadMeter
from core.front.spans import StageWork
from core.front.texts import Texts
from core.isolation.front import FrontGuards
from core.isolation.incidents import Incidents
from core.isolation.tools import GuardedToolParser
from core.model.roofline import Roofline
from core.outputs import PluginIncident, RequestOutput, StepOutput, StepStats, TokenDelta
from core.pipeline import FrontPipeline
from core.progress import Progress
from core.request import FinishReason
from core.stages.detokenizer import TextDelta
from core.stages.frontend import MAX_RETRY_AFTER_S, Deltas, FrontToolParser, GenerateRequest, Health, Load
from core.stages.reasoning_parser import ReasoningParser
from core.stages.renderer import Prompt, RenderedPrompt, Renderer

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.observers import Observers

log = logging.getLogger("nonet.front")


class Front:
    """`core.stages.frontend.FrontHalf`. Lives on one event loop; only rendering leaves it, for worker threads.

    Its components may be anybody's code: each is called through a guard (`core.isolation.front`), and what one does wrong
    fails the call in hand with its name.
    """

    def __init__(self, pipeline: FrontPipeline, client: EngineClient, clock: Callable[[], float], num_threads: int = 2):
        self._pipeline = pipeline
        self._client = client
        self._clock = clock
        self._incidents = Incidents()
        guards = FrontGuards.of(pipeline.names, pipeline.limits, self._incidents)
        self._meter = LoadMeter()
        self._intake = Intake(pipeline, guards, self._incidents, clock, num_threads, self._meter)
        self._texts = Texts(pipeline.detokenizer, guards.detokenizer)
        self._tool_parser = GuardedToolParser(pipeline.tool_parser, guards.tool_parser)
        self._calls: dict[str, Call] = {}  # by `Call.key`
        self._choices: dict[str, Choice] = {}  # engine request id -> its place in a call
        self._closed: EngineDeadError | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._stats = StepStats()
        self._work = StageWork()
        self._dead: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()

    async def wait_dead(self) -> EngineDeadError:
        """Returns when the engine is gone for good and nothing will start it again."""
        return await asyncio.shield(self._dead)

    @property
    def model(self) -> ModelSpec:
        return self._pipeline.model

    @property
    def renderer(self) -> Renderer:
        return self._pipeline.renderer

    async def start(self, progress: Progress, starting: Awaitable[None] | None = None) -> None:
        """Start the engine and wait until it is ready. Raises its start-up error.

        `starting` is the client's `start` where somebody has called it already.
        """
        self._pipeline.observers.start()
        await (starting or self._client.start(progress))
        self._intake.start()
        info = self._client.info
        self._stats = StepStats(kv_blocks_free=info.num_kv_blocks, kv_blocks_total=info.num_kv_blocks)
        self._observe_step()
        self._receiver = asyncio.create_task(self._receive(), name="front-receiver")

    async def close(self) -> None:
        """End every call with an error, then the engine."""
        self._closed = EngineDeadError("the server is shutting down")
        self._fail_all(self._closed)
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        await self._client.close()
        await self._intake.close()
        await asyncio.to_thread(self._pipeline.observers.close)

    @property
    def observers(self) -> Observers:
        return self._pipeline.observers

    async def flush_observers(self) -> None:
        await self._pipeline.observers.flush()

    @property
    def tool_parser(self) -> FrontToolParser:
        return self._tool_parser

    @property
    def reasoning_parser(self) -> ReasoningParser:
        return self._intake.reasoning_parser

    def incidents(self) -> tuple[PluginIncident, ...]:
        return (*self._incidents.latest(), *self._pipeline.observers.incidents())

    async def render(self, prompt: Prompt) -> RenderedPrompt:
        return await self._intake.render(prompt)

    def generate(self, request: GenerateRequest) -> Answer:
        return Answer(self, request)

    async def generate_many(self, requests: list[GenerateRequest]) -> list[Deltas]:
        calls = await self.enter(requests)
        return [Answer(self, call.request, call) for call in calls]

    async def enter(self, requests: Sequence[GenerateRequest]) -> list[Call]:
        """Stages 2 and 3 for calls that stand or fall together: nothing is registered unless all are."""
        calls = await self._intake.calls(requests, self._work)
        for index, call in enumerate(calls):
            try:
                self._register(call)
            except NonetError:
                for registered in calls[:index]:
                    self.leave(registered)
                raise
        return calls

    def health(self) -> Health:
        health = self._client.health()
        return Health(str(health.status), health.step_age, health.detail)

    def load(self) -> Load:
        return self._meter.load()

    def stats(self) -> StepStats:
        return self._stats

    async def measure_roofline(self) -> Roofline | None:
        """See `core.client.EngineClient`; for when nothing runs."""
        return await self._client.measure_roofline()

    async def reset_prefix_cache(self) -> bool:
        return await self._client.reset_prefix_cache()

    def leave(self, call: Call, error: str | None = None) -> None:
        """End a call from the client's side (closed, disconnected) or after an error: aborts what still runs."""
        if call.key not in self._calls:
            return
        self._abort_open(call)
        call.fail(GenerationError(error)) if error else call.leave()
        reason = FinishReason.ERROR if error else FinishReason.ABORT
        self._observe_request(call, replace_open=reason, error=error)

    def _register(self, call: Call) -> None:
        if self._closed is not None:
            raise self._closed
        self._calls[call.key] = call
        call.note_registered(self._clock())
        try:
            for index, sequence in enumerate(call.sequences):
                choice = Choice(call, index, sequence.request_id, sequence.arrival_time)
                call.choices.append(choice)
                self._choices[sequence.request_id] = choice
                self._meter.add(sequence)
                self._texts.start(sequence)
            self._client.send_add(call.sequences)
        except NonetError:
            self._drop(call, [])
            raise

    async def _receive(self) -> None:
        while not self._dead.done():
            try:
                self._take(await self._client.receive())
            except EngineDeadError as error:
                self._lose_engine(
                    error, for_good=self._client.health().status in (EngineStatus.DEAD, EngineStatus.CLOSED)
                )
            except Exception as error:  # ours, or an observer's: without a receiver every call would wait for ever
                log.exception("the front failed")
                self._lose_engine(EngineDeadError(f"the front failed: {described(error)}"), for_good=True)

    def _lose_engine(self, error: EngineDeadError, *, for_good: bool) -> None:
        self._stats = StepStats(kv_blocks_total=self._stats.kv_blocks_total)
        self._incidents.lose_engine()
        self._observe_step()
        self._fail_all(error)
        if for_good:
            self._closed = error
            self._dead.set_result(error)

    def _take(self, output: StepOutput) -> None:
        started = self._clock()
        self._work.begin(output.stats, started)
        self._incidents.take(output.incidents)
        errored, expired = [], []
        for delta in output.deltas:
            self._note(delta)
            if delta.finish_reason is FinishReason.ERROR:
                errored.append(delta)
            elif delta.finish_reason is FinishReason.EXPIRED:
                expired.append(delta)
        step = self._texts.push(output.deltas)
        for text in step.texts:
            self._deliver(text)
        for request_id, message in step.failed.items():
            self._fail_choice(request_id, message)
        for delta in errored:
            self._fail_choice(delta.request_id, delta.error or "the engine failed this request")
        for delta in expired:
            self._expire_choice(delta.request_id)
        self._stats = msgspec.structs.replace(output.stats, detokenize_s=self._clock() - started)
        self._work.end(self._stats)
        self._observe_step()

    def _note(self, delta: TokenDelta) -> None:
        choice = self._choices.get(delta.request_id)
        if choice is not None:
            choice.note(delta, self._clock())
            if delta.token_ids:
                self._meter.started(delta.request_id)

    def _deliver(self, text: TextDelta) -> None:
        choice = self._choices.get(text.request_id)
        if choice is None:
            return
        choice.deliver(text)
        if text.stop_matched:
            self._client.send_abort([text.request_id])
        if text.finish_reason is not None:
            self._end_choice(choice)

    def _end_choice(self, choice: Choice) -> None:
        self._choices.pop(choice.request_id, None)
        self._meter.ended(choice.request_id, choice.num_tokens)
        self._texts.drop([choice.request_id])
        call = choice.call
        if call.num_open == 0:
            del self._calls[call.key]
            call.finish()
            self._observe_request(call)

    def _fail_choice(self, request_id: str, message: str) -> None:
        """One choice that fails takes its call with it; its siblings are aborted."""
        choice = self._choices.get(request_id)
        if choice is not None:
            self.leave(choice.call, error=message)

    def _expire_choice(self, request_id: str) -> None:
        """Not scheduled before its deadline. However many choices a call has, its client gets one answer: all or none."""
        choice = self._choices.get(request_id)
        if choice is None:
            return
        call = choice.call
        waited = self._clock() - call.arrival
        latest = min((one.deadline for one in call.sequences if one.deadline is not None), default=call.arrival)
        error = OverloadedError(
            f"the request may wait for {latest - call.arrival:.3g} s, and was not scheduled in {waited:.1f} s; try again later",
            retry_after=min(max(self.load().queueing_s, 1.0), MAX_RETRY_AFTER_S),
        )
        self._abort_open(call)
        call.fail(error)
        self._observe_request(call, replace_open=FinishReason.EXPIRED, error=str(error))

    def _fail_all(self, error: EngineDeadError) -> None:
        for call in list(self._calls.values()):
            self._drop(call, [])
            self._observe_request(call, replace_open=FinishReason.ERROR, error=str(error))
            call.fail(error)

    def _abort_open(self, call: Call) -> None:
        self._drop(call, [choice.request_id for choice in call.choices if not choice.ended])

    def _drop(self, call: Call, abort_ids: Sequence[str]) -> None:
        """Remove a call from both tables of this side, and from the engine where it still runs."""
        self._calls.pop(call.key, None)
        ids = [choice.request_id for choice in call.choices]
        for request_id in ids:
            self._choices.pop(request_id, None)
            self._meter.ended(request_id)
        self._texts.drop(ids)
        if abort_ids:
            self._client.send_abort(abort_ids)

    def _observe_step(self) -> None:
        self._meter.step(self._stats)
        self._pipeline.observers.step_finished(self._stats)

    def _observe_request(self, call: Call, replace_open: FinishReason | None = None, error: str | None = None) -> None:
        self._pipeline.observers.request_finished(call.record(self._clock(), replace_open, error))


class Answer:
    """The deltas of one call, as an async iterator. `aclose` may come at any time, also before the first delta."""

    def __init__(self, front: Front, request: GenerateRequest, call: Call | None = None):
        self._front = front
        self._request = request
        self._call = call
        self._closed = False

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._closed:
            raise StopAsyncIteration
        try:
            output = await self._next()
        except BaseException:  # also a cancelled task: nobody will come back for the rest
            await self.aclose()
            raise
        if output is None:
            self._closed = True
            raise StopAsyncIteration
        return output

    async def _next(self) -> RequestOutput | None:
        if self._call is None:
            (self._call,) = await self._front.enter([self._request])
        if self._closed:  # by another task, while this one was being admitted
            self._front.leave(self._call)
        return await self._call.next_output()

    async def aclose(self) -> None:
        self._closed = True
        if self._call is not None:
            self._front.leave(self._call)
