"""A logits processor's class for the parameters of a request: whatever it raises, and however long it takes, is its own."""

from __future__ import annotations

import time
from functools import partial
from typing import ClassVar

import pytest
from pydantic import BaseModel, ConfigDict, model_validator

from core.errors import GenerationError, RequestError
from core.front.request_fields import _check_values
from core.isolation.front import FrontLimits
from core.isolation.incidents import Incidents, _together
from core.outputs import PluginIncident
from core.testing.harness.fronts import AnyFields, FrontHarness, request
from plugins.schedulers.fcfs import Fcfs

WHO = "logits_processors=odd (plugin chaos, acme 1.0)"
PATH = "logits_processors.odd"


class Odd(BaseException):
    pass


class Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    error: ClassVar[BaseException | None] = None
    seconds: ClassVar[float] = 0.0

    @model_validator(mode="after")
    def _odd(self) -> Params:
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return self


class OddFields(AnyFields):
    def check_extra(self, name: str, values: object) -> None:
        _check_values(Params, values, PATH)


Harness = partial(FrontHarness, Fcfs, wrap={"request_fields": lambda _: OddFields()})


def asking(request_id: str = "asking"):
    return request(request_id, extra={"odd": {}})


ERRORS = [KeyError("odd\ud800"), Odd("odd"), SystemExit(9), KeyboardInterrupt("odd"), RecursionError("odd")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_what_it_raises_names_it_and_is_counted(error, monkeypatch):
    monkeypatch.setattr(Params, "error", error)
    async with Harness() as h:
        with pytest.raises(GenerationError) as caught:
            await h.answer(asking())
        assert str(caught.value).startswith(f"{WHO}: {type(error).__name__}")
        (incident,) = h.front.incidents()
        assert (incident.group, incident.name, incident.failures) == ("logits_processors", "odd", 1)
        assert not incident.quarantined
        incident.reason.encode()  # what a JSON answer can hold
        await h.answer(request("mate"))
        assert len(h.front.incidents()) == 1


async def test_a_wrong_value_is_the_clients_fault(monkeypatch):
    monkeypatch.setattr(Params, "error", ValueError("too \x1b odd"))
    async with Harness() as h:
        with pytest.raises(RequestError, match="odd: too \\? odd"):
            await h.answer(asking())
        assert h.front.incidents() == ()


async def test_a_slow_one_is_reported_by_its_own_name(monkeypatch):
    monkeypatch.setattr(Params, "seconds", 0.3)
    async with Harness(limits=FrontLimits(block_timeout=0.05)) as h:
        await h.answer(asking())
        assert [(i.group, i.name) for i in h.front.incidents()] == [("logits_processors", "odd")]
        assert "plugins.block_timeout=0.05" in h.front.incidents()[0].reason


async def test_one_that_never_ends_fails_its_request_by_its_own_name(monkeypatch):
    monkeypatch.setattr(Params, "seconds", 0.6)
    async with Harness(limits=FrontLimits(block_timeout=5, render_timeout=0.1)) as h:
        with pytest.raises(GenerationError) as caught:
            await h.answer(asking())
        assert str(caught.value) == f"{WHO}: no answer within 0.1 s"


def test_numbers_that_json_does_not_have_are_the_clients_fault():
    with pytest.raises(RequestError, match=PATH):
        _check_values(Params, {"x": float("nan")}, PATH)


def test_one_component_has_one_incident():
    def incident(reason: str, failures: int, quarantined: bool = False) -> PluginIncident:
        return PluginIncident(
            group="logits_processors",
            name="odd",
            plugin="odd",
            reason=reason,
            failures=failures,
            quarantined=quarantined,
        )

    assert _together(incident("in the engine", 3, True), incident("here", 2)) == incident("in the engine", 5, True)
    assert _together(incident("in the engine", 3), incident("here", 2)) == incident("here", 5)
    incidents = Incidents()
    incidents.take([incident("in the engine", 3)])
    assert incidents.latest() == (incident("in the engine", 3),)
