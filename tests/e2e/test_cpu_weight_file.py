"""Packed weights on disk: the same answers as without, and no start that fails over them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelFileError
from core.testing.harness.pipelines import call, running
from plugins.cpu.weight_file import MAGIC, SUFFIX, WeightFile, prune, writing

TINY = Path(__file__).resolve().parents[1] / "data" / "gguf" / "tiny-h128-Q4_0.gguf"
NATIVE = (f"model.source={TINY}", "model=cpu", "attention=cpu_paged", "cache.num_blocks=64")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("plugins.cpu.weight_file.default_cache_dir", lambda: tmp_path)
    return tmp_path / "packed"


async def answers(*overrides: str) -> list[Any]:
    ids = random.Random(1).choices(range(6, 200), k=40)
    async with running(*NATIVE, *overrides) as pipeline:
        found = await pipeline.answer_all([call("a", ids, 16, temperature=0.0, ignore_eos=True, logprobs=2)])
    return [(choice.token_ids, choice.logprobs) for answer in found for choice in answer.choices]


def files(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.is_dir() else []


@pytest.mark.parametrize("quant", ["cpu_float32", "cpu_bf16", "cpu_int8", "cpu_int4", "cpu_gguf"])
async def test_a_start_from_the_file_gives_the_same(quant: str, cache: Path) -> None:
    without = await answers(f"quant={quant}", "model.weight_cache=false")
    assert not files(cache)
    assert await answers(f"quant={quant}") == without
    (made,) = files(cache)
    written = made.stat().st_ino
    assert await answers(f"quant={quant}") == without
    assert [path.stat().st_ino for path in files(cache)] == [written]  # read, and not made again


async def test_each_format_and_dtype_has_a_file_of_its_own(cache: Path) -> None:
    for overrides in (
        ("quant=cpu_int8",),
        ("quant=cpu_int4", "model.dtype=bfloat16"),
        ("quant=cpu_int4", "model.dtype=float32"),
    ):
        await answers(*overrides)
    assert len(files(cache)) == 3


@pytest.mark.parametrize("spoil", ["cut", "empty", "no index", "other bytes at the end"])
async def test_a_spoilt_file_is_made_again(spoil: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = await answers("quant=cpu_int8")
    (path,) = files(cache)
    whole = path.read_bytes()
    spoilt = {"cut": whole[: len(whole) // 2], "empty": b"", "no index": MAGIC, "other bytes at the end": whole + b"x"}
    path.write_bytes(spoilt[spoil])
    assert await answers("quant=cpu_int8") == before
    assert path.read_bytes() == whole
    assert "made again" in caplog.text


async def test_what_is_no_file_is_replaced(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe would be read for ever."""
    before = await answers("quant=cpu_int8")
    (path,) = files(cache)
    path.unlink()
    os.mkfifo(path)
    assert await answers("quant=cpu_int8") == before
    assert path.is_file() and "no regular file" in caplog.text


def changed_index(whole: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    length = int.from_bytes(whole[-16:-8], "little")
    index = json.loads(whole[-16 - length : -16])
    change(index)
    text = json.dumps(index).encode()
    return whole[: -16 - length] + text + len(text).to_bytes(8, "little") + MAGIC


def head_of(index: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = index["matrices"]["lm_head"]
    return found


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "more outputs than data": lambda index: head_of(index).update(n=head_of(index)["n"] + 32),
    "longer rows than data": lambda index: head_of(index).update(k=head_of(index)["k"] * 2),
    "another format": lambda index: head_of(index).update(format=1),
    "no format": lambda index: head_of(index).update(format=99),
    "no scales": lambda index: head_of(index).update(scales=None),
    "data behind the end": lambda index: head_of(index)["data"].update(start=1 << 40),
    "data before the start": lambda index: head_of(index)["data"].update(start=-64),
    "data at odd places": lambda index: head_of(index)["data"].update(start=head_of(index)["data"]["start"] + 1),
    "a shape below nothing": lambda index: next(iter(index["tensors"].values())).update(shape=[-1, 4]),
    "a dtype of objects": lambda index: next(iter(index["tensors"].values())).update(dtype="object"),
    "a start that is no number": lambda index: head_of(index)["data"].update(start="0"),
    "a shape whose size is past all numbers": lambda index: next(iter(index["tensors"].values())).update(
        shape=[1 << 32] * 2
    ),
}
WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "no head": lambda index: index["matrices"].pop("lm_head"),
    "a norm of another dtype": lambda index: index["tensors"]["model.norm.weight"].update(dtype="torch.bfloat16"),
    "a bias": lambda index: head_of(index).update(bias=head_of(index)["scales"]),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_index_that_lies_is_not_believed(lie: str, cache: Path) -> None:
    """Compiled code would read behind what is there."""
    before = await answers("quant=cpu_int8")
    (path,) = files(cache)
    path.write_bytes(changed_index(path.read_bytes(), LIES[lie]))
    assert await answers("quant=cpu_int8") == before


@pytest.mark.parametrize("wrong", WRONG)
async def test_weights_of_another_model_are_not_taken(wrong: str, cache: Path) -> None:
    await answers("quant=cpu_int8")
    (path,) = files(cache)
    path.write_bytes(changed_index(path.read_bytes(), WRONG[wrong]))
    with pytest.raises(ModelFileError, match="weight_cache=false"):
        await answers("quant=cpu_int8")


async def test_a_file_that_cannot_be_read_now_stays(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = await answers("quant=cpu_int8")
    (path,) = files(cache)
    whole = path.read_bytes()

    def no_memory(size: int) -> object:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("plugins.cpu.weight_file._large_pages", no_memory)
    assert WeightFile.open(path) is None and path.read_bytes() == whole
    assert "Cannot allocate memory" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr("plugins.cpu.weight_file.default_cache_dir", lambda: cache.parent)
    assert await answers("quant=cpu_int8") == before


async def test_another_model_at_the_same_path_is_another_file(cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(TINY.read_bytes())
    await answers(f"model.source={copy}", "quant=cpu_int8")
    os.utime(copy, (1, 1))
    await answers(f"model.source={copy}", "quant=cpu_int8")
    assert len(files(cache)) == 2
    other = tmp_path / "other.gguf"
    other.write_bytes(TINY.read_bytes())
    os.utime(other, ns=(0, copy.stat().st_mtime_ns))  # as `cp -p` and `rsync -t` do
    other.replace(copy)
    await answers(f"model.source={copy}", "quant=cpu_int8")
    assert len(files(cache)) == 3


async def test_where_nothing_can_be_written_it_runs_all_the_same(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder would be")
    assert await answers("quant=cpu_int8") == await answers("quant=cpu_int8", "model.weight_cache=false")
    assert "not kept for the next start" in caplog.text


def test_a_writer_that_fails_leaves_nothing(cache: Path) -> None:
    with pytest.raises(RuntimeError), writing(cache / f"a{SUFFIX}"):
        raise RuntimeError("in the midst")
    assert not files(cache)


def test_a_writer_that_is_killed_leaves_no_file_that_counts(cache: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from plugins.cpu.weight_file import writing\n"
        "with writing(Path(sys.argv[1])) as writer:\n"
        "    writer._file.write(bytes(1000)); writer._file.flush(); print('in', flush=True); time.sleep(60)\n"
    )
    path = cache / f"a{SUFFIX}"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"in\n"
        child.send_signal(signal.SIGKILL)
    assert WeightFile.open(path) is None
    assert all(found.suffix == ".part" for found in files(cache))


def test_files_that_were_used_longest_ago_go_first(cache: Path) -> None:
    cache.mkdir()
    for age, name in enumerate(("new", "older", "oldest")):
        path = cache / f"{name}{SUFFIX}"
        path.write_bytes(bytes(100))
        os.utime(path, (time.time() - age * 100,) * 2)
    (cache / "other.txt").write_bytes(bytes(1000))
    prune(cache, 200, keep=cache / f"oldest{SUFFIX}")
    assert {path.stem for path in files(cache)} == {"new", "oldest", "other"}
