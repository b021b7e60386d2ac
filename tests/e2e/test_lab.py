"""The tools that check the plugin contract, checked: each reports what is wrong, and none of them cries wolf."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.commands import plugins_faults
from core.errors import ConfigError
from core.lab.fault_table import NUM_REQUESTS, Cell, as_table, fault_table
from core.lab.pieces import Outcome, main
from core.lab.plugin_cost import Round, as_line, plugin_cost, summed_up
from core.lab.quiet import quiet
from core.lab.refusals import refusals
from core.lab.stopwatch import Overhead
from core.testing.harness import faulty
from core.testing.harness.faulty import Fault, is_victim
from core.testing.harness.faulty_pipelines import WRAPPERS, with_fault
from core.testing.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
OTHERS = NUM_REQUESTS - 1


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [f"model.source={make_tiny_model(tmp_path_factory.mktemp('lab') / 'tiny')}", "executor.num_threads=1"]


async def cells_of(overrides: Sequence[str], group: str, *kinds: str, block_s: float = 5.0) -> list[Cell]:
    with quiet():
        return await fault_table(overrides, [group], kinds, block_s)


async def test_a_cell_that_is_as_promised(overrides: list[str]) -> None:
    raised, changed = await cells_of(overrides, "tool_parser", "raise", "mutate")
    assert (raised.word, raised.others_equal, raised.problem) == ("fails alone", OTHERS, "")
    assert raised.victim == "tool_parser=hermes (plugin chaos, acme-chaos 1.0): RuntimeError: a fault was injected"
    assert (changed.word, changed.others_equal, changed.problem) == ("unhurt", OTHERS, "")
    assert changed.fired


async def test_each_change_is_tried(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    class Notes(faulty.FaultyAdmission):
        def __init__(self, inner: Any, fault: Fault):
            super().__init__(inner, fault)
            tried.append(fault.change)

    monkeypatch.setitem(WRAPPERS, "admission", Notes)
    (cell,) = await cells_of(overrides, "admission", "mutate")
    assert tried == [0, 1]
    assert (cell.change, cell.problem) == ("prompt", "")


async def test_a_fault_that_no_guard_stands_before_is_reported(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unguarded:
        num_zeros = 0

        def __init__(self, prefill: Any, faults: Any):
            self.num_tokens = prefill.num_tokens

        def step_finished(self, *told: Any) -> None:
            """Nobody is told."""

    monkeypatch.setattr("core.blueprint.GuardedPrefill", Unguarded)
    (cell,) = await cells_of(overrides, "prefill", "NaN")
    assert cell.word == "BROKEN"
    assert cell.problem.startswith("the error does not name the plugin: scheduler=fcfs")
    assert f"prefill × NaN: {cell.problem}" in as_table([cell])


async def test_others_that_are_hurt_are_counted(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No guard can tell a wrong token from a right one."""

    class HurtsAll:
        def __init__(self, inner: Any, fault: Fault):
            self.inner, self.fault = inner, fault

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def sample(self, logits: Any, metadata: Any) -> Any:
            sampled = self.inner.sample(logits, metadata)
            if not any(is_victim(row.request_id) for row in metadata.rows):
                return sampled
            self.fault.fired += 1
            return replace(sampled, token_ids=dict.fromkeys(sampled.token_ids, (7,)))

    monkeypatch.setitem(WRAPPERS, "sampler", HurtsAll)
    (cell,) = await cells_of(overrides, "sampler", "block")
    assert cell.problem == f"{OTHERS - cell.others_equal} of the others were hurt"
    assert cell.others_equal < OTHERS


async def test_a_fault_that_was_not_met_and_a_block_that_was_not_reported(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WRAPPERS, "completion", lambda inner, fault: inner)
    (cell,) = await cells_of(overrides, "completion", "raise")
    assert cell.problem == "the fault was not met"
    good = Cell("renderer", "block", 1, OTHERS, "unhurt", "blocked 0.5 s in one call", "", 1.0)
    assert not good.problem
    assert replace(good, incident="").problem == "the block was not reported: no incident"
    assert not replace(good, group="frontend", incident="").problem


async def test_targets_of_faulty_plugins_are_gone_afterwards(overrides: list[str]) -> None:
    before = set(vars(faulty))
    from core.session import open_session

    description = open_session(overrides).description
    with with_fault(description, "quant", Fault("raise")) as found:
        assert found.part("quant").provided.component.target.startswith(f"{faulty.__name__}:made_")
        assert set(vars(faulty)) > before
    assert set(vars(faulty)) == before


def test_the_table_is_a_command(overrides: list[str]) -> None:
    words = ["--stage", "detokenizer", "--stage=sampler", "--kind", "raise", "--kind=wrong shape", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "core", "plugins", "faults", *words, *overrides],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads(done.stdout)
    assert [(cell["group"], cell["kind"]) for cell in cells] == [
        (group, kind) for group in ("sampler", "detokenizer") for kind in ("raise", "wrong shape")
    ]
    assert all(cell["problem"] == "" and cell["others_equal"] == OTHERS for cell in cells)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stage", "samplr"], "--stage: there is no 'samplr'; did you mean sampler?"),
        (["--kind=rais"], "--kind: there is no 'rais'; did you mean raise?"),
        (["--jsn"], "unknown argument '--jsn'; did you mean --json"),
        (["--stage"], "--stage needs a value"),
        (["--block", "x"], "--block=x: seconds"),
        (["scheduler=fcsf"], "fcfs"),
        (["cache.num_blcks=9"], "num_blocks"),
    ],
)
def test_what_is_wrong_with_the_command_is_said_before_a_model_is_made(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.testing.tiny_models.make_tiny_model", lambda folder: pytest.fail("a model was made"))
    with pytest.raises(ConfigError) as caught:
        plugins_faults.run(arguments)
    assert said in str(caught.value)


def test_logging_and_stderr_are_as_before_after_a_quiet_time(capsys: pytest.CaptureFixture[str]) -> None:
    for before in (logging.NOTSET, logging.INFO):
        logging.disable(before)
        try:
            with pytest.raises(ValueError), quiet():
                print("nothing", file=sys.stderr)
                assert logging.root.manager.disable == logging.CRITICAL
                raise ValueError
            assert logging.root.manager.disable == before
        finally:
            logging.disable(logging.NOTSET)
    assert capsys.readouterr().err == ""


def test_a_config_that_is_refused_and_one_that_hangs() -> None:
    refused, hung = refusals([("scheduler=fcsf",), ("scheduler=fcfs",)], tries=1, hangs_s=8.0)
    assert (refused.status, refused.message.count("\n")) == (1, 1)
    assert "did you mean" in refused.message
    assert hung.problem, "a config that works is no refusal"
    assert not replace(refused, seconds=0.5).problem
    assert replace(refused, seconds=3.0, cpu_s=2.0).problem == "took 3.00 s, 2.00 s of a CPU"
    assert replace(refused, message="no such thing\n", seconds=0.5).problem == "names no next step: no such thing\n"
    assert replace(refused, status=0).problem.startswith("ended with 0")


def of(engine_ms: float, chain_ms: float = 0.0) -> Round:
    return Round(engine_ms / 1e3, chain_ms / 1e3, 2e-3, 1e-3, num_steps=10)


def test_the_cost_is_that_of_the_faster_half_and_says_how_far_rounds_lie_apart() -> None:
    plain = [of(1.0), of(9.0), of(1.2), of(30.0)]
    cost = summed_up(plain, [of(1.0, 0.1), of(1.1, 0.1), of(50.0, 0.1), of(7.0, 0.1)], ("jsonl",))
    assert (round(cost.plain_ms, 6), round(cost.loaded_ms, 6), round(cost.chain_ms, 6)) == (1.1, 1.15, 0.1)
    assert round(cost.growth, 6) == round(1.15 / 1.1 - 1, 6)
    assert cost.num_steps == 40
    assert cost.spread > 1
    line = as_line(cost)
    assert "1.100 ms without plugins, 1.150 ms with 1 observers and 3 logits processors (+4.5%, spread " in line
    assert "chain 100 µs" in line and "40 steps counted" in line


async def test_the_cost_of_a_tiny_run(overrides: list[str], tmp_path: Path) -> None:
    with quiet():
        cost = await plugin_cost(overrides, tmp_path, num_rounds=2, output_len=8)
    assert cost.observers == ("prometheus", "jsonl", "otel", "first", "second")
    assert min(cost.plain_ms, cost.chain_ms, cost.processors_ms, cost.front_plain_ms, cost.front_loaded_ms) > 0
    assert cost.loaded_ms > cost.chain_ms
    assert 8 <= cost.num_steps <= 2 * 8, "one round of each"
    assert (tmp_path / "trace.jsonl").stat().st_size > 0


def test_watching_costs_something_that_is_taken_off() -> None:
    overhead = Overhead.measured()
    assert 0 < overhead.own_s < 1e-4
    assert 0 < overhead.around_s < 1e-4


def fine() -> Outcome:
    """Nothing is wrong."""
    return Outcome(True, "fine 3/3")


def poor() -> Outcome:
    """Something is wrong."""
    return Outcome(False, "poor 1/3")


PIECES: dict[str, Callable[[], Outcome]] = {"fine": fine, "poor": poor}


def test_the_last_line_has_the_figures_of_all_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], PIECES, "plugins") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--- fine: Nothing is wrong."
    assert lines[-1] == "plugins FAILED in 0 s: fine 3/3; FAILED: poor 1/3"
    assert main(["fine"], PIECES, "plugins") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "plugins ok in 0 s: fine 3/3"


def test_help_names_the_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"], PIECES, "plugins") == 0
    assert capsys.readouterr().out.splitlines()[1].split(maxsplit=1) == ["fine", "Nothing is wrong."]
    assert main(["--quikc"], PIECES, "plugins") == 2
    assert "did you mean --quick?" in capsys.readouterr().err


def test_a_piece_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fien"], PIECES, "plugins") == 2
    assert capsys.readouterr().err == "no piece is called 'fien'; did you mean fine?\n"
