"""What `check_accuracy` measures is measured: on a GGUF of a few thousand weights, and held against sums made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.lab.check_accuracy import ALONE, FORMATS, TOGETHER, run
from core.lab.off_grid import write_off_grid
from core.lab.perplexity import Scored, score
from core.lab.prose import passage
from core.lab.row_digests import LENGTHS, alone, calls_of, num_different, together
from core.lab.subject import Subject
from core.lab.teacher_forcing import Agreement, Reference, agreement
from core.model.weights import open_weights

TINY = Path(__file__).resolve().parents[1] / "data" / "gguf" / "tiny-h128-Q4_0.gguf"


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return Subject((f"model.source={TINY}",), passage(90))


async def test_best_tokens_are_those_of_transformers_in_float32_only(tiny: Subject) -> None:
    passages = tiny.passages(7, 40)
    reference = Reference(tiny.spec.files)
    logits = reference.logits_of(passages, 30)
    assert torch.allclose(logits["p3"], reference.logits(passages["p3"], 30), atol=1e-4)
    found: dict[str, Agreement] = {}
    for name in ("cpu_float32", "cpu_bf16", "cpu_int4"):
        found[name] = await agreement([*tiny.overrides, *FORMATS[name]], passages, logits)
        assert found[name].num_positions == 210
    assert found["cpu_float32"].top1 == 1.0 and found["cpu_float32"].largest_gap == 0.0
    differences = [found[name].largest_difference for name in found]
    assert 0 < differences[0] < 1e-3 < differences[1] < differences[2]


async def test_perplexity_is_that_of_transformers(tiny: Subject) -> None:
    chunks = tiny.chunks(480, 96)
    reference = Reference(tiny.spec.files)
    expected = []
    for ids in chunks:
        logprobs = reference.logits(ids, len(ids))[:-1].log_softmax(-1)
        expected.append(-float(logprobs.gather(1, torch.tensor(ids[1:])[:, None]).mean()))
    found: dict[str, Scored] = {}
    for name, overrides in FORMATS.items():
        found[name] = await score([*tiny.overrides, *overrides], chunks)
    assert len(expected) == 5 and found["cpu_float32"].scores.losses == pytest.approx(expected, rel=1e-5)
    base = found["cpu_float32"].scores
    away = {name: abs(one.scores.rise_over(base).share) for name, one in found.items()}
    assert 0 < away["cpu_bf16"] < 0.02 and away["cpu_int4"] > away["cpu_float32"]
    assert not (await score([*tiny.overrides, "model.dtype=float32"], chunks[:1])).is_native


async def test_logits_are_shown_at_every_position(tiny: Subject) -> None:
    calls = calls_of(tiny.ids, 3)
    chosen = [*tiny.overrides, *FORMATS["cpu_int8"]]
    expected = await alone([*chosen, *ALONE], calls)
    assert {name: len(rows) for name, rows in expected.items()} == {
        f"r{index}": length + 2 for index, length in enumerate(LENGTHS)
    }
    found = await together([*chosen, *TOGETHER["chunks of 7"]], calls, seed=1)
    assert num_different(found, expected) == 0
    other = await together([*tiny.overrides, *FORMATS["cpu_int4"]], calls, seed=1)
    assert num_different(other, expected) > sum(LENGTHS) / 2


def test_moved_weights_are_a_model_of_their_own(tiny: Subject, tmp_path: Path) -> None:
    folder = write_off_grid(tiny.spec, tmp_path / "moved")
    moved = tiny.with_model([f"model.source={folder}"])
    assert moved.ids == tiny.ids and moved.start == tiny.start
    assert moved.spec.max_model_len == tiny.spec.max_model_len
    ours, theirs = open_weights(moved.spec.files), open_weights(tiny.spec.files)
    assert ours.names() == theirs.names()
    changed = {n for n in ours.names() if not torch.equal(*(one.read(n, torch.float32) for one in (ours, theirs)))}
    assert changed == {name for name in ours.names() if "_proj" in name}


@pytest.mark.slow
def test_the_smoke_test_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--quick"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("accuracy ok in ") and "0 differ in a bit" in last
