"""min_tokens: EOS and stop_token_ids are masked before, and nothing is done after."""

from __future__ import annotations

import torch

from core.request import GrammarSpec, SamplingParams
from core.stages.logits_processor import LogitsProcessorContext
from core.testing.sampler import make_row
from core.testing.sampler_reference import spec_of
from plugins.logits_processors.min_tokens import MinTokens
from plugins.logits_processors.settings import MinTokensSettings

V = 50


def make_min_tokens(eos=(3, 4)):
    return MinTokens(MinTokensSettings(), LogitsProcessorContext(spec_of(V, frozenset(eos)), "cpu", lambda: None))


def masked(processor, *rows):
    """Masked ids of each row, and what `apply` returns."""
    states = [processor.state(row, None) for row in rows]
    assert None not in states
    logits = torch.zeros(len(rows), V)
    finished = processor.apply(logits, rows, states)
    return [torch.isinf(row).nonzero().flatten().tolist() for row in logits], finished


def asking(position=0, **params):
    return make_row("a", SamplingParams(**params), position=position)


def test_ends_are_masked():
    found, finished = masked(
        make_min_tokens(),
        asking(min_tokens=9),
        asking(8, min_tokens=9, stop_token_ids=(7, 3)),
        asking(8, min_tokens=9, stop_token_ids=(7,), ignore_eos=True),
    )
    assert found == [[3, 4], [3, 4, 7], [7]]
    assert not finished


def test_requests_that_it_does_not_concern():
    processor = make_min_tokens()
    assert processor.state(asking(), None) is None
    assert processor.state(asking(9, min_tokens=9), None) is None  # after a preemption
    assert processor.state(asking(min_tokens=9, ignore_eos=True), None) is None
    assert make_min_tokens(eos=()).state(asking(min_tokens=9), None) is None


def test_it_is_through_with_a_request_at_min_tokens():
    processor = make_min_tokens()
    rows = [asking(2, min_tokens=3), asking(3, min_tokens=3)]
    state = processor.state(rows[0], None)
    logits = torch.zeros(2, V)
    assert processor.apply(logits, rows, [state, state]) == [1]
    assert torch.isinf(logits).sum(1).tolist() == [2, 0]


def test_ids_outside_the_vocabulary_touch_no_neighbour():
    """G1, G2: refusing them is the renderer's part."""
    found, _ = masked(
        make_min_tokens(eos=(3, V + 2)), asking(min_tokens=2, stop_token_ids=(-1, V + 10, 2**40)), asking(min_tokens=2)
    )
    assert found == [[3], [3]]


def test_a_grammar_that_can_only_end_does():
    grammar = GrammarSpec(kind="regex", backend="fake")
    rows = [asking(min_tokens=9, grammar=grammar), asking(min_tokens=9, grammar=grammar), asking(min_tokens=9)]
    processor = make_min_tokens()
    states = [processor.state(row, None) for row in rows]
    logits = torch.full((3, V), float("-inf"))
    logits[:, [3, 4]] = torch.tensor([1.0, 2.0])  # the grammar has left the ends alone
    logits[1, 20] = 0.5
    processor.apply(logits, rows, states)
    assert logits[0, [3, 4]].tolist() == [1.0, 2.0]
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [20]
    assert not torch.isfinite(logits[2]).any()  # no grammar: its own doing
