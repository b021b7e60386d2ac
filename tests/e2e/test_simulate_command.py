"""`simulate` as it is typed: a run, its errors, and a fit of a real (tiny) engine that a run then uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.cli import main
from core.simulation.cost import TERMS, load_cost
from core.testing.tiny_models import make_tiny_model


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
        (["stride=0"], "simulate.stride"),
        (["num_requests=10", "output=nowhere/run.json"], "output=nowhere/run.json: it cannot be written"),
        (["fit"], "'fit.output': it must be set"),
        (["fit", "output=x", "second=3"], "unknown config key 'fit.second'; did you mean seconds"),
        (["workload=code", "speedup=2"], "speedup is for traces, and does nothing to workload=code"),
        (["load=0.5", "short_share=0.5"], "short_share is for workload=mixed"),
        (["compare", "cost=gpu", "fit_seconds=3"], "fit_seconds does nothing beside cost"),
        (["compare", "lod=1"], "unknown config key 'compare.lod'; did you mean load"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*words) == 1
    assert says in capsys.readouterr().err


def test_a_fit_and_what_is_done_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = make_tiny_model(tmp_path / "model"), tmp_path / "cost.json"
    source = f"model.source={model}"
    sizes = ("seconds=0.1", "max_batch=4", "max_prompt_len=64", "output_len=6")
    assert simulate("fit", f"output={path}", source, "cache.num_blocks=100", *sizes) == 0
    assert "a step is off by" in capsys.readouterr().out
    cost = load_cost(str(path))
    assert cost.num_kv_slots == 1600 and cost.max_model_len == 512
    assert cost.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, their width, bytes
    assert sum(getattr(cost.seconds, term) for term in TERMS) > 0
    assert cost.fit["residual"]["steps"] > 10

    assert simulate(f"cost={path}", "workload=fixed", "prompt_len=64", "output_len=8", "num_requests=20") == 0
    assert "20 served" in capsys.readouterr().out

    few = (f"cost={path}", "num_requests=5", "scale=0.02", "max_error=1000")
    assert simulate("compare", source, "cache.num_blocks=100", *few) == 0
    assert "mean TTFT" in capsys.readouterr().out
