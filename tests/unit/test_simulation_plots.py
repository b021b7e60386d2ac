"""Pictures are optional: written where matplotlib is, and a clear error where it is not."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from core.commands.simulate import run
from core.errors import ConfigError
from core.simulation.build import open_simulation
from core.simulation.loop import simulate
from core.simulation.plots import plot, plot_bars, plot_curves
from core.simulation.traffic import TrafficSettings, open_traffic


@pytest.fixture(scope="module")
def result():
    traffic = open_traffic(TrafficSettings(workload="code", num_requests=30))
    return simulate(open_simulation(["scheduler=fcfs", "admission=open"], None, False), traffic)


@pytest.mark.parametrize(("name", "head"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_run_as_a_picture(result, name, head, tmp_path):
    pytest.importorskip("matplotlib")
    plot(result, str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(head)


def test_bars_and_curves(tmp_path):
    pytest.importorskip("matplotlib")
    plot_bars(["a", "b"], {"x": [1.0, float("nan")], "y": [3.0, 4.0]}, "title", str(tmp_path / "bars.svg"))
    plot_curves({"a": np.array([1.0, 2.0]), "b": np.array([])}, "title", str(tmp_path / "curves.svg"))
    assert {path.name for path in tmp_path.iterdir()} == {"bars.svg", "curves.svg"}


def test_the_table_draws_each_block(tmp_path):
    pytest.importorskip("matplotlib")
    keys = ["size=tiny", "workers=1", "num_requests=20", "seeds=1", "policies=fcfs", "scenarios=flood"]
    assert run(["table", *keys, f"plot={tmp_path}"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"flood_2x_bars.png", "flood_2x_latency.png"}


def test_other_files_and_places_are_refused(result, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"write a \.png or a \.svg"):
        plot(result, str(tmp_path / "a.exe"))
    with pytest.raises(ConfigError, match="No such file"):
        plot(result, str(tmp_path / "nowhere" / "a.png"))


def test_without_matplotlib_the_error_says_what_to_install(result, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install nonet\[plots\]") as caught:
        plot(result, str(tmp_path / "a.png"))
    assert caught.value.key == "plot"
