"""The front half of the pipeline: stages 2 and 3 on the way in, 8 and the text side of 9 on the way out.

Every accepted call ends once: with its last delta, or with one exception. It is registered here (output side) and in the
engine (scheduling side); whichever side ends first, both tables are cleaned.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from core.calls import Call, Choice
from core.client import EngineClient, EngineStatus
from core.errors import EngineDeadError, GenerationError, NonetError
from core.outputs import RequestOutput, RequestRecord, StepOutput, StepStats, TokenDelta
from core.pipeline import FrontPipeline
from core.progress import Progress
from core.request import EngineRequest, FinishReason, SamplingParams
from core.stages.detokenizer import TextDelta
from core.stages.frontend import Deltas, GenerateRequest, Health, Load
from core.stages.renderer import Prompt, RenderedPrompt, Renderer

if TYPE_CHECKING:
    from core.model.spec import ModelSpec

A = TypeVar("A")
T = TypeVar("T")

log = logging.getLogger("nonet.front")


class Front:
    """`core.stages.frontend.FrontHalf`. Lives on one event loop; only rendering leaves it, for worker threads."""

    def __init__(self, pipeline: FrontPipeline, client: EngineClient, clock: Callable[[], float], num_threads: int = 2):
        self._pipeline = pipeline
        self._client = client
        self._clock = clock
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="renderer")
        self._calls: dict[str, Call] = {}  # by `Call.key`
        self._choices: dict[str, Choice] = {}  # engine request id -> its place in a call
        self._serial = itertools.count()
        self._num_rendering = 0  # choices of calls that are not registered yet
        self._closed: EngineDeadError | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._stats = StepStats()
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
        await (starting or self._client.start(progress))
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
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def render(self, prompt: Prompt) -> RenderedPrompt:
        return await self._in_thread(self._pipeline.renderer.render, prompt)

    def generate(self, request: GenerateRequest) -> Answer:
        return Answer(self, request)

    async def generate_many(self, requests: list[GenerateRequest]) -> list[Deltas]:
        calls = await self.enter(requests)
        return [Answer(self, call.request, call) for call in calls]

    async def enter(self, requests: Sequence[GenerateRequest]) -> list[Call]:
        """Stages 2 and 3 for calls that stand or fall together: nothing is registered unless all are."""
        self._pipeline.admission.check_room(sum(request.params.n for request in requests), self.load())
        calls = [await self._prepared(request) for request in requests]
        load = self.load()
        for call in calls:
            started = self._clock()
            request = replace(call.request, request_id=call.key)
            sequences = self._pipeline.admission.admit(request, call.prompt_token_ids, call.params, load)
            call.sequences = _checked(sequences, request)
            call.admit_s = self._clock() - started
            load = _with_call(load, call)
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
        stats = self._stats
        return Load(
            in_flight=len(self._choices) + self._num_rendering,
            running=stats.running,
            waiting=stats.waiting,
            prompt_tokens_in_flight=sum(len(c.prompt_token_ids) * c.num_open for c in self._calls.values()),
            kv_blocks_free=stats.kv_blocks_free,
            kv_blocks_total=stats.kv_blocks_total,
        )

    def stats(self) -> StepStats:
        return self._stats

    async def reset_prefix_cache(self) -> bool:
        return await self._client.reset_prefix_cache()

    def leave(self, call: Call, error: str | None = None) -> None:
        """End a call from the client's side (closed, disconnected) or after an error: aborts what still runs."""
        if call.key not in self._calls:
            return
        open_ids = [choice.request_id for choice in call.choices if not choice.ended]
        self._drop(call, open_ids)
        call.fail(GenerationError(error)) if error else call.leave()
        reason = FinishReason.ERROR if error else FinishReason.ABORT
        self._observe_request(call, replace_open=reason, error=error)

    async def _prepared(self, request: GenerateRequest) -> Call:
        key, arrival = f"{request.request_id}~{next(self._serial)}", self._clock()
        self._num_rendering += request.params.n
        try:
            rendered, params = await self._in_thread(self._rendered, request)
        finally:
            self._num_rendering -= request.params.n
        return Call(key, request, rendered.token_ids, params, arrival, render_s=self._clock() - arrival)

    def _rendered(self, request: GenerateRequest) -> tuple[RenderedPrompt, SamplingParams]:
        renderer = self._pipeline.renderer
        self._pipeline.check_fields(request.params)
        return renderer.render(request.prompt), renderer.prepare(request.params)

    async def _in_thread(self, fn: Callable[[A], T], argument: A) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, fn, argument)

    def _register(self, call: Call) -> None:
        if self._closed is not None:
            raise self._closed
        self._calls[call.key] = call
        for index, sequence in enumerate(call.sequences):
            choice = Choice(call, index, sequence.request_id, sequence.arrival_time)
            call.choices.append(choice)
            self._choices[sequence.request_id] = choice
            self._pipeline.detokenizer.start(sequence)
        try:
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
                self._lose_engine(EngineDeadError(f"the front failed: {type(error).__name__}: {error}"), for_good=True)

    def _lose_engine(self, error: EngineDeadError, *, for_good: bool) -> None:
        self._stats = StepStats(kv_blocks_total=self._stats.kv_blocks_total)
        self._observe_step()
        self._fail_all(error)
        if for_good:
            self._closed = error
            self._dead.set_result(error)

    def _take(self, output: StepOutput) -> None:
        started = self._clock()
        for delta in output.deltas:
            self._note(delta)
        for text in self._texts(output.deltas):
            self._deliver(text)
        self._fail_errored(output.deltas)
        self._stats = msgspec.structs.replace(output.stats, detokenize_s=self._clock() - started)
        self._observe_step()

    def _texts(self, deltas: Sequence[TokenDelta]) -> Sequence[TextDelta]:
        """Stage 8. A detokenizer that raises has lost the text of these sequences, and of no others."""
        try:
            return self._pipeline.detokenizer.push(deltas)
        except Exception as error:  # a plugin may raise anything
            log.exception("the detokenizer failed")
            for delta in deltas:
                self._fail_choice(delta.request_id, f"detokenizer: {type(error).__name__}: {error}")
            return ()

    def _note(self, delta: TokenDelta) -> None:
        choice = self._choices.get(delta.request_id)
        if choice is not None:
            choice.note(delta, self._clock())

    def _deliver(self, text: TextDelta) -> None:
        choice = self._choices.get(text.request_id)
        if choice is None or text.finish_reason is FinishReason.ERROR:
            return
        choice.deliver(text)
        if text.stop_matched:
            self._client.send_abort([text.request_id])
        if text.finish_reason is not None:
            self._end_choice(choice)

    def _end_choice(self, choice: Choice) -> None:
        self._choices.pop(choice.request_id, None)
        self._pipeline.detokenizer.drop([choice.request_id])
        call = choice.call
        if call.num_open == 0:
            del self._calls[call.key]
            call.finish()
            self._observe_request(call)

    def _fail_errored(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                self._fail_choice(delta.request_id, delta.error or "the engine failed this request")

    def _fail_choice(self, request_id: str, message: str) -> None:
        """One choice that fails takes its call with it; its siblings are aborted."""
        choice = self._choices.get(request_id)
        if choice is not None:
            self.leave(choice.call, error=message)

    def _fail_all(self, error: EngineDeadError) -> None:
        for call in list(self._calls.values()):
            self._drop(call, [])
            self._observe_request(call, replace_open=FinishReason.ERROR, error=str(error))
            call.fail(error)

    def _drop(self, call: Call, abort_ids: Sequence[str]) -> None:
        """Remove a call from both tables of this side, and from the engine where it still runs."""
        self._calls.pop(call.key, None)
        ids = [choice.request_id for choice in call.choices]
        for request_id in ids:
            self._choices.pop(request_id, None)
        self._pipeline.detokenizer.drop(ids)
        if abort_ids:
            self._client.send_abort(abort_ids)

    def _observe_step(self) -> None:
        for observer in self._pipeline.step_observers:
            _guarded(observer, self._stats)

    def _observe_request(self, call: Call, replace_open: FinishReason | None = None, error: str | None = None) -> None:
        record = call.record(self._clock(), replace_open, error)
        for observer in self._pipeline.request_observers:
            _guarded(observer, record)


def _guarded(observer: Callable[..., None], record: StepStats | RequestRecord) -> None:
    try:
        observer(record)
    except Exception:  # an observer can never fail a request
        log.exception("observer %r failed", observer)


def _checked(sequences: Sequence[EngineRequest], request: GenerateRequest) -> tuple[EngineRequest, ...]:
    """An admission that makes other sequences than asked for would leave choices without an end."""
    expected = [f"{request.request_id}#{choice}" for choice in range(request.params.n)]
    if [getattr(sequence, "request_id", None) for sequence in sequences or ()] != expected:
        log.error("the admission plugin returned %r for %s", sequences, request.request_id)
        raise GenerationError("the admission plugin did not return one sequence per choice")
    return tuple(sequences)


def _with_call(load: Load, call: Call) -> Load:
    n = len(call.sequences)
    tokens = load.prompt_tokens_in_flight + n * len(call.prompt_token_ids)
    return replace(load, in_flight=load.in_flight + n, prompt_tokens_in_flight=tokens)


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
