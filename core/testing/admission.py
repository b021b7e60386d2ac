"""What every admission must do, as tests::

    class TestMine(AdmissionContract):
        component = Mine

Its settings must let a small request in while the server is idle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from core.errors import OverloadedError, RequestError
from core.request import EngineRequest, SamplingParams
from core.stages.admission import Admission, AdmissionContext
from core.stages.frontend import GenerateRequest, Load
from core.stages.renderer import TokenPrompt
from core.testing.clocks import trap_clocks
from core.testing.contract import Contract
from core.testing.engines import fake_spec
from core.testing.fakes import FakeClock

MAX_MODEL_LEN = 256
IDLE = Load(kv_blocks_free=64, kv_blocks_total=64)
LIMIT_FIELD = "max_completion_tokens"  # as the client calls it


def make_call(max_tokens: int | None = 8, **fields: Any) -> GenerateRequest:
    values = {"max_tokens": max_tokens, "max_tokens_param": LIMIT_FIELD, **fields}
    return GenerateRequest("r", TokenPrompt([1]), SamplingParams(), **values)


class AdmissionContract(Contract):
    def make_admission(self, num_kv_slots: int = 0, clock: FakeClock | None = None) -> Admission:
        context = AdmissionContext(fake_spec(max_model_len=MAX_MODEL_LEN), clock or FakeClock(), lambda: num_kv_slots)
        admission: Admission = self.make(context)
        return admission

    def admit(
        self,
        num_prompt: int = 4,
        *,
        call: GenerateRequest | None = None,
        params: SamplingParams | None = None,
        num_kv_slots: int = 0,
        load: Load = IDLE,
    ) -> tuple[EngineRequest, ...]:
        call, params = call or make_call(), params or SamplingParams()
        return self.make_admission(num_kv_slots).admit(call, [7] * num_prompt, params, load)

    def refusal(self, num_prompt: int = 4, **how: Any) -> RequestError:
        """Of a request that is wrong, and not only too much at the moment."""
        with pytest.raises(RequestError) as caught:
            self.admit(num_prompt, **how)
        assert caught.value.status == 400
        return caught.value

    def test_one_request_per_choice_named_after_the_call(self) -> None:
        found = self.admit(params=SamplingParams(n=3))
        assert [request.request_id for request in found] == ["r#0", "r#1", "r#2"]
        assert [request.choice for request in found] == [0, 1, 2]
        assert len({request.seed for request in found}) == 1, "choices differ by `choice`; the seed is the call's"

    def test_what_the_client_and_the_server_said_is_passed_on(self) -> None:
        call = make_call(priority=-3, tenant="t", cache_salt="s")
        params = SamplingParams(temperature=0.3, stop=("x",), logit_bias={5: 1.0}, bad_words_token_ids=((1, 2),))
        (request,) = self.admit(5, call=call, params=params)
        assert request.prompt_token_ids == [7] * 5
        assert (request.priority, request.tenant, request.cache_salt) == (-3, "t", "s")
        assert request.params == msgspec.structs.replace(params, max_tokens=8)

    def test_a_ttl_is_a_deadline(self) -> None:
        """That long after its arrival, for each of its choices, or earlier: an admission may have a limit of its own."""
        admission = self.make_admission(clock=FakeClock(50.0))
        found = admission.admit(make_call(ttl=2.5), [7], SamplingParams(n=2), IDLE)
        assert all(request.deadline is not None and 50.0 < request.deadline <= 52.5 for request in found)
        (free,) = admission.admit(make_call(), [7], SamplingParams(), IDLE)
        assert free.deadline is None or free.deadline > 50.0

    @pytest.mark.parametrize("ttl", [0.0, -1.0, 1e9])
    def test_a_ttl_that_nobody_can_mean_is_refused(self, ttl: float) -> None:
        assert self.refusal(call=make_call(ttl=ttl)).param == "ttl"

    def test_the_clients_seed_is_kept(self) -> None:
        for seed in (0, 1, 2**63 - 1, -5):
            (request,) = self.admit(params=SamplingParams(seed=seed))
            assert request.seed == seed

    def test_a_seed_is_drawn_where_the_client_names_none(self) -> None:
        """Every call its own, within 64 bits: what is sampled follows from it."""
        seeds = [self.admit()[0].seed for _ in range(20)]
        assert all(type(seed) is int and -(2**63) <= seed < 2**63 for seed in seeds), "a seed is left open"
        assert len(set(seeds)) == 20, "calls without a seed share one"

    def test_the_arrival_is_read_from_the_injected_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And nothing in admission sleeps: it runs in the event loop of the front."""
        clock = FakeClock(50.0)
        admission = self.make_admission(clock=clock)
        called = trap_clocks(monkeypatch, type(admission), "sleep")
        (first,) = admission.admit(make_call(), [7], SamplingParams(), IDLE)
        clock.advance(2.0)
        (second,) = admission.admit(make_call(), [7], SamplingParams(), IDLE)
        monkeypatch.undo()
        assert not called, f"admission calls {called[0]}; AdmissionContext.clock is the only clock"
        assert (first.arrival_time, second.arrival_time) == (50.0, 52.0)

    def test_max_tokens_is_the_clients(self) -> None:
        assert self.admit(call=make_call(1))[0].params.max_tokens == 1
        assert self.admit(call=make_call(200))[0].params.max_tokens == 200

    @pytest.mark.parametrize("num_kv_slots", [0, 64, 10_000])
    @pytest.mark.parametrize("num_prompt", [1, 50, MAX_MODEL_LEN - 1])
    def test_without_max_tokens_it_ends_within_context_and_pool(self, num_prompt: int, num_kv_slots: int) -> None:
        room = min(MAX_MODEL_LEN, num_kv_slots or MAX_MODEL_LEN)
        if num_prompt >= room:
            assert self.refusal(num_prompt, call=make_call(None), num_kv_slots=num_kv_slots).param == "prompt"
            return
        (request,) = self.admit(num_prompt, call=make_call(None), num_kv_slots=num_kv_slots)
        assert 1 <= request.params.max_tokens <= room - num_prompt

    @pytest.mark.parametrize(
        ("num_prompt", "max_tokens", "num_kv_slots", "param"),
        [
            (MAX_MODEL_LEN, 1, 0, "prompt"),
            (MAX_MODEL_LEN + 9, 1, 0, "prompt"),
            (MAX_MODEL_LEN - 2, 3, 0, LIMIT_FIELD),
            (64, 1, 64, "prompt"),
            (60, 5, 64, LIMIT_FIELD),
        ],
    )
    def test_what_can_never_fit_is_refused_by_field_and_numbers(
        self, num_prompt: int, max_tokens: int, num_kv_slots: int, param: str
    ) -> None:
        """Context and KV pool bound prompt and output together; a request past them would never end."""
        error = self.refusal(num_prompt, call=make_call(max_tokens), num_kv_slots=num_kv_slots)
        assert (error.param, error.code) == (param, "context_length_exceeded")
        assert str(num_kv_slots or MAX_MODEL_LEN) in error.message and str(num_prompt) in error.message

    def test_what_just_fits_is_admitted(self) -> None:
        assert self.admit(MAX_MODEL_LEN - 3, call=make_call(3))
        assert self.admit(60, call=make_call(4), num_kv_slots=64)

    @pytest.mark.parametrize("max_tokens", [0, -1])
    def test_max_tokens_below_one_is_refused(self, max_tokens: int) -> None:
        assert self.refusal(call=make_call(max_tokens)).param == LIMIT_FIELD

    def test_min_tokens_past_the_clients_own_limit_is_refused(self) -> None:
        error = self.refusal(params=SamplingParams(min_tokens=9))
        assert error.param == "min_tokens" and "9" in error.message and "8" in error.message
        assert self.admit(params=SamplingParams(min_tokens=8))[0].params.min_tokens == 8

    def test_min_tokens_never_passes_max_tokens(self) -> None:
        (request,) = self.admit(MAX_MODEL_LEN - 2, call=make_call(None), params=SamplingParams(min_tokens=9))
        assert request.params.min_tokens <= request.params.max_tokens == 2

    def test_there_is_room_when_the_server_is_idle(self) -> None:
        self.make_admission().check_room(1, IDLE)
        self.make_admission().check_room(2, IDLE)

    def test_too_much_is_answered_with_the_seconds_after_which_to_try_again(self) -> None:
        """An admission without a bound admits; nothing else than the two errors of the contract may come."""
        load = Load(10**6, 10**6, 10**6, 10**9, 0, 64)
        admission = self.make_admission()
        for attempt in (lambda: admission.check_room(1, load), lambda: self.admit(load=load)):
            try:
                attempt()
            except OverloadedError as error:
                assert 0 < error.retry_after < 3600
            except RequestError as error:
                raise AssertionError("a small call is no wrong request because others are many") from error

    def test_the_call_is_left_as_it_is(self) -> None:
        call, ids, params = make_call(cache_salt="s"), [1, 2, 3], SamplingParams(logit_bias={1: 2.0}, n=2)
        kept = (replace(call), list(ids), msgspec.structs.replace(params, logit_bias=dict(params.logit_bias)))
        self.make_admission().admit(call, ids, params, IDLE)
        assert (call, ids, params) == kept
