"""What `load_aware` and `open` have beside the contract of stage 3: their bounds, and their defaults."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from core.errors import OverloadedError, RequestError
from core.request import EngineRequest, SamplingParams
from core.stages.admission import AdmissionContext, Open
from core.stages.frontend import GenerateRequest, Load
from core.stages.load_aware import LoadAware
from core.stages.renderer import TokenPrompt
from core.testing.engines import fake_spec

CONTEXT = AdmissionContext(fake_spec(), lambda: 5.0, lambda: 0)
LIMIT = CONTEXT.model.max_model_len


def admit(
    num_prompt: int = 4,
    *,
    max_tokens: int | None = 8,
    load: Load | None = None,
    n: int = 1,
    min_tokens: int = 0,
    **settings: Any,
) -> tuple[EngineRequest, ...]:
    request = GenerateRequest(
        "r", TokenPrompt([1]), SamplingParams(), max_tokens=max_tokens, max_tokens_param="max_completion_tokens"
    )
    params = SamplingParams(n=n, min_tokens=min_tokens)
    return LoadAware(LoadAware.Settings(**settings), CONTEXT).admit(request, [1] * num_prompt, params, load or Load())


def test_past_a_bound_with_others_is_503_with_the_time_to_come_back() -> None:
    load = Load(in_flight=3, prompt_tokens_in_flight=90)
    with pytest.raises(OverloadedError, match=r"4 > admission.max_in_flight=3\)") as caught:
        admit(load=load, max_in_flight=3, retry_after=2.5)
    assert caught.value.retry_after == 2.5
    with pytest.raises(OverloadedError, match=r"102 > admission.max_prompt_tokens_in_flight=100\)"):
        admit(12, load=load, max_prompt_tokens_in_flight=100)
    assert admit(10, load=load, max_in_flight=4, max_prompt_tokens_in_flight=100)


@pytest.mark.parametrize(
    ("asked", "settings", "param", "key"),
    [
        ({"n": 4}, {"max_in_flight": 3}, "n", "admission.max_in_flight=3"),
        ({"num_prompt": 101}, {"max_prompt_tokens_in_flight": 100}, "prompt", "max_prompt_tokens_in_flight=100"),
        ({"num_prompt": 60, "n": 2}, {"max_prompt_tokens_in_flight": 100}, "n", "max_prompt_tokens_in_flight=100"),
    ],
)
@pytest.mark.parametrize("load", [Load(), Load(in_flight=3, prompt_tokens_in_flight=99)])
def test_what_can_never_be_admitted_is_a_wrong_request(
    load: Load, asked: dict[str, int], settings: dict[str, int], param: str, key: str
) -> None:
    with pytest.raises(RequestError, match=key) as caught:
        admit(load=load, **asked, **settings)
    assert (caught.value.status, caught.value.param) == (400, param)


# --- the queue ---------------------------------------------------------------------------------------------------------


def refused(load: Load, **settings: Any) -> OverloadedError:
    """By `admit`, and where it can be known without the prompt, by `check_room` too."""
    with pytest.raises(OverloadedError) as caught:
        admit(load=load, **settings)
    return caught.value


def has_room(load: Load, n: int = 1, **settings: Any) -> bool:
    try:
        LoadAware(LoadAware.Settings(**settings), CONTEXT).check_room(n, load)
    except OverloadedError:
        return False
    return True


def test_those_who_run_do_not_queue() -> None:
    load = Load(in_flight=70, running=64)
    assert admit(load=load, max_waiting=7) and has_room(load, max_waiting=7)
    assert "7 > admission.max_waiting=6" in str(refused(load, max_waiting=6))
    assert not has_room(load, max_waiting=6)
    assert admit(load=Load(in_flight=3, running=5), max_waiting=1), "ended since the last step"


def test_the_queue_is_bounded_in_prompt_and_expected_output() -> None:
    load = Load(queued_tokens=90, mean_output_tokens=6)
    assert admit(4, max_tokens=500, load=load, max_queued_tokens=100)
    assert "101 > admission.max_queued_tokens=100" in str(
        refused(Load(queued_tokens=91, mean_output_tokens=6), max_queued_tokens=100, max_tokens=500)
    )


BUSY = Load(in_flight=80, running=64, waiting=16, queued_tokens=12_000, queued_prompt_tokens=9_000, tokens_per_s=1000.0)


def test_what_would_wait_for_too_long_is_refused_with_the_time_until_it_would_not() -> None:
    assert BUSY.queueing_s == 12.0
    assert admit(load=BUSY, max_queue_time=12.0) and has_room(BUSY, max_queue_time=12.0)
    assert refused(BUSY, max_queue_time=7.0).retry_after == 5.0
    assert not has_room(BUSY, max_queue_time=7.0)
    assert refused(BUSY, max_queue_time=11.9).retry_after == 1.0, "no less than retry_after"
    assert refused(replace(BUSY, tokens_per_s=10.0), max_queue_time=7.0).retry_after == 60.0, "no more than a minute"
    assert admit(load=BUSY, max_queue_time=None, queue_timeout=None)
    assert not has_room(BUSY), "by default, too"


def test_a_tenant_with_less_than_others_is_refused_later() -> None:
    """A flood of one tenant is not to keep the others out."""
    flooded = replace(BUSY, in_flight=100, num_tenants=4, tenant="light", tenant_in_flight=5)
    assert admit(load=flooded, max_queue_time=7.0) and has_room(flooded, max_queue_time=7.0)
    assert "max_queue_time * 2 is 10 s" in str(refused(flooded, max_queue_time=5.0))
    heavy = replace(flooded, tenant_in_flight=25)
    for other in (heavy, replace(flooded, tenant=""), replace(heavy, num_tenants=1, tenant_in_flight=100)):
        assert not has_room(other, max_queue_time=7.0)


def test_nobody_is_refused_for_a_wait_that_nobody_knows() -> None:
    assert admit(load=replace(BUSY, tokens_per_s=0.0), max_queue_time=0.001)


def test_while_nobody_waits_only_prompts_are_in_the_way() -> None:
    load = replace(BUSY, waiting=0)
    assert admit(load=load, max_queue_time=9.0)
    assert refused(load, max_queue_time=8.0)


def with_ttl(ttl: float | None, load: Load | None = None, **settings: Any) -> EngineRequest:
    request = GenerateRequest("r", TokenPrompt([1]), SamplingParams(), max_tokens=8, ttl=ttl)
    admission = LoadAware(LoadAware.Settings(**settings), CONTEXT)
    (sequence,) = admission.admit(request, [1], SamplingParams(), load or Load())
    return sequence


def test_a_ttl_that_cannot_be_met_is_refused_at_once() -> None:
    assert with_ttl(12.5, BUSY, max_queue_time=None).deadline == 5.0 + 12.5
    with pytest.raises(OverloadedError, match="about 12.0 s, and its ttl is 4 s") as caught:
        with_ttl(4.0, BUSY, max_queue_time=None)
    assert caught.value.retry_after == 8.0


def test_the_deadline_is_the_earlier_of_ttl_and_timeout() -> None:
    assert with_ttl(None).deadline == 65.0
    assert with_ttl(None, queue_timeout=None).deadline is None
    assert with_ttl(3.0, queue_timeout=2.0).deadline == 7.0
    assert with_ttl(3.0, queue_timeout=20.0).deadline == 8.0
    assert with_ttl(3.0, queue_timeout=None).deadline == 8.0


@pytest.mark.parametrize("ttl", [math.nan, math.inf, -math.inf, 0.0, -5.0, 86_401.0, 1e308])
def test_a_ttl_without_sense_is_a_wrong_request(ttl: float) -> None:
    with pytest.raises(RequestError) as caught:
        with_ttl(ttl)
    assert (caught.value.status, caught.value.param) == (400, "ttl")


def test_a_tenant_has_its_own_limits() -> None:
    """F44: who holds all its places leaves those of others alone, and callers without a key share none."""
    own = Load(in_flight=40, tenant="gold", tenant_in_flight=8, tenant_tokens_in_flight=100)
    assert admit(load=own, max_in_flight_per_tenant=9, max_tokens_per_tenant=112)
    assert "9 > admission.max_in_flight_per_tenant=8" in str(refused(own, max_in_flight_per_tenant=8))
    assert not has_room(own, max_in_flight_per_tenant=8)
    assert str(refused(own, max_tokens_per_tenant=111)).startswith("your key is at its limit (112 > ")
    other = replace(own, tenant="iron", tenant_in_flight=0, tenant_tokens_in_flight=0)
    assert admit(load=other, max_in_flight_per_tenant=8, max_tokens_per_tenant=111)
    nobody = replace(other, tenant="")
    assert admit(load=nobody, n=3, max_in_flight_per_tenant=2, max_tokens_per_tenant=5)
    with pytest.raises(RequestError, match="max_in_flight_per_tenant=2"):
        admit(load=other, n=3, max_in_flight_per_tenant=2)


def test_min_tokens_is_cut_to_a_limit_that_nobody_named() -> None:
    assert admit(max_tokens=None, min_tokens=9, default_max_tokens=5)[0].params.min_tokens == 5
    (request,) = admit(LIMIT - 2, max_tokens=None, min_tokens=9)
    assert (request.params.min_tokens, request.params.max_tokens) == (2, 2)


def test_open_has_no_queue_bound() -> None:
    request = GenerateRequest("r", TokenPrompt([1]), SamplingParams())
    load = Load(in_flight=10**6, prompt_tokens_in_flight=10**9)
    assert len(Open(Open.Settings(), CONTEXT).admit(request, [1], SamplingParams(n=3), load)) == 3


def test_room_is_judged_before_anything_is_rendered() -> None:
    admission = LoadAware(LoadAware.Settings(max_in_flight=4), CONTEXT)
    admission.check_room(4, Load())
    with pytest.raises(OverloadedError, match="5 > admission.max_in_flight=4"):
        admission.check_room(2, Load(in_flight=3))
    with pytest.raises(RequestError, match="admission.max_in_flight=4"):
        admission.check_room(5, Load())
    Open(Open.Settings(), CONTEXT).check_room(10_000, Load(in_flight=10_000))
