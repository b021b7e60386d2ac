"""The chain: who is shown which rows, what is kept, and what becomes of a processor that fails."""

from __future__ import annotations

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from core.errors import PluginError
from core.isolation.faults import ComponentName
from core.logits.chain import ProcessorChain
from core.logits.rows import Member
from core.request import SamplingParams
from core.stages.logits_processor import GROUP
from core.testing.sampler import make_logits, make_row

V = 40
WHO = "logits_processors={} (plugin acme, acme-wheel 1.0)"


class Size(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int = 1


class Spy:
    """Adds 1 to column 0 of its rows; notes what it was shown."""

    def __init__(self, concerned=None, fault=None):
        self.concerned, self.fault = concerned, fault
        self.asked, self.shown = [], []

    def state(self, row, params):
        self.asked.append((row.request_id, params))
        return {"id": row.request_id} if self.concerned is None or row.request_id in self.concerned else None

    def apply(self, logits, rows, states):
        self.shown.append([row.request_id for row in rows])
        assert [state["id"] for state in states] == self.shown[-1]
        logits[:, 0] += 1.0
        return self.fault(logits, rows) if self.fault else None


def member(processor, name="spy", params=None, provides=()):
    return Member(ComponentName(GROUP, name, "acme, acme-wheel 1.0"), processor, params, provides)


def rows_of(*names, params=None, position=4):
    return tuple(make_row(name, params or SamplingParams(), position=position) for name in names)


def run(chain, rows, logits=None):
    logits = make_logits(len(rows), V) if logits is None else logits
    chain.apply(logits, rows)
    return logits


@pytest.mark.parametrize("concerned", [{"a", "b", "c", "d"}, {"b", "c"}, {"a", "d"}, {"c"}, set()])
def test_a_processor_is_shown_its_rows_alone(concerned):
    spy = Spy(concerned)
    chain = ProcessorChain([member(spy)])
    rows, before = rows_of("a", "b", "c", "d"), make_logits(4, V)
    logits = run(chain, rows, before.clone())
    wanted = [index for index, name in enumerate("abcd") if name in concerned]
    assert list(chain.touches(rows)) == wanted
    assert spy.shown == ([[name for name in "abcd" if name in concerned]] if concerned else [])
    for index in range(4):
        assert torch.equal(logits[index, 1:], before[index, 1:])
        assert logits[index, 0] == before[index, 0] + (index in wanted)


def test_all_rows_are_the_matrix_itself_and_others_no_way_to_a_neighbour():
    seen = []
    chain = ProcessorChain([member(Spy(fault=lambda logits, rows: seen.append(logits)))])
    logits = run(chain, rows_of("a", "b"))
    assert seen[0] is logits
    part = ProcessorChain([member(Spy({"a", "c"}, fault=lambda logits, rows: seen.append(logits)))])
    logits = run(part, rows_of("a", "b", "c"))
    assert seen[1].shape == (2, V) and seen[1].untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()


def test_processors_run_in_order_and_share_one_copy():
    order = []

    def note(name):
        return lambda logits, rows: order.append((name, float(logits[0, 0]), logits.data_ptr()))

    members = [member(Spy({"a", "c"}, note(name)), name) for name in ("one", "two", "three")]
    before = make_logits(3, V)
    logits = run(ProcessorChain(members), rows_of("a", "b", "c"), before.clone())
    assert [name for name, _, _ in order] == ["one", "two", "three"]
    assert len({pointer for _, _, pointer in order}) == 1
    assert torch.allclose(logits[:, 0] - before[:, 0], torch.tensor([3.0, 0.0, 3.0]))


def test_states_are_asked_for_once_and_dropped_when_forgotten():
    spy = Spy({"a"})
    chain = ProcessorChain([member(spy)])
    for names in (("a", "b"), ("b", "a"), ("a",), ("a", "b", "c")):
        run(chain, rows_of(*names))
    assert [name for name, _ in spy.asked] == ["a", "b", "c"]
    chain.forget(["a", "unknown"])
    run(chain, rows_of("a", "b", "c"))
    assert [name for name, _ in spy.asked] == ["a", "b", "c", "a"]
    chain.forget(["a", "b", "c"])
    assert not chain._members[0].states


def test_parameters_are_parsed_for_the_request_that_sent_them():
    spy = Spy()
    chain = ProcessorChain([member(spy, "dry", Size)])
    asking = make_row("a", SamplingParams(extra={"dry": {"size": 3}, "other": {}}))
    run(chain, (asking, make_row("b")))
    assert spy.asked == [("a", Size(size=3)), ("b", None)]


def test_several_rows_of_a_request_share_its_state():
    spy = Spy({"a"})
    chain = ProcessorChain([member(spy)])
    rows = (make_row("a"), make_row("a", draft_token_ids=(7,)), make_row("b"))
    run(chain, rows)
    assert spy.shown == [["a", "a"]] and [name for name, _ in spy.asked] == ["a", "b"]


def test_a_finished_request_is_not_shown_again_until_it_is_forgotten():
    spy = Spy(fault=lambda logits, rows: [i for i, row in enumerate(rows) if row.request_id == "b"])
    chain = ProcessorChain([member(spy)])
    for _ in range(2):
        run(chain, rows_of("a", "b"))
    run(chain, (make_row("c", draft_token_ids=()), make_row("c", draft_token_ids=(1,))))
    assert spy.shown == [["a", "b"], ["a"], ["c", "c"]]
    chain.forget(["b"])
    run(chain, rows_of("b"))
    assert spy.shown[-1] == ["b"]


def test_a_row_behind_a_draft_finishes_nothing():
    spy = Spy(fault=lambda logits, rows: [1])
    chain = ProcessorChain([member(spy)])
    for _ in range(2):
        run(chain, (make_row("a"), make_row("a", draft_token_ids=(7,))))
    assert spy.shown == [["a", "a"], ["a", "a"]]


def raises(logits, rows):
    raise ValueError("boom")


def nan_for(name):
    def fault(logits, rows):
        for index, row in enumerate(rows):
            if row.request_id == name:
                logits[index, 3] = float("nan")

    return fault


def only(effect):
    def fault(logits, rows):
        effect(logits)

    return fault


FAULTS = {
    "raises": (raises, "ValueError: boom"),
    "exits": (lambda logits, rows: exit(3), "SystemExit: 3"),
    "resizes": (only(lambda logits: logits.resize_(len(logits), V - 1)), "another shape"),
    "returns logits": (lambda logits, rows: logits * 2.0, "returned Tensor"),
    "returns rows past the end": (lambda logits, rows: [9], "row indices"),
    "NaN": (only(lambda logits: logits.fill_(float("nan"))), "NaN"),
    "inf": (only(lambda logits: logits.fill_(float("inf"))), r"\+inf"),
    "masks all": (only(lambda logits: logits.fill_(float("-inf"))), "-inf"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_alone_is_the_requests_own_and_names_the_processor(name):
    fault, reason = FAULTS[name]
    chain = ProcessorChain([member(Spy()), member(Spy(fault=fault), "bad"), member(Spy(), "after")])
    with pytest.raises(PluginError, match=rf"logits_processors=bad \(plugin acme, acme-wheel 1.0\): .*{reason}"):
        run(chain, rows_of("a"))
    (incident,) = chain.incidents()
    assert (incident.group, incident.name, incident.plugin) == ("logits_processors", "bad", "acme, acme-wheel 1.0")
    assert (incident.failures, incident.quarantined) == (1, False)
    assert not chain.incidents()


def test_a_model_that_fails_is_not_the_processors_fault():
    chain = ProcessorChain([member(Spy())])
    logits = make_logits(1, V)
    logits[0, 5] = float("nan")
    run(chain, rows_of("a"), logits)
    assert not chain.incidents()


def test_a_failure_is_counted_once_per_request_and_not_in_the_shared_step():
    fault = lambda logits, rows: raises(logits, rows) if any(row.request_id == "b" for row in rows) else None  # noqa: E731
    chain = ProcessorChain([member(Spy(fault=fault))])
    for _ in range(3):  # the engine's way: together, then each alone
        with pytest.raises(PluginError):
            run(chain, rows_of("a", "b", "c"))
        for name in "abc":
            try:
                run(chain, rows_of(name))
            except PluginError:
                assert name == "b"
    (incident,) = chain.incidents()
    assert incident.failures == 1
    chain.forget(["b"])
    with pytest.raises(PluginError):
        run(chain, rows_of("b"))
    assert chain.incidents()[0].failures == 2


def test_a_failure_that_only_shared_steps_have_counts_as_well():
    fault = lambda logits, rows: raises(logits, rows) if len(rows) > 1 else None  # noqa: E731
    chain = ProcessorChain([member(Spy(fault=fault))], quarantine_after=2)
    for _ in range(2):
        with pytest.raises(PluginError):
            run(chain, rows_of("a", "b"))
        run(chain, rows_of("a"))
        run(chain, rows_of("b"))
    run(chain, rows_of("a", "b"))  # the second failure is seen here: switched off
    assert [incident.quarantined for incident in chain.incidents()] == [False, True]


def test_after_so_many_failures_only_those_who_asked_are_refused():
    fault = lambda logits, rows: raises(logits, rows) if rows[0].request_id.startswith("bad") else None  # noqa: E731
    spy = Spy(fault=fault)
    chain = ProcessorChain([member(spy, "dry", Size, ("min_tokens",))], quarantine_after=2)
    for name in ("bad1", "bad2"):
        with pytest.raises(PluginError, match="boom"):
            run(chain, rows_of(name))
    last = chain.incidents()[-1]
    assert (last.failures, last.quarantined) == (2, True)
    shown, before = len(spy.shown), make_logits(2, V)
    rows = rows_of("bad3", "good")  # by the operator's default: they go on without it
    assert torch.equal(run(chain, rows, before.clone()), before)
    assert not chain.touches(rows) and len(spy.shown) == shown
    for asking in (SamplingParams(extra={"dry": {}}), SamplingParams(min_tokens=5)):
        with pytest.raises(PluginError, match=r"logits_processors=dry \(.*switched off after 2 failures"):
            run(chain, rows_of("x", params=asking))
    assert not chain.incidents()


def test_blame_isolates_and_counts_the_one_suspect_once_it_is_alone():
    one = ProcessorChain([member(Spy({"a"}, nan_for("a")))])
    rows = rows_of("a", "b")
    run(one, rows)
    assert one.blame(rows[1]) == ""
    with pytest.raises(PluginError, match="=spy"):  # another request's share of the step may have spoilt the row
        one.blame(rows[0])
    assert not one.incidents()
    with pytest.raises(PluginError, match="=spy"):
        run(one, rows[:1])
    assert one.blame(rows[0]) == f" (after {WHO.format('spy')})"
    assert one.incidents()[0].failures == 1
    both = ProcessorChain([member(Spy(), "one"), member(Spy(fault=nan_for("a")), "two")])
    run(both, rows)
    with pytest.raises(PluginError, match=r"one of .*=one.* and .*=two"):
        both.blame(rows[0])
    assert not both.incidents()
    with pytest.raises(PluginError, match="=two"):  # alone, the chain itself looks after each
        run(both, rows[:1])
    assert [incident.name for incident in both.incidents()] == ["two"]


def test_a_call_that_takes_long_is_an_incident():
    now = [0.0]

    def slow(logits, rows):
        now[0] += 7.0

    chain = ProcessorChain([member(Spy(fault=slow))], block_timeout=5.0, clock=lambda: now[0])
    run(chain, rows_of("a", "b"))
    (incident,) = chain.incidents()
    assert incident.reason == "blocked 7.0 s in one call (plugins.block_timeout=5)"


def test_a_state_that_cannot_be_made_fails_its_request():
    class Broken(Spy):
        def state(self, row, params):
            if row.request_id == "b":
                raise KeyError("no")
            return {"id": row.request_id}

    chain = ProcessorChain([member(Broken())])
    with pytest.raises(PluginError, match="KeyError"):
        run(chain, rows_of("a", "b"))
    assert not chain.incidents()
    run(chain, rows_of("a"))
    with pytest.raises(PluginError, match="KeyError"):
        run(chain, rows_of("b"))
    assert chain.incidents()[0].failures == 1
