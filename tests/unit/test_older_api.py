"""A cache and a scheduler of plugin API 1.0, which inherit nothing of ours: they run, and what they cannot say is made up for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from core.batch import SamplerOutput, SchedulerOutput, Verdict
from core.cache.kv_cache import CacheContext
from core.hookspecs import API_VERSION, SINCE, Component, hookimpl
from core.isolation.cache import GuardedCache, takes_discard
from core.isolation.faults import ComponentName, Faults, Names
from core.loading.listing import list_plugin
from core.request import FinishReason, Request, SamplingParams
from core.stages.completion import CompletionContext, Standard
from core.testing.cache import CacheContract
from core.testing.engines import MAX_MODEL_LEN, engine_request, fake_spec, make_engine
from core.testing.fakes import expected_ids
from core.testing.harness.fake_executors import FakeExecutor
from plugins.schedulers.fcfs import Fcfs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data/plugin_wheels/acme-own"))
from acme_own.cache import OwnCache  # noqa: E402
from acme_own.scheduler import OwnScheduler  # noqa: E402

sys.path.pop(0)

NAMES = Names([ComponentName(group, "own", "own, acme-own 0.9") for group in ("cache", "scheduler", "completion")])
SETTINGS = Fcfs.Settings(max_num_scheduled_tokens=64, max_num_running_reqs=8)
VICTIM = "r2"


class TestOwnCache(CacheContract):
    component = OwnCache


class Fails(Standard):
    """Ends one request with an error after two tokens."""

    def __init__(self) -> None:
        super().__init__(Standard.Settings(), CompletionContext(fake_spec()))

    def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Any:
        verdicts = dict(super().judge(output, sampled))
        for part in output.scheduled:
            if part.request.request_id == VICTIM and part.request.num_output_tokens == 2:
                verdicts[VICTIM] = Verdict((), FinishReason.ERROR)
        return verdicts


def own_cache(num_blocks: int) -> OwnCache:
    return OwnCache(OwnCache.Settings(), CacheContext(num_blocks, MAX_MODEL_LEN))


def make_request(name: str, length: int = 64) -> Request:
    return Request(name, list(range(1, length + 1)), SamplingParams())


def own_engine(num_blocks: int, scheduler: Any = OwnScheduler, **parts: Any) -> Any:
    return make_engine(
        scheduler, SETTINGS, FakeExecutor(), num_blocks=num_blocks, faults=Faults(NAMES), budget=64, **parts
    )


def run(engine: Any, sent: list[Any]) -> tuple[dict[str, list[int]], dict[str, str], list[Any]]:
    ids: dict[str, list[int]] = {request.request_id: [] for request in sent}
    errors, incidents = {}, []
    engine.add(sent)
    for _ in range(2000):
        output = engine.step()
        incidents += output.incidents
        for delta in output.deltas:
            ids[delta.request_id] += delta.token_ids
            if delta.finish_reason is FinishReason.ERROR:
                errors[delta.request_id] = delta.error
        if not engine.has_work():
            return ids, errors, incidents
    raise AssertionError("it never ends")


@pytest.mark.parametrize("num_blocks", [14, 60])
def test_both_together_give_the_tokens_of_a_solo_run(num_blocks):
    engine = own_engine(num_blocks, cache=lambda: own_cache(num_blocks), completion=Fails())
    sent = [engine_request(f"r{i}", [*range(20 + i), i], 12 + i) for i in range(8)]
    ids, errors, incidents = run(engine, sent)
    assert (set(errors), incidents) == ({VICTIM}, [])
    for request in sent:
        if request.request_id != VICTIM:
            assert ids[request.request_id] == expected_ids(Request.from_engine_request(request))
    assert engine.step().incidents == []  # idle: the books are checked


def test_what_a_failed_request_wrote_is_not_found_until_the_cache_was_emptied():
    cache = GuardedCache(own_cache(20), Faults(NAMES))
    assert not takes_discard(own_cache(20))
    failed, other = make_request("failed"), make_request("other", 16)
    for request in (failed, other):
        assert cache.lookup(request) == 0 and cache.allocate(request, request.num_tokens)
    request = failed
    request.num_computed_tokens = 64
    cache.commit(failed)
    cache.verdicts = {"failed": Verdict((), FinishReason.ERROR)}
    cache.free(failed)  # without a word of its failure
    probe = make_request("probe")
    assert cache.lookup(probe) == 0 and not probe.block_table and cache.num_free_blocks == 19
    cache.free(other)
    assert cache.lookup(probe) == 0
    assert cache.allocate(probe, 64)
    cache.commit(probe, 64)
    cache.free(probe)
    assert cache.lookup(make_request("again")) == 48
    cache.check()


class WritesByHand(OwnScheduler):
    def update(self, output: SchedulerOutput, verdicts: Any) -> list[Request]:
        for part in output.scheduled:
            part.request.output_token_ids.extend(verdicts[part.request.request_id].token_ids)
        return []


def test_a_scheduler_that_adds_output_by_hand_is_told_what_to_call():
    engine = own_engine(20, WritesByHand)
    _, errors, _ = run(engine, [engine_request("r0", [1, 2, 3], 4)])
    assert errors["r0"].startswith("scheduler=own (plugin own, acme-own 0.9): TypeError: ")
    assert "A scheduler adds output with request.append_output(ids) (plugin API 1.1)" in errors["r0"]


def plugin_of(api: str) -> ModuleType:
    module = ModuleType("acme")

    @hookimpl
    def provide_observers():
        yield Component("a", "acme.a:A", "", requires=("sampler.drafts",))

    @hookimpl
    def provide_samplers():
        yield Component("b", "acme.b:B", "", provides=("drafts",))

    module.provide_observers, module.provide_samplers, module.NONET_API = provide_observers, provide_samplers, api
    return module


def test_what_is_newer_than_a_plugin_says_is_a_warning():
    assert list_plugin(plugin_of("1.0"), "1.0").warnings == (
        "says NONET_API = '1.0' and uses provide_observers, Component.requires, which is newer; write NONET_API = '1.1'",
    )
    assert list_plugin(plugin_of(API_VERSION), API_VERSION).warnings == ()


def test_what_the_table_names_is_there():
    for what in SINCE:
        module, _, name = what.partition(".")
        if module == "Component":
            assert name in Component.__slots__


def test_load_aware_is_found_where_it_was_in_1_1():
    import core.stages.admission as admission
    from core.stages.admission import LoadAware
    from core.stages.load_aware import LoadAware as Moved

    assert LoadAware is Moved and LoadAware.__mro__[0].__module__ == "core.stages.load_aware"
    with pytest.raises(AttributeError, match="'core.stages.admission' has no attribute 'LoadAwar'"):
        admission.LoadAwar  # noqa: B018
    for module in ("admission", "load_aware"):  # whichever comes first in a process
        code = f"import core.stages.{module}; from core.stages.admission import LoadAware, Open"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
