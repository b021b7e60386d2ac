"""What stands between `bench_peers` and other engines: programs, model files, processes, ratios."""

from __future__ import annotations

import stat
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from core.errors import ConfigError, NonetError
from core.lab import bench_cpu, bench_peers
from core.lab.bench.calls import WorkItem
from core.lab.bench.prompts import Prompts
from core.lab.peers import offline
from core.lab.peers.models import requantized
from core.lab.peers.offline import OfflinePeer, Stream, llama_bench
from core.lab.peers.programs import Programs, split_words
from core.lab.peers.servers import free_port, served
from core.lab.peers.table import OURS, Rounds, as_text
from core.lab.pieces import Outcome

GGUF = Path(__file__).parents[1] / "data/gguf/tiny-h128-F16.gguf"


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_programs_are_named_or_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bench = program(tmp_path / "llama-bench", "")
    found = Programs.of({"vllm": sys.executable})
    assert dict(found.found) == {"vllm": sys.executable, "llama_bench": str(bench)}
    assert [line.split()[0] for line in found.left_out] == ["openvino", "llama_server"]
    assert "llama_server=PATH" in found.left_out[1]
    with pytest.raises(ConfigError, match="did you mean vllm"):
        Programs.of({"vlm": sys.executable})
    with pytest.raises(ConfigError, match="no such program"):
        Programs.of({"vllm": str(tmp_path / "nothing")})
    assert split_words(["http8", "a=b=c"]) == (["http8"], {"a": "b=c"})


@pytest.mark.parametrize("weight_type", ["BF16", "F16", "Q8_0", "Q4_0"])
def test_a_gguf_file_in_another_weight_type(tmp_path: Path, weight_type: str) -> None:
    import gguf

    made = requantized(GGUF, tmp_path, weight_type)
    before, after = gguf.GGUFReader(GGUF), gguf.GGUFReader(made)
    kept = {name for name in before.fields if not name.startswith("GGUF.") and name != "general.file_type"}
    assert kept <= set(after.fields)
    for name in kept - {"general.quantization_version"}:
        assert after.fields[name].contents() == before.fields[name].contents(), name
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, list(old.shape)) == (new.name, list(new.shape))
        values, again = (gguf.quants.dequantize(t.data, t.tensor_type) for t in (old, new))
        scale = np.abs(values).max()
        assert np.abs(values - again).max() <= scale * (0.13 if weight_type == "Q4_0" else 0.01)
        of_head = new.name in ("token_embd.weight", "output.weight") and weight_type.startswith("Q")
        expected = "F32" if len(old.shape) < 2 else "Q8_0" if of_head else weight_type
        assert new.tensor_type.name == expected
    assert requantized(GGUF, tmp_path, weight_type) == made
    with pytest.raises(ConfigError, match="choose one of"):
        requantized(GGUF, tmp_path, "Q9")


SLOW = """
    import sys, time
    sys.path.insert(0, {scripts!r})
    from offline import main

    def load(setting):
        print("noise on stdout", setting["model"], flush=True)
        if setting["model"] == "broken":
            raise SystemExit("no such model")
        def generate(prompts, output_lens):
            assert len(prompts) == len(output_lens)
            time.sleep(0.01 * sum(output_lens))
        return generate

    main("slow", load)
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    text = textwrap.dedent(SLOW.format(scripts=str(offline.SCRIPTS)))
    (tmp_path / "offline_slow.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(offline, "SCRIPTS", tmp_path)
    return tmp_path


def test_an_engine_without_a_server_is_asked_in_turns(scripts: Path) -> None:
    with OfflinePeer("slow", sys.executable, Path("model")) as peer:
        assert peer.seconds([WorkItem([1, 2], 2), WorkItem([3], 1)]) >= 0.03
        stream = Stream.of(peer, Prompts(0, 1000), input_len=5, output_len=11)
        assert 0 < stream.decode < 110 and stream.prefill == pytest.approx(5 / stream.ttft)


def test_one_that_ends_says_what_it_printed(scripts: Path) -> None:
    with (
        pytest.raises(NonetError, match=r"slow ended:\n(.|\n)*no such model"),
        OfflinePeer("slow", sys.executable, Path("broken")),
    ):
        pass


def test_llama_bench_is_read(tmp_path: Path) -> None:
    text = """
        import json, sys
        if "bad.gguf" in sys.argv: sys.exit("cannot load")
        assert sys.argv[sys.argv.index("-p") + 1] == "64"
        print(json.dumps([{"n_prompt": 64, "n_gen": 0, "avg_ts": 640.0}, {"n_prompt": 0, "n_gen": 128, "avg_ts": 50.0}]))
    """
    made = program(tmp_path / "llama-bench", text)
    assert llama_bench(str(made), Path("m.gguf"), 64, 128) == Stream(decode=50.0, prefill=640.0, ttft=0.1)
    with pytest.raises(NonetError, match="cannot load"):
        llama_bench(str(made), Path("bad.gguf"), 64, 128)


HEALTHY = """
    import sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_there_once_it_is_healthy_and_gone_afterwards(tmp_path: Path) -> None:
    made, port = program(tmp_path / "server", HEALTHY), free_port()
    with served("fake", [str(made), str(port)], port, tmp_path) as address:
        assert address == f"http://127.0.0.1:{port}"
    made = program(tmp_path / "broken", "raise SystemExit('no weights')")
    with (
        pytest.raises(NonetError, match=r"fake does not serve:\nno weights"),
        served("fake", [str(made)], port, tmp_path),
    ):
        pass


def test_ratios_say_by_how_much_we_are_ahead() -> None:
    rounds = Rounds("piece", {"rate_per_s": "1.5 times peer"})
    for ours, theirs in ((20.0, 10.0), (30.0, 10.0), (40.0, 40.0)):
        rounds.add(OURS, {"rate_per_s": ours, "wait_s": ours / 1000})
        rounds.add("peer", {"rate_per_s": theirs, "wait_s": theirs / 1000})
    rounds.add("gone", {"rate_per_s": 1.0})
    rate, wait = rounds.rows()
    assert rate.ratios("peer") == [2.0, 3.0, 1.0] and wait.ratios("peer") == pytest.approx([0.5, 1 / 3, 1.0])
    assert "gone" not in rate.values  # it was not there in each round
    lines = as_text([rate, wait]).splitlines()
    assert "target: 1.5 times peer" in lines[1] and lines[2].endswith("2.00 (1.00 to 3.00)")
    assert "30.0 ms" in lines[3] and "30.0/s" in lines[1]


@pytest.fixture
def bench(tmp_path: Path) -> bench_peers.Bench:
    return bench_peers.Bench("full", Programs({}, ()), 2, tmp_path)


def held(bench: bench_peers.Bench, ours: float) -> Outcome:
    engines = {
        OURS: lambda _: {"decode_tokens_per_s": ours, "prefill_tokens_per_s": 1.0},
        "llama.cpp Q4_0": lambda _: {"decode_tokens_per_s": 10.0, "prefill_tokens_per_s": 1.0},
    }
    return bench_peers.take_turns(bench, "single_int4", engines)


def test_a_target_is_held_where_its_peer_is_there(bench: bench_peers.Bench) -> None:
    assert held(bench, 15.0) == Outcome(True, "single_int4: decode_tokens_per_s 1.50x llama.cpp Q4_0")
    assert not held(bench, 14.0).good
    alone = bench_peers.take_turns(bench, "single_int4", {OURS: lambda _: {"decode_tokens_per_s": 1.0}})
    assert alone.good and alone.left_out == ("single_int4 decode_tokens_per_s against llama.cpp Q4_0",)


def test_a_peer_that_fails_is_left_out_and_we_are_not(
    bench: bench_peers.Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: int) -> dict[str, float]:
        raise NonetError("no memory")

    fine = {OURS: lambda _: {"decode_tokens_per_s": 1.0}, "llama.cpp Q4_0": fails}
    assert bench_peers.take_turns(bench, "single_int4", fine).left_out
    assert "llama.cpp Q4_0 is left out: no memory" in capsys.readouterr().out
    with pytest.raises(NonetError):
        bench_peers.take_turns(bench, "single_int4", {OURS: fails})


@pytest.mark.parametrize("words", [["nothing"], ["rounds=0"], ["vllm=/nowhere"], ["peer=x"]])
def test_words_that_are_none(words: list[str]) -> None:
    assert bench_peers.run(words) == 2


def test_every_target_is_of_a_piece() -> None:
    assert {piece for piece, _, _ in bench_peers.TARGETS} <= set(bench_peers.PIECES)
    assert bench_cpu.met("x_per_s", 2.0, 2.0) and not bench_cpu.met("x_per_s", 1.9, 2.0)
    assert bench_cpu.met("gap_s", 0.2, 0.2) and not bench_cpu.met("gap_s", 0.21, 0.2)


def test_our_side_misses_a_target(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"decode_tokens_per_s": 1e6, "output_tokens_per_s": 1e6, "worst_gap_s": 0.01}
    monkeypatch.setattr(bench_cpu, "own", lambda *words: {"headline": figures})
    monkeypatch.setattr(bench_cpu, "num_cores", lambda: 2)
    monkeypatch.setattr(bench_cpu, "vector_instructions", lambda: "avx512_bf16")
    monkeypatch.setattr(bench_cpu, "cpu_info", lambda key: "AuthenticAMD")
    assert bench_cpu.run(["single", "offline"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("cpu ok in")
    figures["output_tokens_per_s"] = 1.0
    assert bench_cpu.run(["offline"]) == 1
    assert "MISSED: offline_bf16 output_tokens_per_s is 1.0 tokens/s" in capsys.readouterr().out
    assert bench_cpu.run(["nothing"]) == 2
    monkeypatch.setattr(bench_cpu, "num_cores", lambda: 64)
    assert bench_cpu.run(["offline"]) == 0
    assert "no targets for 64 cores (avx512_bf16)" in capsys.readouterr().out
