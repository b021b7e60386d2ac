"""`admission: load_aware`. What cannot be served in time is refused at once: under overload the queue stays as short as it
may be, and what is accepted is served as well as without (R7)."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from pydantic import Field

from core.errors import OverloadedError, RequestError
from core.request import EngineRequest, SamplingParams
from core.stages.admission import AdmissionContext, Open
from core.stages.frontend import MAX_RETRY_AFTER_S, GenerateRequest, Load

PATIENCE = 2.0  # times max_queue_time, for a tenant that has less in flight than others


@dataclass(frozen=True, slots=True)
class Bound:
    """One of the limits, and how near to it the server is."""

    key: str  # of the settings
    limit: int | None  # None: no limit
    used: int
    wanted: int  # by the call in hand
    param: str  # what a client would have to change where the call alone is past it

    @property
    def too_much_alone(self) -> bool:
        return self.limit is not None and self.wanted > self.limit

    @property
    def too_much_now(self) -> bool:
        return self.limit is not None and self.used + self.wanted > self.limit


class LoadAware:
    """`Open` behind a bounded queue: past a bound the answer is 503 at once, with the seconds after which to try again.

    The bounds are in sequences, in tokens, in what one tenant may have, and in time: a call that would wait for more than
    `max_queue_time`, or than its own `ttl`, is refused while it has cost nothing. How long that is follows from the tokens
    that wait and the throughput of the last seconds (`Load.queueing_s`); while nothing waits, nothing is refused for it.
    A tenant that has less in flight than others is refused at twice that time: a queue that others fill is not its fault.
    A call that is past a bound all by itself could never be admitted, so it is a wrong request.
    """

    class Settings(Open.Settings):
        max_in_flight: int = Field(default=256, ge=1, description="sequences (choices) admitted and not ended")
        max_waiting: int | None = Field(default=None, ge=1, description="of those, sequences that do not run yet")
        max_prompt_tokens_in_flight: int = Field(default=1_000_000, ge=1)
        max_queued_tokens: int | None = Field(
            default=None, ge=1, description="prompt and expected output of sequences without a token yet"
        )
        max_queue_time: float | None = Field(
            default=10.0, gt=0, description="seconds; what is expected to wait for longer is refused; null: no limit"
        )
        queue_timeout: float | None = Field(
            default=60.0, gt=0, description="seconds after which what still waits is ended with 503; null: never"
        )
        max_in_flight_per_tenant: int | None = Field(
            default=None, ge=1, description="sequences of one API key; callers without a key share no limit"
        )
        max_tokens_per_tenant: int | None = Field(
            default=None, ge=1, description="their prompts and expected output, in flight"
        )
        retry_after: float = Field(
            default=1.0, gt=0, le=MAX_RETRY_AFTER_S, description="seconds, the least that refused clients are told"
        )

    def __init__(self, settings: Settings, context: AdmissionContext):
        self._settings = settings
        self._open = Open(settings, context)

    def check_room(self, num_choices: int, load: Load) -> None:
        """Also for a tenant that has all its places taken, and for a queue that is too long for anyone."""
        self._check(self._places(num_choices, load), load)
        self._check_queue(load)

    def admit(
        self, request: GenerateRequest, prompt_token_ids: list[int], params: SamplingParams, load: Load
    ) -> tuple[EngineRequest, ...]:
        admitted = self._open.admit(request, prompt_token_ids, params, load)
        self._check(self._places(len(admitted), load), load)
        self._check(self._tokens(admitted, load), load)
        self._check_queue(load)
        self._check_wait(request.ttl, load, "its ttl")
        return tuple(map(self._with_timeout, admitted))

    def _places(self, wanted: int, load: Load) -> tuple[Bound, ...]:
        """Bounds in sequences."""
        settings = self._settings
        tenant_limit = settings.max_in_flight_per_tenant if load.tenant else None
        return (
            Bound("max_in_flight", settings.max_in_flight, load.in_flight, wanted, "n"),
            Bound("max_waiting", settings.max_waiting, max(load.in_flight - load.running, 0), wanted, "n"),
            Bound("max_in_flight_per_tenant", tenant_limit, load.tenant_in_flight, wanted, "n"),
        )

    def _tokens(self, admitted: tuple[EngineRequest, ...], load: Load) -> tuple[Bound, ...]:
        settings, n, first = self._settings, len(admitted), admitted[0]
        num_prompt = len(first.prompt_token_ids)
        num_tokens = num_prompt + load.expected_output(first.params.max_tokens)
        prompt_limit = settings.max_prompt_tokens_in_flight
        tenant_limit = settings.max_tokens_per_tenant if load.tenant else None

        def bound(key: str, limit: int | None, used: int, each: int) -> Bound:
            return Bound(key, limit, used, n * each, "prompt" if limit and each > limit else "n")

        return (
            bound("max_prompt_tokens_in_flight", prompt_limit, load.prompt_tokens_in_flight, num_prompt),
            bound("max_queued_tokens", settings.max_queued_tokens, load.queued_tokens, num_tokens),
            bound("max_tokens_per_tenant", tenant_limit, load.tenant_tokens_in_flight, num_tokens),
        )

    def _check(self, bounds: tuple[Bound, ...], load: Load) -> None:
        for bound in bounds:
            name = f"admission.{bound.key}={bound.limit}"
            if bound.too_much_alone:
                raise RequestError(
                    f"{bound.param}: the request alone needs {bound.wanted}, and the server never has more than {name}",
                    param=bound.param,
                )
            if bound.too_much_now:
                whose = "your key" if bound.key.endswith("_per_tenant") else "the server"
                raise OverloadedError(
                    f"{whose} is at its limit ({bound.used + bound.wanted} > {name}); try again later",
                    retry_after=self._retry_after(load.queueing_s),
                )

    def _check_queue(self, load: Load) -> None:
        limit = self._settings.max_queue_time
        if limit is not None and load.has_less_than_others:
            limit *= PATIENCE
        self._check_wait(
            limit, load, "admission.max_queue_time" + (f" * {PATIENCE:g}" if load.has_less_than_others else "")
        )

    def _check_wait(self, limit: float | None, load: Load, what: str) -> None:
        wait = load.queueing_s
        if limit is not None and wait > limit:
            raise OverloadedError(
                f"the request would wait for about {wait:.1f} s, and {what} is {limit:g} s; try again later",
                retry_after=self._retry_after(wait - limit),
            )

    def _retry_after(self, seconds: float) -> float:
        return min(max(seconds, self._settings.retry_after), MAX_RETRY_AFTER_S)

    def _with_timeout(self, request: EngineRequest) -> EngineRequest:
        timeout = self._settings.queue_timeout
        if timeout is None:
            return request
        latest = request.arrival_time + timeout
        return msgspec.structs.replace(
            request, deadline=latest if request.deadline is None else min(request.deadline, latest)
        )
