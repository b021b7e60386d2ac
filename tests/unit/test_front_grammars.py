"""A request's grammar on its way in: compiled once for all who ask, remembered, refused with a reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

import pytest

from core.errors import EngineDeadError, GenerationError, OverloadedError, RequestError
from core.front.grammars import REMEMBER_LOST_S, Grammars
from core.grammar.cache import ENTRY_BYTES
from core.isolation.checks import copied
from core.isolation.incidents import Incidents
from core.metrics import GrammarCosts, Metrics
from core.observers import ObserverContext
from core.outputs import PluginIncident
from core.pipeline import PipelineDescription
from core.request import EngineRequest, GrammarSpec, SamplingParams
from core.stages.frontend import GenerateRequest
from core.testing.engines import fake_spec
from core.testing.harness.fake_grammars import fake_setup
from core.testing.harness.fronts import FrontHarness, request
from core.testing.harness.server import metric
from plugins.schedulers.fcfs import Fcfs

PARAM = "response_format"


class Bench:
    """Grammars over a real process with fake backends."""

    def __init__(self, **limits: Any):
        self.setup = fake_setup(**limits)
        self.incidents = Incidents()
        self.now = 0.0
        self.grammars = Grammars(self.setup, self.incidents, lambda: self.now)
        self.figures = self.setup.figures

    async def compiled(self, text: str, backend: str = "", tenant: str = "") -> GrammarSpec:
        spec = GrammarSpec(kind="regex", source=text, backend=backend)
        return await self.grammars.compiled(spec, PARAM, tenant)

    async def refused(self, text: str, backend: str = "") -> RequestError:
        with pytest.raises(RequestError) as caught:
            await self.compiled(text, backend)
        assert caught.value.param == PARAM
        return caught.value


def no_thread(thread: threading.Thread) -> NoReturn:
    raise RuntimeError("can't start new thread")


@contextmanager
def bench(**limits: Any) -> Iterator[Bench]:
    made = Bench(**{"compile_timeout": 10.0, **limits})
    try:
        yield made
    finally:
        made.grammars.close()


async def test_what_crosses_to_the_engine_has_no_text_of_the_client() -> None:
    with bench() as b:
        found = await b.compiled("some text")
    assert found == GrammarSpec(kind="regex", backend="first", artifact=b"some text")


async def test_a_grammar_is_compiled_once_for_all_who_ask_at_once() -> None:
    with bench() as b:
        found = await asyncio.gather(*(b.compiled("pid") for _ in range(50)))
        assert len({spec.artifact for spec in found}) == 1
        assert sum(b.figures.compiled) == 1 and (b.figures.hits, b.figures.misses) == (49, 1)
        await b.compiled("pid")
        assert sum(b.figures.compiled) == 1 and b.figures.hits == 50


async def test_the_asked_backend_is_the_only_one_asked() -> None:
    with bench() as b:
        assert (await b.compiled("a | b")).backend == "first"
        assert (await b.compiled("a | b", backend="second")).backend == "second"
        assert (await b.compiled("a | b")).backend == "first"
        error = await b.refused("ok | refuse not this", backend="second")
        assert error.message == f"{PARAM}: no grammar backend takes this regular expression: second: not this"


async def test_a_refusal_says_all_reasons_and_is_remembered() -> None:
    with bench() as b:
        error = await b.refused("refuse no a | refuse no b")
        assert error.message == f"{PARAM}: no grammar backend takes this regular expression: first: no a; second: no b"
        assert (error.status, error.code) == (400, "unsupported_grammar")
        again = await b.refused("refuse no a | refuse no b")
        assert again.message == error.message and sum(b.figures.compiled) == 1
        assert b.incidents.latest() == ()


async def test_one_that_takes_too_long_is_remembered_for_a_while() -> None:
    with bench(compile_timeout=0.3) as b:
        error = await b.refused("sleep 60", backend="first")
        assert (error.status, error.code) == (400, "grammar_timeout")
        assert "takes too long" in error.message and "structured_outputs.compile_timeout=0.3" in error.message
        await b.refused("sleep 60", backend="first")
        assert b.figures.lost_processes == 1
        b.now += REMEMBER_LOST_S
        await b.refused("sleep 60", backend="first")
        assert b.figures.lost_processes == 2
        assert b.incidents.latest() == ()  # no plugin's fault


async def test_a_crash_is_a_refusal_that_the_operator_hears_of() -> None:
    with bench() as b:
        error = await b.refused("exit 3", backend="first")
        assert (error.status, error.code) == (400, "grammar_crash") and "exit" not in error.message
        (incident,) = b.incidents.latest()
        assert incident.name == "first" and "ended with exit status 3" in incident.reason
        assert (await b.compiled("ok")).artifact == b"ok"


async def test_a_backend_that_crashes_over_a_grammar_leaves_it_to_the_next() -> None:
    with bench() as b:
        found = await b.compiled("exit 3 | ok")
        assert (found.backend, found.artifact) == ("second", b"exit 3 | ok")
        assert (await b.compiled("exit 3 | ok")).backend == "second"
        assert b.figures.lost_processes == 1 and b.figures.hits == 1
        assert len(b.incidents.latest()) == 1
        assert (await b.refused("exit 3 | refuse no")).code == "unsupported_grammar" and not b.grammars._flights


async def test_a_grammar_has_one_time_however_many_backends_are_lost_over_it() -> None:
    with bench(compile_timeout=5.0) as b:
        asked, submit = list[float | None](), b.setup.compiler.submit

        def counted(spec: GrammarSpec, backends: Any, tenant: str, timeout_s: float | None) -> Any:
            asked.append(timeout_s)
            return submit(spec, backends, tenant, timeout_s)

        b.setup.compiler.submit = counted  # type: ignore[method-assign]
        await b.compiled("exit 3 | ok")
        first, second = asked
        assert first is None and second is not None and 0 < second < 5.0
    with bench(compile_timeout=0.3) as b:
        assert (await b.refused("sleep 60 | ok")).code == "grammar_timeout"
        assert b.figures.lost_processes == 1, "nothing is left for the next one"
        assert b.incidents.latest() == () and not b.grammars._flights


async def test_a_backend_that_raises_is_named_and_switched_off_in_the_end() -> None:
    with bench(quarantine_after=2) as b:
        for number in range(2):
            with pytest.raises(
                GenerationError, match=r"^grammars=first \(plugin fakes, acme 1.0\): ZeroDivisionError: boom"
            ):
                await b.compiled(f"raise boom {number} | refuse no")
        (incident,) = b.incidents.latest()
        assert incident.quarantined and incident.name == "first" and incident.failures == 2
        assert (await b.compiled("exit 3 | ok")).backend == "second"  # the first is not asked any more
        error = await b.refused("ok", backend="first")
        assert (error.status, error.code) == (503, "plugin_quarantined") and "grammars=first" in error.message


async def test_a_built_in_backend_is_never_switched_off() -> None:
    with bench(quarantine_after=float("inf")) as b:
        for number in range(8):
            with pytest.raises(GenerationError):
                await b.compiled(f"raise boom {number}")
        assert not any(incident.quarantined for incident in b.incidents.latest())
        assert (await b.compiled("ok")).backend == "first"


async def test_what_it_raises_is_not_remembered_as_the_grammars_fault() -> None:
    with bench() as b:
        for _ in range(2):
            with pytest.raises(GenerationError):
                await b.compiled("raise boom")
        assert sum(b.figures.compiled) == 2 and b.figures.cached == 0


async def test_a_backend_that_the_engine_switched_off_is_not_asked() -> None:
    """What was compiled by it before is not used any more either."""
    with bench() as b:
        assert (await b.compiled("ok")).backend == "first"
        off = PluginIncident(group="grammars", name="first", plugin="fakes", reason="r", failures=3, quarantined=True)
        b.incidents.take([off])
        assert (await b.compiled("ok")).backend == "second"


async def test_the_cache_stays_within_its_bytes() -> None:
    with bench(cache_memory="1MiB") as b:
        for number in range(40):
            await b.compiled(f"make {100_000 + number}")
        assert b.figures.cached_bytes <= 2**20 and b.figures.cached == 2**20 // (100_039 + ENTRY_BYTES)
        await b.compiled("make 100039")
        assert b.figures.hits == 1
        await b.compiled("make 100000")
        assert b.figures.hits == 1


async def test_the_queue_is_bounded() -> None:
    with bench(max_queued=2, compile_timeout=60) as b:
        held = asyncio.ensure_future(b.compiled("sleep 1"))
        while not b.grammars._flights or not next(iter(b.grammars._flights.values())).answer.running():
            await asyncio.sleep(0.01)
        waiting = [asyncio.ensure_future(b.compiled(f"w{number}")) for number in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="grammars wait to be compiled"):
            await b.compiled("one too many")
        same = asyncio.ensure_future(b.compiled("w0"))  # has its place already
        assert [spec.artifact for spec in await asyncio.gather(held, *waiting, same)] == [b"slept", b"w0", b"w1", b"w0"]


async def test_a_tenant_that_fills_the_queue_makes_room_for_others() -> None:
    with bench(max_queued=3, compile_timeout=60) as b:
        held = asyncio.ensure_future(b.compiled("sleep 1", tenant="greedy"))
        while not b.grammars._flights or not next(iter(b.grammars._flights.values())).answer.running():
            await asyncio.sleep(0.01)
        ends: list[str] = []

        async def ask(text: str, tenant: str) -> None:
            ends.append((await b.compiled(text, tenant=tenant)).artifact.decode())

        asked = [asyncio.ensure_future(ask(f"g{number}", "greedy")) for number in range(3)]
        await asyncio.sleep(0)
        asked.append(asyncio.ensure_future(ask("mine", "modest")))
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in results] == [type(None), type(None), OverloadedError, type(None)]
        assert ends == ["g0", "mine", "g1"] and (await held).artifact == b"slept"


async def test_a_client_that_leaves_takes_its_grammar_out_of_the_queue() -> None:
    with bench(max_queued=1, compile_timeout=60) as b:
        held = asyncio.ensure_future(b.compiled("sleep 1"))
        while not b.grammars._flights or not next(iter(b.grammars._flights.values())).answer.running():
            await asyncio.sleep(0.01)
        two = [asyncio.ensure_future(b.compiled("w")) for _ in range(2)]
        await asyncio.sleep(0)
        two[0].cancel()
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await b.compiled("other")  # somebody still waits for w
        two[1].cancel()
        await asyncio.gather(*two, return_exceptions=True)
        again = asyncio.ensure_future(b.compiled("w"))  # in the same turn as its last client left
        assert (await again).artifact == b"w" and (await held).artifact == b"slept"
        assert not b.grammars._flights


async def test_a_client_that_leaves_while_it_is_compiled_does_not_waste_it() -> None:
    with bench(compile_timeout=60) as b:
        left = asyncio.ensure_future(b.compiled("sleep 0.5"))
        while not b.grammars._flights or not next(iter(b.grammars._flights.values())).answer.running():
            await asyncio.sleep(0.01)
        left.cancel()
        assert (await b.compiled("sleep 0.5")).artifact == b"slept"
        assert sum(b.figures.compiled) == 1


async def test_a_process_that_does_not_start_is_no_clients_fault() -> None:
    with bench(settings="raise no model") as b:
        error = await b.refused("ok")
        assert (error.status, error.code) == (503, "grammar_compiler_failed") and "no model" in error.message


async def test_a_thread_that_does_not_start_is_no_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench() as b, monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        error = await b.refused("ok")
        assert (error.status, error.code) == (503, "grammar_compiler_failed") and not b.grammars._flights
        patched.undo()
        assert (await b.compiled("ok")).artifact == b"ok"


async def test_closing_ends_all_who_wait() -> None:
    with bench(compile_timeout=60) as b:
        calls = [asyncio.ensure_future(b.compiled(text)) for text in ("sleep 60", "a", "b")]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(b.grammars.close)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, EngineDeadError) for end in ends), ends
        with pytest.raises(EngineDeadError):
            await b.compiled("c")


# --- in a front -----------------------------------------------------------------------------------


@asynccontextmanager
async def fronting(**limits: Any) -> AsyncIterator[tuple[FrontHarness, list[EngineRequest]]]:
    """A front, and what it has sent to its engine."""
    setup = fake_setup(**{"compile_timeout": 10.0, **limits})
    async with FrontHarness(Fcfs, grammars=setup) as h:
        sent: list[EngineRequest] = []
        send = h.client.send_add

        def keep(requests: Any) -> None:
            sent.extend(requests)
            send(requests)

        h.client.send_add = keep
        yield h, sent
        await h.assert_whole()


async def test_a_request_gets_its_grammar_before_it_is_admitted() -> None:
    async with fronting() as (h, sent):
        await h.answer(request(grammar=GrammarSpec(kind="regex", source="some text"), n=2, ignore_eos=False))
        wanted = GrammarSpec(kind="regex", backend="first", artifact=b"some text")
        assert [one.params.grammar for one in sent] == [wanted] * 2
        await h.answer(request())
        assert sent[-1].params.grammar is None


async def test_a_refused_grammar_costs_nothing_and_is_counted() -> None:
    async with fronting() as (h, sent):
        for text, code in (("refuse no", "unsupported_grammar"), ("(" * 100, "too_large"), ("exit 1", "grammar_crash")):
            with pytest.raises(RequestError) as caught:
                await h.answer(request(grammar=GrammarSpec(kind="regex", source=text), ignore_eos=False))
            assert (caught.value.code, caught.value.param) == (code, "structured_outputs")
        assert sent == []
        figures = h.front._intake.grammars.figures
        assert dict(figures.refused) == {"unsupported_grammar": 1, "too_large": 1, "grammar_crash": 1}


async def test_what_costs_little_is_refused_before_it_is_compiled_or_rendered() -> None:
    async with fronting() as (h, _):
        fields, rendered = h.front._pipeline.request_fields, list[GenerateRequest]()
        h.front._intake._rendered = rendered.append
        asked = request(grammar=GrammarSpec(kind="regex", source="text"))
        for name in ("check", "check_priority", "check_running"):

            def refuse(*values: object) -> NoReturn:
                raise RequestError("no", param="p")

            setattr(fields, name, refuse)
            with pytest.raises(RequestError):
                await h.answer(asked)
            delattr(fields, name)
        with pytest.raises(RequestError) as caught:
            await h.answer(request(grammar=GrammarSpec(kind="regex", source="(" * 100)))
        assert caught.value.code == "too_large" and rendered == []
        assert h.front._intake.grammars.figures.misses == 0, "a grammar was compiled"
        del h.front._intake._rendered


async def test_a_grammar_is_compiled_beside_the_rendering() -> None:
    """Each waits until the other has begun."""
    async with fronting() as (h, _):
        intake, begun = h.front._intake, threading.Barrier(2, timeout=10)
        rendered, compiled = intake._rendered, intake.grammars.compiled

        async def compiled_beside(*values: Any) -> GrammarSpec:
            await asyncio.to_thread(begun.wait)
            return await compiled(*values)

        def rendered_beside(asked: GenerateRequest) -> Any:
            begun.wait()
            return rendered(asked)

        intake._rendered, intake.grammars.compiled = rendered_beside, compiled_beside
        await h.answer(request(grammar=GrammarSpec(kind="regex", source="text"), ignore_eos=False))


async def test_who_is_refused_by_the_renderer_does_not_wait_for_the_grammar() -> None:
    """Nor the other way round; what is not wanted any more leaves the queue."""
    async with fronting(compile_timeout=60) as (h, sent):
        intake = h.front._intake

        def refuse(asked: GenerateRequest) -> NoReturn:
            raise RequestError("no template", param="messages")

        rendered, intake._rendered = intake._rendered, refuse
        with pytest.raises(RequestError, match="no template"):
            await asyncio.wait_for(h.answer(request(grammar=GrammarSpec(kind="regex", source="sleep 3"))), 2)
        release = threading.Event()
        intake._rendered = lambda asked: (release.wait(10), rendered(asked))[1]
        with pytest.raises(RequestError, match="no grammar backend"):
            await h.answer(request(grammar=GrammarSpec(kind="regex", source="refuse no"), n=2, ignore_eos=False))
        release.set()
        intake._rendered = rendered
        assert sent == [] and not any(flight.num_waiting for flight in intake.grammars._flights.values())


async def test_an_artifact_that_a_client_brings_is_compiled_all_the_same() -> None:
    async with fronting() as (h, sent):
        await h.answer(request(grammar=GrammarSpec(kind="regex", source="text", artifact=b"forged"), ignore_eos=False))
        assert sent[0].params.grammar.artifact == b"text"


async def test_others_go_on_while_a_grammar_is_compiled() -> None:
    async with fronting(compile_timeout=30) as (h, _):
        slow = asyncio.ensure_future(
            h.answer(request("slow", grammar=GrammarSpec(kind="regex", source="sleep 1"), ignore_eos=False))
        )
        await asyncio.sleep(0.05)
        for number in range(3):
            await h.answer(request(f"r{number}"))
        assert not slow.done()
        await slow


async def test_a_front_without_backends_says_so() -> None:
    async with FrontHarness(Fcfs) as h:
        with pytest.raises(RequestError) as caught:
            await h.answer(request(grammar=GrammarSpec(kind="regex", source="a")))
        assert caught.value.code == "unsupported"


# --- in figures -----------------------------------------------------------------------------------


async def test_metrics_show_what_grammars_cost() -> None:
    with bench() as b:
        context = ObserverContext(fake_spec(), PipelineDescription(()), grammars=b.figures)
        metrics = Metrics(Metrics.Settings(), context)
        await asyncio.gather(b.compiled("a"), b.compiled("a"), b.compiled("b"))
        with pytest.raises(RequestError), b.grammars.counting_refusals():
            await b.compiled("refuse no")
        await b.refused("exit 1", backend="first")
        text = metrics.exposition().decode()
    assert metric(text, "nonet_grammar_cache_hits_total") == 1 and metric(text, "nonet_grammar_cache_misses_total") == 4
    assert metric(text, "nonet_grammar_refusals_total", code="unsupported_grammar") == 1
    assert metric(text, "nonet_grammar_compile_seconds_count") == 4
    assert metric(text, "nonet_grammar_compile_seconds_bucket", le="+Inf") == 4
    assert metric(text, "nonet_grammar_compile_seconds_sum") > 0
    assert metric(text, "nonet_grammar_lost_processes_total") == 1
    assert metric(text, "nonet_grammar_compiled_total", backend="first") == 2
    assert (
        metric(text, "nonet_grammar_cache_entries") == 4 and metric(text, "nonet_grammar_cache_bytes") > 4 * ENTRY_BYTES
    )


def test_a_bucket_has_what_is_up_to_its_bound() -> None:
    setup = fake_setup()
    for seconds in (0.001, 0.0011, 9.0):
        setup.figures.note_compiled(seconds)
    (family,) = [found for found in GrammarCosts(setup.figures).collect() if found.type == "histogram"]
    counts = {sample.labels["le"]: sample.value for sample in family.samples if "le" in sample.labels}
    assert (counts["0.001"], counts["0.0025"], counts["5.0"], counts["+Inf"]) == (1, 2, 2, 3)


def test_a_copy_of_params_shares_what_nobody_can_change() -> None:
    """An artifact may have megabytes, and each guard copies the params of each choice."""
    params = SamplingParams(grammar=GrammarSpec(kind="regex", artifact=bytes(1000)), extra={"a": {"b": [1]}})
    copy = copied(params)
    assert copy == params and copy is not params
    assert copy.grammar.artifact is params.grammar.artifact and copy.extra["a"]["b"] is not params.extra["a"]["b"]
