"""`predictor=oracle`: lengths from an experiment or a file; of all others nothing is known but their bound."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from core.request import SamplingParams
from core.stages.predictor import PredictorContext
from core.testing.fakes import make_request
from plugins.predictors.oracle import Oracle


def asked(name: str, num_output: int = 0):
    return make_request(name, [1] * 10, params=SamplingParams(max_tokens=100), output_token_ids=[2] * num_output)


def test_lengths_of_the_experiment_come_first_then_the_file_then_the_bound(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"request_id": "a", "output_len": 40}\n\n{"request_id": "b", "output_len": 30, "more": 1}\n')
    oracle = Oracle(Oracle.Settings(path=str(path)), PredictorContext(4096, {"a": 20}.get))
    assert [oracle.remaining(asked(name)) for name in ("a", "b", "c")] == [20.0, 30.0, 100.0]
    assert [oracle.remaining(asked(name, 15)) for name in ("a", "b", "c")] == [5.0, 15.0, 85.0]
    assert oracle.remaining(asked("a", 25)) == 1.0  # it has not ended
    assert oracle.remaining(asked("a", 100)) == 0.0


def test_one_that_knows_nothing_says_so_at_start(tmp_path, caplog):
    (tmp_path / "lengths.jsonl").write_text('{"request_id": "a", "output_len": 40}')
    Oracle(Oracle.Settings(path=str(tmp_path / "lengths.jsonl")), PredictorContext(4096))
    Oracle(Oracle.Settings(), PredictorContext(4096, {}.get))  # an experiment, whatever it knows
    assert not caplog.records
    Oracle(Oracle.Settings(), PredictorContext(4096))
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "set predictor.path to a file" in record.getMessage()


@pytest.mark.parametrize(
    "line",
    [
        "r1 129",
        "[1]",
        '{"request_id": "a"}',
        '{"request_id": 1, "output_len": 2}',
        '{"request_id": "a", "output_len": -1}',
        '{"request_id": "a", "output_len": 1.5}',
        '{"request_id": "a", "output_len": true}',
        "[" * 100_000,
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"request_id": "a", "output_len": 40}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"predictor.path=.*lengths.jsonl: line 2 is .*; write \{"):
        Oracle(Oracle.Settings(path=str(path)), PredictorContext(4096))


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff")])
def test_a_file_that_cannot_be_read_is_named(tmp_path, make):
    make(tmp_path / "lengths.jsonl")
    with pytest.raises(ConfigError, match=r"predictor.path=.*cannot be read.*name a file of JSON lines"):
        Oracle(Oracle.Settings(path=str(tmp_path / "lengths.jsonl")), PredictorContext(4096))
