"""`simulate` as it is typed: a run, its errors, and a fit of a real (tiny) engine that a run then uses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from core.batch import SchedulerOutput
from core.cli import main
from core.commands.simulate import COMMANDS, SIMULATE
from core.session import open_session
from core.simulation.cost import TERMS, load_cost
from core.simulation.keys import default_text
from core.simulation.real import OVERRIDES
from core.testing.tiny_models import make_tiny_model
from plugins.schedulers.fcfs import Fcfs

ROOT = Path(__file__).resolve().parents[2]


def simulate(*words: str) -> int:
    return main(["simulate", *words])


def test_a_run_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    words = (
        "scheduler=srtf",
        "scheduler.max_num_running_reqs=16",
        "workload=code",
        "num_requests=50",
        f"output={path}",
    )
    assert simulate(*words) == 0
    assert "50 served" in capsys.readouterr().out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["requests"]["served"] == 50
    assert found["config"] == ["scheduler=srtf", "scheduler.max_num_running_reqs=16"]
    assert found["traffic"]["workload"] == "code" and found["simulation"]["cost"] == "gpu"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["workloat=code"], "unknown key 'workloat'; did you mean workload"),
        (["schedulr=fcfs"], "unknown key 'schedulr'; did you mean scheduler"),
        (["scheduler=fcsf"], "no scheduler is called 'fcsf'; did you mean fcfs"),
        (
            ["scheduler.max_num_running=3"],
            "unknown config key 'scheduler.max_num_running'; did you mean max_num_running_reqs",
        ),
        (["workload=conversion"], "workload='conversion': there is none; did you mean conversation"),
        (["cost=nowhere.json"], "cost=nowhere.json: no such file"),
        (["stride=0"], "simulate: stride: Input should be"),
        (["num_requests=10", "output=nowhere/run.json"], "output=nowhere/run.json: it cannot be written"),
        (["fit"], "simulate: output: it must be set"),
        (["fit", "output=x", "second=3"], "unknown key 'second'; did you mean seconds"),
        (["workload=code", "speedup=2"], "speedup is for traces, and does nothing to workload=code"),
        (["load=0.5", "short_share=0.5"], "short_share is for workload=mixed"),
        (["compare", "cost=gpu", "fit_seconds=3"], "fit_seconds does nothing beside cost"),
        (["compare", "lod=1"], "unknown key 'lod'; did you mean load"),
        (["tabel"], "simulate has no command 'tabel'; did you mean table?"),
        (["load=-1"], "simulate: load: Input should be greater than 0"),
        (["rate=1", "load=1"], "simulate: rate and load say the same thing: give one of them\n"),
        (["prompt_len=12x"], "simulate: prompt_len: give a number of tokens, or a distribution as"),
        (['prompt_len={"p50": 3, "p90": 4}'], "simulate: prompt_len.p99: it must be set\n"),
        (["prompt_len=0"], "simulate: prompt_len: Input should be greater than or equal to 1 (got '0')\n"),
        (
            ["bound=exakt"],
            "simulate: bound: give exact, power_of_two or a number of tokens (got 'exakt'); did you mean exact",
        ),
        (
            ["scheduler=time_slice", "stride=8"],
            "stride=8 makes one plan of several steps, and scheduler=time_slice counts",
        ),
    ],
)
def test_what_is_wrong_is_named(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*words) == 1
    assert says in capsys.readouterr().err


def test_a_fit_and_what_is_done_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = make_tiny_model(tmp_path / "model"), tmp_path / "cost.json"
    source = f"model.source={model}"
    sizes = ("seconds=0.1", "max_batch=4", "max_prompt_len=64", "output_len=6")
    assert simulate("fit", f"output={path}", source, "model.dtype=bfloat16", "cache.num_blocks=100", *sizes) == 0
    shown = capsys.readouterr()
    assert "a step is off by" in shown.out
    assert "measuring steps for about 0.1 s" in shown.err and "up to 4 at a time" in shown.err
    assert "blocked" not in shown.err
    cost = load_cost(str(path))
    assert cost.num_kv_slots == 1600 and cost.max_model_len == 512
    assert cost.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, their width, bytes
    assert sum(getattr(cost.seconds, term) for term in TERMS) > 0
    assert cost.fit["residual"]["steps"] > 10
    assert cost.fit["machine"]["processor"]

    assert simulate(f"cost={path}", "workload=fixed", "prompt_len=64", "output_len=8", "num_requests=20") == 0
    assert "20 served" in capsys.readouterr().out

    few = (f"cost={path}", "num_requests=5", "scale=0.02", "max_error=1000")
    assert simulate("compare", source, "cache.num_blocks=100", *few) == 0
    shown = capsys.readouterr()
    assert "mean TTFT" in shown.out
    assert re.search(r"^sending 5 requests at [\d.]+/s: about \d+ s$", shown.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("mean_error", "total_error", "warns"), [(0.2, 0.1, False), (0.3, 0.0, True), (0.1, -0.2, True)]
)
def test_a_fit_that_is_of_no_use_says_so(
    mean_error: float, total_error: float, warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = tmp_path / "cost.json", {"mean_error": mean_error, "total_error": total_error}
    path.write_text(
        load_cost("gpu").model_copy(update={"fit": {"residual": found}}).model_dump_json(), encoding="utf-8"
    )
    assert simulate(f"cost={path}", "num_requests=10") == 0
    assert ("the machine was busy while it was measured; run again" in capsys.readouterr().err) is warns


@pytest.mark.parametrize("word", ["", *COMMANDS])
def test_help_has_every_key_with_its_default_and_what_it_does(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *filter(None, [word]), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for model in (COMMANDS[word] if word else SIMULATE).models():
        for name, field in model.model_fields.items():
            assert field.description, name
            assert any(line.startswith(f"  {field.alias or name}=") for line in lines), name
    assert any("seed" in line and "0" in line for line in lines)


@pytest.mark.parametrize("word", ["", *COMMANDS])
def test_the_documents_have_every_key_with_its_default_and_what_it_does(word: str) -> None:
    """Row by row, as `--help` has them."""
    documents = ("simulator.md", "traffic.md")
    lines = [line for name in documents for line in (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()]
    for model in (COMMANDS[word] if word else SIMULATE).models():
        for name, field in model.model_fields.items():
            assert f"| `{field.alias or name}` | {default_text(field)} | {field.description} |" in lines


def test_no_step_of_a_real_engine_counts_as_blocked_while_it_is_measured() -> None:
    limits = open_session([*OVERRIDES, "plugins.disable=[]"]).settings.plugins
    assert limits.block_timeout >= 600


def test_a_plugin_that_raises_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def schedule(self: Fcfs) -> SchedulerOutput:
        raise ZeroDivisionError("no slots")

    monkeypatch.setattr(Fcfs, "schedule", schedule)
    assert simulate("scheduler=fcfs", "num_requests=10") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(
        r"nonet simulate: scheduler=fcfs \(plugin plugins\.schedulers, nonet [\w.+]+\) ended the simulation: ZeroDivisionError: "
        r"no slots \(raised at \S*test_simulate_command\.py:\d+ in schedule\)\n",
        shown.err,
    )


def test_refusals_are_explained_and_rows_that_are_no_requests_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, figures = tmp_path / "trace.csv", tmp_path / "run.json"
    rows = ["0,10,500", "1,0,5", "1,10,0", "1,10,0", "1,10,5", "1,10,5", "2,900000,5"]
    path.write_text("\n".join(["Timestamp,Request tokens,Response tokens", *rows]), encoding="utf-8")
    limits = ("admission=load_aware", "admission.max_in_flight=2")
    assert simulate("workload=burstgpt", f"path={path}", *limits, f"output={figures}") == 0
    shown = capsys.readouterr().out
    assert "4: 2 served, 1 refused, 1 error" in shown
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert found["left_out"] == {"without a prompt": 1, "without an output": 2}
    assert "2 rows without an output" in shown
    (refused,), (error,) = found["reasons"]["refused"], found["reasons"]["error"]
    assert refused == "the server is at its limit (N > admission.max_in_flight=N)"
    assert error.startswith("context_length_exceeded: the prompt has N tokens and the context holds N")
    assert refused in shown and error in shown
