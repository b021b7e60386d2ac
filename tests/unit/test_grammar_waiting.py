"""The queue of grammars against what it promises: bounded, tenants in turn, first come first served within one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import OverloadedError
from core.grammar.waiting import Job, WaitingJobs
from core.request import GrammarSpec

TENANTS = st.sampled_from(["a", "b", "c"])


def job(tenant: str) -> Job:
    return Job(GrammarSpec(kind="regex", source="a"), ["first"], 1.0, tenant)


@given(st.lists(TENANTS | st.sampled_from(["take", "cancel"]), max_size=60), st.integers(1, 5))
def test_it_is_bounded_and_loses_nobody_without_a_word(events: list[str], most: int) -> None:
    waiting, asked, taken = WaitingJobs(most), list[Job](), list[Job]()
    for event in events:
        live = [one for one in asked if one not in taken and not one.answer.done()]
        if event == "take" and len(waiting):
            taken.append(waiting.take())
        elif event == "cancel" and live:
            live[-1].answer.cancel()
        elif event in "abc":
            new, counts = job(event), Counter(one.tenant for one in live)
            try:
                waiting.add(new)
                asked.append(new)
            except OverloadedError:
                assert len(live) == most and counts[event] + 1 >= max(counts.values())
        assert len(waiting) <= most
    left = waiting.take_all()
    for one in asked:
        told = one.answer.cancelled() or (one.answer.done() and isinstance(one.answer.exception(), OverloadedError))
        assert one in taken or one in left or told


@given(st.lists(TENANTS, max_size=30))
def test_tenants_take_turns_and_each_is_served_as_it_came(tenants: list[str]) -> None:
    waiting, asked = WaitingJobs(100), [job(tenant) for tenant in tenants]
    for one in asked:
        waiting.add(one)
    order = waiting.take_all()
    rounds = [[one for one in asked if one.tenant == tenant] for tenant in dict.fromkeys(tenants)]
    most = max(map(len, rounds), default=0)
    assert order == [jobs[turn] for turn in range(most) for jobs in rounds if turn < len(jobs)]


def test_who_has_most_gives_its_newest_place_to_one_who_has_less() -> None:
    waiting, asked = WaitingJobs(3), [job("a") for _ in range(3)]
    for one in asked:
        waiting.add(one)
    waiting.add(modest := job("b"))
    assert isinstance(asked[2].answer.exception(0), OverloadedError)
    with pytest.raises(OverloadedError, match="3 grammars wait"):
        waiting.add(job("b"))
    assert waiting.take_all() == [asked[0], modest, asked[1]]
    with pytest.raises(IndexError, match="no grammar waits"):
        waiting.take()
