"""The green list: what is added, and that text which prefers it is found while other text is not."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from core.request import SamplingParams
from core.stages.logits_processor import LogitsProcessorContext
from core.testing.sampler import make_row
from core.testing.sampler_reference import spec_of
from plugins.logits_processors.green_list import GreenList, main
from plugins.logits_processors.settings import WatermarkParams, WatermarkSettings
from plugins.logits_processors.watermark import Watermark

V = 1009


def make_watermark(**settings):
    context = LogitsProcessorContext(spec_of(V), "cpu", lambda: pytest.fail("no tokenizer is needed"))
    return Watermark(WatermarkSettings(always=True, **settings), context)


def is_green(green, context, token):
    """The rule, in whole numbers of any size."""
    split = green.split(context)
    h = int(green.hashes(np.array([token], np.int64))[0])
    return (h * split.factor + split.offset) % 2**32 < green.gamma * 2**32


def generate(processor, num_tokens, seed, vocab_size=V):
    """Text of a random model: other logits at every position."""
    generator = torch.Generator().manual_seed(seed)
    output = []
    for position in range(num_tokens):
        row = make_row("a", prompt_token_ids=[1, 2, 3], output_token_ids=list(output), position=position)
        logits = torch.randn(1, vocab_size, generator=generator) * 2.0
        if processor is not None:
            processor.apply(logits, [row], ["on"])
        output.append(int(torch.multinomial(logits[0].softmax(-1), 1, generator=generator)))
    return output


@pytest.mark.parametrize("width", [1, 2, 4])
def test_green_tokens_get_delta_and_others_nothing(width):
    processor = make_watermark(gamma=0.3, delta=1.5, context_width=width, key="k")
    green = GreenList("k", 0.3, width)
    rows = [make_row(f"r{i}", prompt_token_ids=[5, 6, 7, 8], output_token_ids=[i * 37], position=1) for i in range(6)]
    logits = torch.zeros(6, V)
    processor.apply(logits, rows, ["on"] * 6)
    for index, row in enumerate(rows):
        context = (*row.prompt_token_ids, *row.output_token_ids)[-width:]
        wanted = [1.5 * is_green(green, context, token) for token in range(V)]
        assert logits[index].tolist() == wanted
        assert 0.2 < np.mean(wanted) / 1.5 < 0.4


def test_rows_in_pieces_and_with_gaps_are_edited_the_same():
    rows = [make_row(f"r{i}", prompt_token_ids=[i + 1], output_token_ids=[], position=i % 3 // 2) for i in range(9)]
    whole, small = make_watermark(), make_watermark()
    small._chunk = 2 * V
    found = torch.zeros(9, V), torch.zeros(9, V)
    whole.apply(found[0], rows, ["on"] * 9)
    small.apply(found[1], rows, ["on"] * 9)
    assert torch.equal(*found)
    in_flight = [index for index, row in enumerate(rows) if row.position]
    assert in_flight and not found[0][in_flight].any()


def test_marked_text_is_found_and_other_text_is_not():
    green = GreenList("secret", 0.25)
    marked = [generate(make_watermark(key="secret"), 150, seed) for seed in range(3)]
    plain = [generate(None, 150, seed) for seed in range(3)]
    assert all(green.detect(text).z > 6.0 for text in marked)
    assert all(abs(green.detect(text).z) < 4.0 for text in plain)
    assert all(abs(GreenList("another key", 0.25).detect(text).z) < 4.0 for text in marked)


def test_z_of_plain_text_is_about_standard_normal():
    numbers = np.random.default_rng(3)
    for width, gamma in ((1, 0.25), (1, 0.5), (3, 0.1)):
        green = GreenList("k", gamma, width)
        z = [green.detect(numbers.integers(0, 50_000, 120).tolist()).z for _ in range(200)]
        assert abs(np.mean(z)) < 0.3 and 0.8 < np.std(z) < 1.2


def test_a_loop_proves_nothing():
    green = GreenList("k")
    once, often = green.detect([1, 2, 3, 4]), green.detect([1, 2, 3, 4] * 50)
    assert often.num_scored == once.num_scored + 1  # 4 -> 1
    assert green.detect([7]).z == green.detect([]).z == 0.0


def test_who_is_marked():
    context = LogitsProcessorContext(spec_of(V), "cpu", lambda: None)
    row = make_row("a", SamplingParams())
    asked = Watermark(WatermarkSettings(), context)
    assert asked.state(row, None) is None and asked.state(row, WatermarkParams()) is not None
    assert make_watermark().state(row, None) is not None


def test_the_key_is_not_shown():
    settings = WatermarkSettings(key=12345)
    assert settings.key.get_secret_value() == "12345"
    assert "12345" not in settings.model_dump_json() and "12345" not in repr(settings)


def test_the_command_reads_what_generate_writes(tmp_path, capsys):
    marked = generate(make_watermark(key="17"), 120, seed=1)
    path = tmp_path / "answers.jsonl"
    lines = [{"id": "a", "choices": [{"token_ids": marked}, {"token_ids": [1, 2]}]}, {"id": 2, "error": "refused"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(path), "--key", "17"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert float(first.split("z=")[1].split()[0]) > 4.0
    assert second.startswith("a: z=") and "of 1 green" in second
