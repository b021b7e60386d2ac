"""What `load_aware` and `open` have beside the contract of stage 3: their bounds, and their defaults."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import OverloadedError, RequestError
from core.request import EngineRequest, SamplingParams
from core.stages.admission import AdmissionContext, LoadAware, Open
from core.stages.frontend import GenerateRequest, Load
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
