"""The workloads of `bench` against a target that answers on a clock of its own making."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from core.errors import ConfigError, NonetError
from core.lab.bench.calls import Call
from core.lab.bench.load import Load
from core.lab.bench.prompts import Prompts
from core.lab.bench.report import LABELS, over_rounds, shown, summary
from core.lab.bench.run import Asked
from core.lab.bench.streams import gaps_between
from core.lab.bench.workloads import WORKLOADS, line_of, open_workload

SMALL: dict[str, dict[str, Any]] = {
    "single": {"num_requests": 2, "input_len": 4, "output_len": 4},
    "offline": {"num_requests": 6},
    "closed": {"num_requests": 6, "concurrency": 2, "input_len": 4, "output_len": 3},
    "open": {"num_requests": 5, "rate": 500, "input_len": 4, "output_len": 3},
    "shared_prefix": {"groups": 2, "group_size": 3, "prefix_len": 30, "suffix_len": 10, "output_len": 2},
    "long_prefill": {"streams": 3, "before": 4, "output_len": 40, "prompt_len": 50},
    "structured": {"streams": 2, "rounds": 2, "warmup": 1, "output_len": 4},
}


@dataclass
class FakeTarget:
    """A token each `token_s`, twice that with a schema; prompts of which it has seen the first half count as found."""

    vocab_size: int = 1000
    token_s: float = 0.002
    refuses: int = -1  # the call of this number
    calls: list[Call] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    num_before_counting: int = 0

    def counting(self) -> None:
        self.num_before_counting = len(self.calls)

    async def call(self, call: Call) -> None:
        number, item = len(self.calls), call.item
        self.calls.append(call)
        call.sent, call.num_prompt_tokens = time.perf_counter(), len(item.prompt_token_ids)
        if number == self.refuses:
            call.error = "HTTP 503: full"
            return
        half = item.prompt_token_ids[: len(item.prompt_token_ids) // 2]
        found = any(other.item.prompt_token_ids[: len(half)] == half for other in self.calls[:number])
        call.num_cached_tokens = len(half) if found else 0
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await asyncio.sleep(0 if found else 0.01)
        for _ in range(item.output_len):
            await asyncio.sleep(self.token_s * (2 if item.schema else 1))
            call.arrivals.append(time.perf_counter())
            call.num_tokens += 1
        self.running -= 1
        call.ended = time.perf_counter()


async def run(name: str, target: FakeTarget | None = None, **more: Any) -> tuple[dict[str, Any], FakeTarget]:
    target, done = target or FakeTarget(), list[int]()
    workload = open_workload(name, {**SMALL[name], **more})
    report = await workload.run(Load(target, Prompts(0, target.vocab_size), lambda: done.append(1)))
    assert len(done) == workload.num_calls
    return report, target


@pytest.mark.parametrize("name", WORKLOADS)
async def test_each_runs_and_says_its_figures(name: str) -> None:
    report, target = await run(name)
    assert report["headline"] and all(isinstance(value, float) for value in report["headline"].values())
    assert set(report["headline"]) <= set(LABELS), "each figure has a label"
    counted = target.calls[target.num_before_counting :]
    assert report["num_requests"] == len(counted) and report["num_failed"] == 0
    assert report["output_tokens"] == sum(call.item.output_len for call in counted)
    assert len(summary(report).splitlines()) == len(report["headline"])
    assert line_of(name).endswith(".") and "\n" not in line_of(name)


async def test_the_offline_batch_is_the_one_that_others_were_measured_with() -> None:
    _, target = await run("offline", FakeTarget(vocab_size=49_152, token_s=0), num_requests=32)
    counted = target.calls[1:]
    assert sum(len(call.item.prompt_token_ids) for call in counted) == 7979
    assert sum(call.item.output_len for call in counted) == 3408
    assert target.most_running == 32


async def test_a_closed_loop_has_so_many_in_flight() -> None:
    _, target = await run("closed")
    assert target.most_running == 2


async def test_arrivals_do_not_wait() -> None:
    _, target = await run("open", FakeTarget(token_s=0.05))
    assert target.most_running == 5


async def test_a_stream_alone_has_the_rate_of_its_tokens() -> None:
    report, _ = await run("single", FakeTarget(token_s=0.01))
    assert 0 < report["headline"]["decode_tokens_per_s"] <= 100


async def test_hits_are_those_of_the_prefix() -> None:
    report, _ = await run("shared_prefix")
    assert report["headline"]["prefix_hit_share"] == pytest.approx(4 * 20 / (6 * 40))
    assert report["headline"]["ttft_without_hit_s"] > report["headline"]["ttft_with_hit_s"]


async def test_a_grammar_that_takes_twice_as_long() -> None:
    report, target = await run("structured", FakeTarget(token_s=0.005))
    assert report["headline"]["schema_ratio"] > 1
    assert target.num_before_counting == 4


async def test_streams_are_under_way_when_the_long_prompt_comes() -> None:
    report, target = await run("long_prefill")
    long = next(call for call in target.calls[1:] if len(call.item.prompt_token_ids) == 50)
    assert all(call.arrivals[3] < long.sent for call in target.calls[1:4])
    assert report["streams_ended_before"] == 0
    with pytest.raises(NonetError, match="raise output_len"):
        await run("long_prefill", output_len=4)


def test_gaps_that_overlap_a_span() -> None:
    call = Call(item=None, arrivals=[0.0, 1.0, 2.0, 5.0, 6.0])  # type: ignore[arg-type]
    assert gaps_between([call], 1.5, 2.5) == [1.0, 3.0]
    assert gaps_between([call], 6.5, 7.0) == []


async def test_failures_are_counted_and_nothing_else() -> None:
    report, target = await run("closed", FakeTarget(refuses=3))
    assert (report["num_requests"], report["num_failed"]) == (5, 1)
    assert report["first_failure"] == "HTTP 503: full"
    assert "failed" in summary(report) and report["output_tokens"] == 15
    with pytest.raises(NonetError, match="none of 1 calls was answered; the first: HTTP 503"):
        await run("closed", FakeTarget(refuses=0), num_requests=1, warmup=0)


def test_rounds_have_lengths_in_common_and_no_prompt() -> None:
    one, other, again = Prompts(3, 1000), Prompts(3, 1000, salt=1), Prompts(3, 1000)
    ids, others = one.ids(20), other.ids(20)
    assert ids == again.ids(20) and one.length(1, 10**6) == other.length(1, 10**6)
    assert all(a != b for a, b in zip(ids, others, strict=True))
    assert all(100 <= number < 900 for number in (*ids, *others))


def test_several_rounds_have_median_and_spread() -> None:
    rounds = [
        {"headline": {"ttft_p50_s": value, "prefill_tokens_per_s": 10.0}, "num_failed": 0} for value in (3.0, 1.0, 2.0)
    ]
    found = over_rounds(rounds)
    assert found["headline"]["ttft_p50_s"] == 2.0 and found["spread"]["ttft_p50_s"] == {
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
    }
    assert summary(found).splitlines()[0].split("  ")[-1] == "(1000.0 ms to 3000.0 ms)"
    assert over_rounds(rounds[:1]) is rounds[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [("x_per_s", "1.5 tokens/s"), ("x_share", "150.0 %"), ("x_s", "1500.0 ms"), ("x_ratio", "1.500")],
)
def test_units_are_those_of_the_name(name: str, text: str) -> None:
    assert shown(name, 1.5) == text


@pytest.mark.parametrize(
    ("words", "overrides", "expected"),
    [
        ({"workload": "singel"}, (), "there is no workload 'singel'; did you mean single"),
        ({"num_request": "4"}, (), "did you mean num_requests"),
        ({"repat": "2"}, (), "workload=closed has no key 'repat'; did you mean repeat"),
        ({"workload": "offline", "concurrency": "4"}, (), "no key 'concurrency'; it is a key of workload=closed"),
        ({"rate": "5"}, (), "no key 'rate'; it is a key of workload=open"),
        ({"repeat": "0"}, (), "repeat"),
        ({"workload": "open", "rate": "0"}, (), "rate"),
        ({"url": "http://127.0.0.1:1"}, ("+preset=chat",), "has its own config"),
        ({"vocab_size": "5000"}, (), "add url="),
    ],
)  # fmt: skip
def test_words_that_make_no_run(words: dict[str, str], overrides: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Asked.of(words, overrides)


def test_words_of_a_run() -> None:
    asked = Asked.of({"workload": "open", "rate": "2.5", "url": "http://127.0.0.1:8000"}, ("model=tiny",))
    assert asked.described["name"] == "open" and asked.described["rate"] == 2.5
    assert Asked.of({}, ("model=cpu",)).settings.workload == "closed"
