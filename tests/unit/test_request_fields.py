"""What a request may ask of the selected sampler and processors, and what it is told otherwise. No model, no torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import BaseModel, ConfigDict

from core.assembly import describe
from core.components import PluginRecord, Provided
from core.config.compose import compose
from core.errors import PluginError, RequestError
from core.front.request_fields import RequestFields, _check_values, params_class
from core.hookspecs import API_VERSION, Component
from core.outputs import PluginIncident
from core.plugins import Plugins, load_plugins
from core.request import SamplingParams
from core.settings import Settings
from core.testing.harness.fronts import FrontHarness, ids_of, request
from plugins.schedulers.fcfs import Fcfs

PLUGINS = load_plugins()
ACME = PluginRecord("acme", "acme-wheel", "1.0", "loaded")


def fields_of(*overrides: str, plugins: Plugins = PLUGINS) -> RequestFields:
    return RequestFields(describe(Settings.from_config(compose(list(overrides), PLUGINS).values), PLUGINS), plugins)


def check(fields: RequestFields, params: SamplingParams) -> None:
    """As the front does."""
    for name, values in params.extra.items():
        fields.processor(name)
        fields.check_extra(name, values)
    fields.check(params)


def refused(fields: RequestFields, **values: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check(fields, SamplingParams(**values))
    assert caught.value.status == 400
    return caught.value


def with_sampler(fields: RequestFields, *provides: str) -> RequestFields:
    """The same beside a stranger's sampler."""
    component = Component("mine", "acme.mine:Mine", "a sampler", provides=provides)
    fields._sampler = Provided("sampler", component, ACME)
    fields._runs_processors = "logits_processors" in provides
    return fields


def test_the_default_honours_every_field_of_a_request():
    fields_of().check(SamplingParams(min_tokens=3, top_p=0.5, logprobs=2, repetition_penalty=1.1))


def test_a_field_without_its_processor_names_it():
    error = refused(fields_of("logits_processors=[]"), min_tokens=3)
    assert error.message == (
        "min_tokens is not supported by sampler=standard; serve with +logits_processors=[min_tokens] for it"
    )
    assert (error.param, error.code) == ("min_tokens", "unsupported")


def test_greedy_runs_the_processors_as_well():
    fields = fields_of("sampler=greedy", "+logits_processors=[dry]")
    check(fields, SamplingParams(temperature=0.0, min_tokens=3, extra={"dry": {}}))
    assert "serve with sampler=standard for it" in refused(fields, temperature=0.7).message


def test_a_sampler_that_runs_no_processors_is_not_silent_about_it():
    fields = with_sampler(fields_of("+logits_processors=[dry]"), "temperature")
    assert "sampler=mine; serve with sampler=greedy or sampler=standard for it" in refused(fields, min_tokens=3).message
    error = refused(fields, extra={"dry": {}})
    assert (error.param, error.code) == ("logits_processors.dry", "unsupported")
    assert "sampler=mine runs no logits processors; serve with sampler=greedy or sampler=standard" in error.message
    fields = with_sampler(fields_of("logits_processors=[]"), "temperature")
    assert "sampler=greedy +logits_processors=[min_tokens]" in refused(fields, min_tokens=3).message
    with_sampler(fields_of(), "min_tokens").check(SamplingParams(min_tokens=3))  # one that honours it by itself


def refused_priority(fields: RequestFields, priority: int) -> RequestError:
    with pytest.raises(RequestError) as caught:
        fields.check_priority(priority)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "priority", "unsupported")
    return caught.value


@pytest.mark.parametrize("scheduler", ["fcfs", "slo", "srtf", "fair", "time_slice", "prefix_aware", "static"])
def test_a_priority_that_nobody_looks_at_is_refused(scheduler):
    fields = fields_of(f"scheduler={scheduler}")
    fields.check_priority(0)
    for priority in (-1, 3):
        assert refused_priority(fields, priority).message == (
            f"priority is not supported by scheduler={scheduler}; serve with scheduler=priority for it"
        )


def test_the_priority_scheduler_takes_any():
    fields = fields_of("scheduler=priority")
    for priority in (-5, 0, 7):
        fields.check_priority(priority)


async def test_the_front_asks_before_it_renders():
    async with FrontHarness(Fcfs, wrap={"request_fields": lambda _: fields_of()}) as h:
        with pytest.raises(RequestError, match="scheduler=fcfs; serve with scheduler=priority"):
            await h.front.generate_many([replace(request("a"), priority=2)])
        assert len(ids_of([output async for output in h.front.generate(request("b"))])) == 8


def test_a_scheduler_from_before_the_word_is_given_every_priority():
    fields = fields_of()
    component = Component("mine", "acme.mine:Mine", "a scheduler", provides=("drafts",))
    for api in ("1.0", "1.1"):
        fields._scheduler = Provided("scheduler", component, replace(ACME, api=api))
        fields.check_priority(3)
    fields._scheduler = Provided("scheduler", component, replace(ACME, api=API_VERSION))
    assert "scheduler=mine; serve with scheduler=priority" in refused_priority(fields, 3).message
    fields._scheduler = Provided(
        "scheduler", replace(component, provides=("priority",)), replace(ACME, api=API_VERSION)
    )
    fields.check_priority(3)


class Needs(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    penalty: float
    window: int = 3


def test_a_misspelt_parameter_is_told_before_the_one_that_is_missed():
    with pytest.raises(RequestError, match="there is no such parameter; did you mean penalty") as caught:
        _check_values(Needs, {"penlty": 1.0}, "logits_processors.mine")
    assert (caught.value.param, caught.value.code) == ("logits_processors.mine.penlty", "unknown_field")
    with pytest.raises(RequestError) as caught:
        _check_values(Needs, {}, "logits_processors.mine")
    assert (caught.value.param, caught.value.code) == ("logits_processors.mine.penalty", "missing_field")


@pytest.mark.parametrize(
    ("extra", "param", "expected"),
    [
        ({"watermark": {}}, "logits_processors.watermark", "+logits_processors=[watermark]"),
        ({"wartermark": {}}, "logits_processors.wartermark", "did you mean watermark"),
        ({"dry": {"bse": 1}}, "logits_processors.dry.bse", "did you mean base"),
        ({"dry": {"base": 11}}, "logits_processors.dry.base", "less than or equal to 10"),
        ({"dry": {"base": float("nan")}}, "logits_processors.dry", ""),
        ({"dry": {"sequence_breakers": ["\ud800"]}}, "logits_processors.dry", ""),
        ({"dry": {"last_n": 1 << 64}}, "logits_processors.dry", ""),
        ({"dry": {"last_n": {1, 2}}}, "logits_processors.dry", "not JSON"),
        ({"dry": [1]}, "logits_processors.dry", "an object"),
        ({"dry": {"x": "a" * 70_000}}, "logits_processors.dry", "65536 is the limit"),
        ({"d\nry": {}}, "logits_processors.d?ry", ""),
    ],
)
def test_parameters_are_checked_by_their_class(extra, param, expected):
    error = refused(fields_of("+logits_processors=[dry]"), extra=extra)
    assert error.param == param and expected in error.message
    assert "\n" not in error.message and len(error.message) < 300


def incident(**changes: object) -> PluginIncident:
    values = {
        "group": "logits_processors",
        "name": "min_tokens",
        "plugin": "p",
        "reason": "secret",
        "quarantined": True,
    }
    return PluginIncident(**{**values, "failures": 3, **changes})


def test_who_asks_for_a_processor_that_is_switched_off_is_sent_elsewhere():
    fields = fields_of("+logits_processors=[dry]")
    with pytest.raises(RequestError, match="logits_processors=min_tokens was switched off after 3 failures") as caught:
        fields.check_running(SamplingParams(min_tokens=3), [incident()])
    assert (caught.value.status, caught.value.code, caught.value.param) == (503, "plugin_quarantined", "min_tokens")
    assert "secret" not in caught.value.message
    with pytest.raises(RequestError) as caught:
        fields.check_running(SamplingParams(extra={"dry": {}}), [incident(name="dry")])
    assert caught.value.param == "logits_processors.dry"
    fields.check_running(SamplingParams(), [incident(), incident(name="dry")])
    fields.check_running(SamplingParams(min_tokens=3), [incident(quarantined=False), incident(group="observers")])


@pytest.mark.parametrize(
    "path", ["core.settings:DRAFT", "core.settings:MODEL_KEYS", "core.client:EngineStatus", "pydantic:BaseModel"]
)
def test_a_params_class_that_cannot_check_is_refused_before_the_start(path):
    provided = Provided("logits_processors", Component("x", "acme:X", "", params=path), ACME)
    with pytest.raises(PluginError, match=r"logits_processors=x \(plugin acme, acme-wheel 1.0\)"):
        params_class(provided)
