"""`observers: jsonl`: what a line holds, and a file that stays whole, bounded and private."""

from __future__ import annotations

import json
import os
import time

import pytest

from core.errors import ConfigError
from core.observers import ObserverContext
from core.request import FinishReason
from core.session import open_session
from core.testing.observer import observer_context, record, step
from plugins.observers.jsonl import JsonLines


def jsonl(path, **settings):
    return JsonLines(JsonLines.Settings(path=path, **settings), observer_context())


def lines(path):
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_request_is_a_line_with_its_spans_in_times_of_day(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = jsonl(path)
    start = time.monotonic() - 3.0
    before = time.time()
    trace.request_finished(record("r1", start=start, tenant="gold", finish_reasons=(FinishReason.STOP,)))
    trace.close()
    head, row = lines(path)
    assert (head["kind"], head["model"], head["parts"]["scheduler"].split(" ")[0]) == ("start", "fake/model", "fcfs")
    assert (row["kind"], row["request_id"], row["tenant"], row["finish_reasons"]) == ("request", "r1", "gold", ["stop"])
    assert (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) == (12, 8, 4)
    assert (row["ttft_s"], row["error"]) == (0.6, None)
    assert [span["stage"] for span in row["spans"]][::4] == ["frontend", "prefill", "completion"]
    assert abs(row["spans"][0]["start"] - (before - 3.0)) < 1.0
    assert row["time"] == row["spans"][-1]["end"]
    assert path.stat().st_mode & 0o777 == 0o600, "a trace says who asked how much"


def test_steps_are_written_where_they_are_asked_for(tmp_path):
    for steps in (False, True):
        trace = jsonl(tmp_path / f"{steps}.jsonl", steps=steps, requests=False)
        trace.step_finished(step(7))
        trace.request_finished(record())
        trace.close()
    assert [row["kind"] for row in lines(tmp_path / "False.jsonl")] == ["start"]
    _, row = lines(tmp_path / "True.jsonl")
    assert (row["kind"], row["step"], row["forward_s"], row["num_preemptions"]) == ("step", 7, 0.02, 0)


def test_a_line_waits_in_memory_for_the_interval_at_most(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = jsonl(path, flush_interval=3600)
    trace.request_finished(record())
    trace.flush()
    assert len(lines(path)) == 1
    trace.close()
    assert len(lines(path)) == 2
    trace = jsonl(path, flush_interval=0)
    trace.request_finished(record())
    trace.flush()
    assert len(lines(path)) == 4
    trace.close()


def test_past_its_size_a_new_file_is_begun_and_one_old_one_kept(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = jsonl(path, max_bytes=20_000, flush_interval=0)
    for index in range(200):
        trace.request_finished(record(f"r{index}"))
        trace.flush()
    trace.close()
    assert sorted(os.listdir(tmp_path)) == ["trace.jsonl", "trace.jsonl.1"]
    kept = [*lines(tmp_path / "trace.jsonl.1"), *lines(path)]
    assert all(file.stat().st_size <= 20_000 for file in tmp_path.iterdir())
    ids = [row["request_id"] for row in kept if row["kind"] == "request"]
    assert ids == [f"r{index}" for index in range(200 - len(ids), 200)], "no line is lost between the two"
    assert [row["kind"] for row in lines(path)][0] == "start", "each file says what pipeline it is of"


def test_a_line_cut_by_a_kill_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"kind": "request", "request_')
    trace = jsonl(path)
    trace.request_finished(record("later"))
    trace.close()
    first, *rest = path.read_text().splitlines()
    assert first.startswith('{"kind": "request", "request_')
    assert [json.loads(line)["kind"] for line in rest] == ["start", "request"]


def test_a_start_that_was_refused_leaves_no_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = jsonl(path)
    trace.flush()
    trace.close()
    assert path.read_bytes() == b""
    trace = jsonl(path)
    trace.step_finished(step(0))  # what the front tells once it runs
    trace.flush()
    assert [row["kind"] for row in lines(path)] == ["start"]


def test_the_start_line_names_every_member_of_a_chain(tmp_path):
    path = tmp_path / "trace.jsonl"
    description = open_session(["observers=[prometheus,jsonl]"]).description
    trace = JsonLines(JsonLines.Settings(path=path), ObserverContext(observer_context().model, description))
    trace.step_finished(step(0))
    trace.close()
    parts = lines(path)[0]["parts"]
    assert [who.split(" ")[0] for who in parts["observers"]] == ["prometheus", "jsonl"]
    assert [who.split(" ")[0] for who in parts["logits_processors"]] == ["min_tokens"]


@pytest.mark.parametrize("kind", ["folder", "no folder", "pipe"])
def test_a_path_that_cannot_be_written_is_refused_by_its_key(tmp_path, kind):
    path = {"folder": tmp_path, "no folder": tmp_path / "none" / "t.jsonl", "pipe": tmp_path / "pipe"}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(
        ConfigError, match=r"observers\.jsonl\.path: cannot write .*; name another with observers\.jsonl\.path="
    ) as caught:
        jsonl(path)
    assert str(path) in str(caught.value)


def test_a_full_disk_is_an_error_and_holds_nothing_back(tmp_path):
    trace = jsonl(tmp_path / "trace.jsonl", flush_interval=0)
    trace.step_finished(step(0))
    trace.flush()
    os.close(trace._file.fileno())
    full = os.open("/dev/full", os.O_WRONLY)
    assert full == trace._file.fileno(), "the file now is a full disk"
    trace.request_finished(record())
    with pytest.raises(OSError):
        trace.flush()
    assert not trace._lines
    trace.flush()  # nothing is left to fail
