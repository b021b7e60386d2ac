"""Traces of three services: what is read, in which order, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.simulation.records import Arrival
from core.simulation.traces import NUM_SORTED
from core.simulation.traffic import TrafficSettings, open_traffic

DATA = Path(__file__).parents[1] / "data" / "traces"
FILES = {"azure": "azure.csv", "burstgpt": "burstgpt.csv", "mooncake": "mooncake.jsonl"}


def arrivals(workload: str, path: Path | None = None, **keys: object) -> list[Arrival]:
    source = str(path or DATA / FILES[workload])
    keys = {"bound": "exact", **keys}
    return list(open_traffic(TrafficSettings.model_validate({"workload": workload, "path": source, **keys})))


def lengths(found: list[Arrival]) -> list[tuple[int, int]]:
    return [(one.num_prompt_tokens, one.num_output_tokens) for one in found]


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_counts_time_from_the_first_row_and_leaves_out_what_was_not_answered():
    found = arrivals("azure")
    assert lengths(found) == [(374, 44), (396, 109), (879, 55), (91, 16), (381, 84)]
    assert [one.time_s for one in found] == pytest.approx([0.0, 4.314579, 4.541877, 4.710427, 66.0])
    assert all(one.max_tokens == one.num_output_tokens for one in found)


def test_azure_with_a_zone_and_six_digits(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,9,1\n"
    assert [one.time_s for one in arrivals("azure", written(tmp_path, text))] == pytest.approx([0.0, 0.99007])


def test_burstgpt_in_seconds_and_its_columns_as_tenants():
    found = arrivals("burstgpt", tenant_column="Model")
    assert lengths(found) == [(472, 18), (1087, 230), (417, 276), (185, 215)]
    assert [one.time_s for one in found] == [0.0, 40.0, 113.5, 180.0]
    assert [one.tenant for one in found] == ["ChatGPT", "ChatGPT", "GPT-4", "GPT-4"]


def test_columns_are_found_by_the_header_in_any_order(tmp_path):
    text = "\ufeffresponse_tokens, Session ID,REQUEST TOKENS,timestamp\n7,a,100,3\n8,b,200,4\n"
    found = arrivals("burstgpt", written(tmp_path, text), tenant_column="session id")
    assert [(one.time_s, one.num_prompt_tokens, one.num_output_tokens, one.tenant) for one in found] == [
        (0.0, 100, 7, "a"),
        (1.0, 200, 8, "b"),
    ]


def test_mooncake_in_milliseconds_with_the_content_of_its_prompts():
    found = arrivals("mooncake")
    assert lengths(found) == [(1200, 26), (1024, 52), (1700, 26), (300, 794)]
    assert [one.time_s for one in found] == [0.0, 0.0, 3.0, 6.052]
    assert [one.block_hashes for one in found] == [(0, 1, 2), (0, 3), (0, 1, 4, 5), (6,)]
    assert {one.hash_block_size for one in found} == {512}


def test_only_traces_with_content_share_it():
    opened = {name: open_traffic(TrafficSettings(workload=name, path="x")) for name in FILES}
    assert [name for name, traffic in opened.items() if traffic.shares_content] == ["mooncake"]


@pytest.mark.parametrize("workload", FILES)
def test_gzip_reads_the_same(workload, tmp_path):
    path = tmp_path / "packed"
    path.write_bytes(gzip.compress((DATA / FILES[workload]).read_bytes()))
    assert arrivals(workload, path) == arrivals(workload)


def test_iterating_again_starts_anew():
    traffic = open_traffic(TrafficSettings(workload="azure", path=str(DATA / "azure.csv"), tenants=3, seed=4))
    assert list(traffic) == list(traffic)


def test_window_speedup_and_number_of_requests():
    found = arrivals("burstgpt", start_s=40, end_s=180, speedup=2)
    assert [(one.time_s, one.num_prompt_tokens) for one in found] == [(0.0, 1087), (36.75, 417)]
    assert lengths(arrivals("azure", num_requests=2)) == [(374, 44), (396, 109)]


def test_tenants_are_assigned_in_their_shares(tmp_path):
    rows = "\n".join(f"{i},100,10" for i in range(20_000))
    found = arrivals(
        "burstgpt", written(tmp_path, f"Timestamp,Request tokens,Response tokens\n{rows}\n"), tenants=4, flood=5
    )
    shares = [sum(one.tenant == f"t{index}" for one in found) / len(found) for index in range(4)]
    assert shares == pytest.approx([5 / 8, 1 / 8, 1 / 8, 1 / 8], abs=0.01)


def test_rows_slightly_out_of_order_are_put_in_order(tmp_path):
    rows = "\n".join(f"{i ^ 1},100,{i + 1}" for i in range(2 * NUM_SORTED))
    found = arrivals("burstgpt", written(tmp_path, f"Timestamp,Request tokens,Response tokens\n{rows}\n"))
    assert [one.time_s for one in found] == sorted(one.time_s for one in found)
    assert len(found) == 2 * NUM_SORTED


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


@pytest.mark.parametrize(
    ("workload", "text", "where", "what"),
    [
        ("azure", HEADER + "yesterday,3,4\n", ":3", "'TIMESTAMP' is no time (got 'yesterday')"),
        ("azure", HEADER + "2023-11-16 18:15:47,3.5,4\n", ":3", "'ContextTokens' is no number of tokens (got '3.5')"),
        ("azure", HEADER + "2023-11-16 18:15:47,3,-4\n", ":3", "'GeneratedTokens' is no number of tokens (got '-4')"),
        ("azure", HEADER + "2023-11-16 18:15:47,3,1e12\n", ":3", "'GeneratedTokens' is no number of tokens"),
        ("azure", HEADER + "2023-11-16 18:15:47,3\n", ":3", "'GeneratedTokens' is missing: the row has 2 fields"),
        (
            "azure",
            "TIMESTAMP,ContextToken,GeneratedTokens\n",
            ":1",
            "'ContextTokens' is not in the header; did you mean",
        ),
        ("azure", "", ":1", "'TIMESTAMP' is not in the header"),
        ("azure", HEADER + "2023-11-16 18:15:47," + "9" * 200_000 + ",4\n", ":3", "field larger than field limit"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\nnan,1,2\n", ":2", "'Timestamp' is no time (got 'nan')"),
        (
            "burstgpt",
            "Timestamp,Request tokens,Response tokens\n1,,2\n",
            ":2",
            "'Request tokens' is no number of tokens",
        ),
        ("mooncake", '{"timestamp": 0, "input_length": 3}\n', ":1", "output_length"),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": "3", "output_length": 1}\n',
            ":1",
            "'input_length': Expected `int`",
        ),
        ("mooncake", '\n\n{"timestamp": 0,\n', ":3", "not a JSON object"),
        ("mooncake", "[" * 100_000 + "\n", ":1", "Expected `object`"),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n',
            ":1",
            "has 1 ids",
        ),
    ],
)
def test_a_bad_row_is_named(workload, text, where, what, tmp_path):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        arrivals(workload, path)
    assert f"{path}{where}" in str(caught.value)
    assert what in str(caught.value)
    assert caught.value.key == "path"


ROWS = "Timestamp,Request tokens,Response tokens\n"


@pytest.mark.parametrize(
    ("rows", "keys", "says", "key"),
    [
        ("", {}, "path={path}: there is no row in it", "path"),
        (
            "1,0,5\n2,5,0\n3,5,0\n",
            {},
            "path={path}: no request in it was answered (1 without a prompt, 2 without an output)",
            "path",
        ),
        (
            "1,5,5\n9,5,5\n",
            {"start_s": 90},
            "start_s=90: no request of {path} is there (the last one before comes at 8 s)",
            "start_s",
        ),
        ("1,5,5\n9,5,5\n", {"start_s": 2, "end_s": 4}, "start_s=2 end_s=4: no request of {path} is there", "start_s"),
        ("1,5,5\n3,5,0\n", {"start_s": 1}, "path={path}: no request in it was answered (1 without an output)", "path"),
    ],
)
def test_a_selection_without_a_request_is_refused(rows, keys, says, key, tmp_path):
    path = written(tmp_path, ROWS + rows)
    with pytest.raises(ConfigError) as caught:
        arrivals("burstgpt", path, **keys)
    assert str(caught.value).startswith(says.format(path=path))
    assert caught.value.key == key


def test_rows_that_are_no_requests_are_counted_as_far_as_the_file_is_read(tmp_path):
    path = written(tmp_path, ROWS + "1,0,5\n2,5,5\n3,5,0\n4,5,5\n5,5,0\n6,5,5\n")
    counts = {}
    for num_requests in (1, 2, None):
        traffic = open_traffic(TrafficSettings(workload="burstgpt", path=str(path), num_requests=num_requests))
        assert len(list(traffic)) == (num_requests or 3)
        list(traffic)  # anew, and not added up
        counts[num_requests] = dict(traffic.left_out)
    assert counts == {
        1: {"without a prompt": 1},
        2: {"without a prompt": 1, "without an output": 1},
        None: {"without a prompt": 1, "without an output": 2},
    }


def test_a_part_of_a_trace_has_the_tenants_that_the_whole_has(tmp_path):
    path = written(tmp_path, ROWS + "".join(f"{i},100,10\n" for i in range(200)))
    whole, part = (arrivals("burstgpt", path, tenants=4, num_requests=number) for number in (None, 50))
    assert part == whole[:50]


@pytest.mark.parametrize("given", FILES)
@pytest.mark.parametrize("really", FILES)
def test_a_trace_of_another_format_is_named(given, really):
    if given == really:
        return
    with pytest.raises(ConfigError, match=f"it looks like a trace of {really}: write workload={really}"):
        arrivals(given, DATA / FILES[really])


def test_a_row_that_comes_far_too_late_is_refused(tmp_path):
    rows = "\n".join(f"{i},100,10" for i in range(2 * NUM_SORTED))
    path = written(tmp_path, f"Timestamp,Request tokens,Response tokens\n{rows}\n1,1,1\n")
    with pytest.raises(ConfigError, match=f":{2 * NUM_SORTED + 2}: its time is before that of earlier rows"):
        arrivals("burstgpt", path)


def test_a_damaged_archive_and_a_missing_file_are_named(tmp_path):
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress((DATA / "azure.csv").read_bytes())[:-20])
    with pytest.raises(ConfigError, match="gzip data is damaged"):
        arrivals("azure", path)
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        arrivals("azure", tmp_path / "nowhere")


def test_an_unknown_tenant_column_is_named():
    with pytest.raises(ConfigError, match=r":1: field 'user' is not in the header"):
        arrivals("burstgpt", tenant_column="user")
    with pytest.raises(ConfigError, match=r":1: field 'user' is missing"):
        arrivals("mooncake", tenant_column="user")


def test_keys_that_do_not_belong_to_a_trace_are_refused():
    with pytest.raises(ConfigError, match="path="):
        open_traffic(TrafficSettings(workload="azure"))
    with pytest.raises(ConfigError, match="speedup=2"):
        open_traffic(TrafficSettings(workload="azure", path="x", rate=3))


@pytest.mark.parametrize(
    ("workload", "head"), [("azure", b"TIMESTAMP,ContextTokens,GeneratedTokens\n"), ("mooncake", b"")]
)
def test_a_line_longer_than_memory_is_not_read(workload: str, head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(20):
            file.write(b"9" * (1 << 20))
    with pytest.raises(ConfigError, match="a line of more than"):
        list(open_traffic(TrafficSettings(workload=workload, path=str(path))))
