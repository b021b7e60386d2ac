"""A backend is used once soon after the start, and not after the end; one that fails then is nobody's matter."""

from __future__ import annotations

import threading

import pytest

from core.grammar.samples import SAMPLES, sample
from core.grammar.warmup import Warmup
from core.request import GRAMMAR_KINDS, GrammarSpec


class Backend:
    def __init__(self, fault: Exception | None = None):
        self.used = threading.Event()
        self.asked: list[GrammarSpec] = []
        self._fault = fault

    def compile(self, spec):
        self.asked.append(spec)
        return b"artifact"

    def load(self, artifact):
        assert artifact == b"artifact"
        self.used.set()
        if self._fault is not None:
            raise self._fault
        return self

    def matcher(self):
        return self


@pytest.mark.parametrize("fault", [None, OSError("no"), SystemExit(1)])
def test_it_is_used_once_with_a_kind_that_it_knows(fault):
    backend = Backend(fault)
    warmup = Warmup(backend, {"ebnf"}, delay_s=0.0)
    assert backend.used.wait(10)
    warmup._timer.join(10)
    assert backend.asked == [sample({"ebnf"})]


def test_not_after_the_end():
    backend = Backend()
    warmup = Warmup(backend, {"regex"}, delay_s=0.2)
    warmup.cancel()
    warmup._timer.join(10)
    assert not backend.asked


def test_there_is_a_sample_of_each_kind():
    assert set(SAMPLES) == set(GRAMMAR_KINDS)
