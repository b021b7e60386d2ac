"""The arithmetic of `core.lab.check_accuracy`, on numbers made by hand."""

from __future__ import annotations

import io
import math
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.batch import PromptRows, SampledRow, SamplingMetadata
from core.lab import check_accuracy, prose
from core.lab.off_grid import GROUP, moved
from core.lab.perplexity import Rise, Scores, chunks_of, loss
from core.lab.row_digests import LENGTHS, RowDigests, calls_of, num_different
from core.lab.shown_logits import rows_of
from core.lab.subject import Subject
from core.lab.teacher_forcing import Agreement, Judged, gaps_of
from core.request import SamplingParams
from core.stages.renderer import TokenPrompt


def test_chunks_are_whole_and_begin_with_what_every_prompt_begins_with() -> None:
    assert chunks_of(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert chunks_of(range(9), 4, start=[99]) == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8]]
    assert chunks_of(range(3), 4) == []
    with pytest.raises(ValueError, match="nothing to score"):
        chunks_of(range(9), 2, start=[99])


def test_perplexity_is_that_of_an_even_choice() -> None:
    assert loss([math.log(1 / 8), math.log(1 / 2)]) == pytest.approx(math.log(4))
    assert Scores((math.log(2), math.log(8))).perplexity == pytest.approx(4)
    assert Scores((math.log(2), math.log(8), 0.0)).first(2).perplexity == pytest.approx(4)


def test_a_rise_is_a_ratio_and_its_margin_that_of_differences() -> None:
    base = Scores((1.0, 3.0, 2.0))
    even = Scores(tuple(loss + math.log(1.02) for loss in base.losses)).rise_over(base)
    assert (even.share, even.margin) == (pytest.approx(0.02), pytest.approx(0.0, abs=1e-9))
    uneven = Scores((1.0, 3.03, 2.03)).rise_over(base)
    assert uneven.share == pytest.approx(math.exp(0.02) - 1)
    assert uneven.margin == pytest.approx(math.exp(0.02) * 1.96 * math.sqrt(3e-4) / math.sqrt(3))
    assert Scores((1.0,)).rise_over(Scores((2.0,))) == Rise(pytest.approx(math.exp(-1) - 1), 0.0)
    assert str(Rise(0.0123, 0.002)) == "+1.230% ± 0.200%"
    with pytest.raises(ValueError):
        Scores((1.0,)).rise_over(base)


def test_a_gap_is_what_the_reference_loses_by_our_choice() -> None:
    reference = torch.tensor([[1.0, 4.0, 2.5], [3.0, 3.0, 0.0]])
    assert gaps_of(reference, torch.tensor([2, 1])).tolist() == [1.5, 0.0]
    found = Agreement()
    found.add(torch.tensor([[1.0, 2.0, 2.25]]), reference[:1])
    found.add(torch.tensor([[0.0, 3.0, -1.0]]), reference[1:])
    assert (found.num_positions, found.num_equal, found.top1) == (2, 1, 0.5)
    assert (found.largest_gap, found.largest_difference) == (1.5, 3.0)
    assert str(found) == "50.00% (gap 1.500, logits 3)"


@pytest.mark.parametrize("cuts", [(10,), (4, 6), (5, 5), (3, 3, 4), (1,) * 10])
def test_the_last_positions_are_judged_however_they_come(cuts: tuple[int, ...]) -> None:
    ours = torch.randn(10, 7, generator=torch.Generator().manual_seed(0))
    reference = ours[-6:].clone()
    reference[[1, 4]] = -reference[[1, 4]]
    judged = Judged({"a": range(10), "b": range(6)}, {"a": reference, "b": reference})
    for part in ours.split(list(cuts)):
        judged.take("a", part)
    judged.take("b", ours[-6:])
    found, whole = judged.agreement, Agreement()
    whole.add(ours[-6:], reference)
    assert (found.num_positions, found.num_equal) == (12, 2 * whole.num_equal) == (12, 8)
    assert (found.largest_gap, found.largest_difference) == (whole.largest_gap, whole.largest_difference)


def test_rows_of_a_request_are_in_order_of_its_positions() -> None:
    def sampled(name: str) -> SampledRow:
        return SampledRow(name, SamplingParams(), 0, 0, 0, [1], [])

    metadata = SamplingMetadata(
        (3, 4), (sampled("a"), sampled("b")), (PromptRows("a", (0, 1, 2), (7, 8, 9), 0), PromptRows("c", (5,), (1,), 0))
    )
    assert rows_of(metadata) == {"a": [0, 1, 2, 3], "b": [4], "c": [5]}


def test_weights_move_by_up_to_half_a_step_and_off_the_grid() -> None:
    grid = torch.randint(16, (64, 3 * GROUP), generator=torch.Generator().manual_seed(1)).float() * 0.25 - 1.5
    grid[:, ::GROUP], grid[:, 1::GROUP] = -1.5, 2.25  # each group has its least and its greatest
    weight = torch.cat((grid, torch.zeros(64, GROUP)), 1)
    found = moved(weight, torch.Generator().manual_seed(2))
    assert torch.equal(found, moved(weight, torch.Generator().manual_seed(2)))
    assert not torch.equal(found, moved(weight, torch.Generator().manual_seed(3)))
    noise = (found - weight)[:, : 3 * GROUP] / 0.25
    assert 0.49 < noise.abs().max() <= 0.5 + 1e-5 and noise.mean().abs() < 0.02
    assert noise.std() == pytest.approx(1 / math.sqrt(12), rel=0.05)
    assert torch.equal(found[:, 3 * GROUP :], torch.zeros(64, GROUP)), "a group of equal weights has no steps"


def test_positions_that_differ_or_are_missing_are_counted() -> None:
    digests, others = RowDigests(), RowDigests()
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    for taken in (digests, others):
        taken.take("a", logits[:2])
        taken.take("a", logits[2:])
    assert num_different(digests.found, others.found) == 0 and len(set(digests.found["a"])) == 3
    near = logits.clone()
    near[1, 3] = torch.nextafter(near[1, 3], torch.tensor(9.0))
    others.found.clear()
    others.take("a", near)
    assert num_different(digests.found, others.found) == 1
    others.take("a", near[:1])
    others.take("b", near[:1])
    assert num_different(digests.found, others.found) == num_different(others.found, digests.found) == 3


def test_calls_have_pieces_of_their_own() -> None:
    calls = calls_of(range(2000), 3, start=[5000])
    prompts = [one.prompt.token_ids for one in calls if isinstance(one.prompt, TokenPrompt)]
    assert [len(ids) - 1 for ids in prompts] == list(LENGTHS)
    assert [one for ids in prompts for one in ids[1:]] == list(range(sum(LENGTHS)))
    assert {one.params.temperature for one in calls} == {0.0, 1.0} and {ids[0] for ids in prompts} == {5000}


def subject(num_ids: int, adds_bos: bool) -> Subject:
    found = Subject((), "")
    found.__dict__["ids"] = list(range(num_ids))
    found.__dict__["tokenizer"] = SimpleNamespace(adds_bos=adds_bos, bos_token_id=777)
    found.__dict__["spec"] = SimpleNamespace(max_model_len=9)
    return found


def test_passages_are_spread_over_the_text() -> None:
    found = subject(100, adds_bos=True).passages(4, 11)
    assert {name: (ids[:2], len(ids)) for name, ids in found.items()} == {
        "p0": ([777, 0], 11), "p1": ([777, 22], 11), "p2": ([777, 44], 11), "p3": ([777, 66], 11)
    }  # fmt: skip
    assert subject(100, adds_bos=False).passages(2, 4)["p1"] == [48, 49, 50, 51]
    with pytest.raises(ValueError, match="too few for 20 passages"):
        subject(30, adds_bos=False).passages(20, 20)


def test_chunks_leave_room_for_a_token() -> None:
    assert [len(one) for one in subject(30, adds_bos=False).chunks(20, 1024)] == [8, 8]


def test_paragraphs_are_read_without_their_line_breaks(tmp_path: Path) -> None:
    archive, text = tmp_path / "a.tar.gz", b"\r\n  ON TEXTS\r\n \r\n\r\nThe first,\r\nand  more.\r\n\r\nThe last.\r\n"
    with tarfile.open(archive, "w:gz") as packed:
        member = tarfile.TarInfo(prose.MEMBER)
        member.size = len(text)
        packed.addfile(member, io.BytesIO(text))
    assert prose.read_prose(archive) == "ON TEXTS\n\nThe first, and more.\n\nThe last."


def test_bounds_hold_for_the_formats_that_have_one() -> None:
    good, poor = Agreement(1000, 991, 0.09, 1.0), Agreement(1000, 991, 0.11, 1.0)
    assert check_accuracy._agrees("cpu_bf16", good) and not check_accuracy._agrees("cpu_bf16", poor)
    assert not check_accuracy._agrees("cpu_bf16", Agreement(1000, 989, 0.0, 1.0))
    assert not check_accuracy._agrees("cpu_float32", Agreement(1000, 999, 0.0, 0.0))
    assert check_accuracy._agrees("cpu_int4", Agreement(1000, 700, 5.0, 9.0))
    assert check_accuracy._holds({"cpu_int8": Rise(0.0049, 0.0), "cpu_int4": Rise(0.019, 0.0)})
    assert not check_accuracy._holds({"cpu_int8": Rise(0.0051, 0.0)})
    assert not check_accuracy._holds({"cpu_int4": Rise(0.021, 0.0)})


def test_an_unknown_piece_fetches_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "fetched_prose", lambda: pytest.fail("something was fetched"))
    assert check_accuracy.run(["perplexty"]) == 2
    assert "did you mean perplexity?" in capsys.readouterr().err
