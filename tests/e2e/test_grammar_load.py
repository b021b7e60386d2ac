"""Grammars by the thousand, a few of them: what `check_structured` measures is measured."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

from core.grammar.figures import GrammarFigures
from core.lab.grammar_load import HostileRun, Told, UniqueRun, hostile_run, unique_grammars, unique_run

TINY = Path(__file__).resolve().parents[1] / "data" / "gguf" / "tiny-h128-Q4_0.gguf"
OVERRIDES = [f"model.source={TINY}", "cache.num_blocks=64", "grammars=[llguidance]"]


async def test_the_first_hostile_grammars() -> None:
    run = await hostile_run(OVERRIDES, 24)
    assert len(run.told) == 24 and run.is_alive and run.not_answered() == []
    assert 0 < run.codes["compiled"] < 24 and run.codes["unsupported_grammar"] > 0
    assert run.front_bytes > 0 and run.compiler_bytes > 0


def test_what_is_late_or_wrong_is_found() -> None:
    told = [Told("a", 0.1, "compiled"), Told("b", 3.0, "grammar_timeout"), Told("c", 2.5, "GenerationError")]
    run = HostileRun(told, 0, 0, GrammarFigures(), is_alive=True)
    assert [one.name for one in run.slower_than(2.0)] == ["b", "c"] and run.not_answered() == [told[2]]
    assert run.codes == Counter(["compiled", "grammar_timeout", "GenerationError"])


async def test_unique_grammars_through_a_whole_server() -> None:
    run = await unique_run(OVERRIDES, 60)
    assert (run.num_ended, run.errors) == (60, Counter())
    assert len(run.server_bytes) == len(run.compiler_bytes) == 10 and min(run.compiler_bytes) > 0
    assert run.hits_again == run.num_again == 6 and run.cached_bytes > 0


def test_growth_is_from_the_second_tenth_to_the_last() -> None:
    run = UniqueRun(server_bytes=[1, 5, *range(7), 9])
    assert run.growth(lambda run: run.server_bytes) == 4


def test_no_two_are_equal() -> None:
    specs = list(islice(unique_grammars(), 2000))
    assert len({spec.source for spec in specs}) == 2000
