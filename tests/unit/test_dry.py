"""DRY against its slow twin: the rule of text-generation-webui, one place after another, over the text of the history."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from core.request import SamplingParams
from core.stages.logits_processor import LogitsProcessorContext, parsed_params
from core.testing.sampler import make_row
from core.testing.sampler_reference import spec_of
from core.testing.tokenizers import byte_level_bpe
from plugins.logits_processors.dry import Dry
from plugins.logits_processors.repeats import Breaks, Repeats
from plugins.logits_processors.settings import DryParams, DrySettings

TOKENIZER = byte_level_bpe()
V = 340


def make_dry(**settings):
    return Dry(DrySettings(**settings), LogitsProcessorContext(spec_of(V), "cpu", lambda: TOKENIZER))


def naive(
    history, multiplier=0.8, base=1.75, allowed_length=2, last_n=None, sequence_breakers=DrySettings().sequence_breakers
):
    """Penalty by token id."""
    ids = list(history)[-last_n:] if last_n else list(history)
    breakers = [text.encode() for text in sequence_breakers]

    def breaks_at(place, token_id):
        """Whether a breaker ends within `token_id`, were it at `place`."""
        before = b"".join(TOKENIZER.token_bytes(i) for i in ids[:place])
        whole = before + TOKENIZER.token_bytes(token_id)
        return any(whole.find(word, max(len(before) - len(word) + 1, 0)) >= 0 for word in breakers)

    longest = {}
    for place in range(len(ids) - 1):
        length = 0
        while length <= place and ids[place - length] == ids[len(ids) - 1 - length]:
            if breaks_at(len(ids) - 1 - length, ids[len(ids) - 1 - length]):
                break
            length += 1
        follower = ids[place + 1]
        if length >= allowed_length and not breaks_at(len(ids), follower):
            longest[follower] = max(longest.get(follower, 0), length)
    return {token: multiplier * base ** (length - allowed_length) for token, length in longest.items()}


def penalties(dry, row, states=None, **params):
    """What `dry` takes off a row's logits, by token id."""
    own = (
        row
        if not params
        else make_row(row.request_id, **{**fields_of(row), "params": SamplingParams(extra={"dry": params})})
    )
    state = dry.state(own, parsed_params(DryParams, params))
    logits = torch.zeros(1, V)
    dry.apply(logits, [own], [state])
    return {i: -value for i, value in enumerate(logits[0].tolist()) if value}


def fields_of(row):
    return {
        "position": row.position,
        "prompt_token_ids": row.prompt_token_ids,
        "output_token_ids": row.output_token_ids,
        "draft_token_ids": row.draft_token_ids,
    }


def history_row(prompt, output=(), drafts=()):
    position = len(output) + len(drafts)
    values = {"prompt_token_ids": list(prompt), "output_token_ids": list(output), "draft_token_ids": tuple(drafts)}
    return make_row("a", SamplingParams(extra={"dry": {}}), position=position, **values)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for token, value in wanted.items():
        assert found[token] == pytest.approx(value, rel=1e-5)


words = st.lists(st.sampled_from([40, 41, 42, TOKENIZER.encode(":")[0], TOKENIZER.encode("\n")[0], 90]), max_size=30)
rules = st.fixed_dictionaries(
    {},
    optional={
        "multiplier": st.sampled_from([0.5, 2.0]),
        "base": st.sampled_from([1.0, 1.75, 3.0]),
        "allowed_length": st.integers(1, 4),
        "last_n": st.integers(1, 20),
        "sequence_breakers": st.sampled_from([[], ["\n"], [":"], [":\n", "x"]]),
    },
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(words, words, st.lists(st.sampled_from([40, 41, 42]), max_size=4), rules)
def test_dry_equals_its_slow_twin(prompt, output, drafts, rule):
    dry = make_dry()
    found = penalties(dry, history_row([7, *prompt], output, drafts), **rule)
    assert_same(found, naive([7, *prompt, *output, *drafts], **rule))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(words, st.lists(st.sampled_from([40, 41, 42, 90]), min_size=60, max_size=150), rules)
def test_a_state_that_grows_equals_the_slow_twin_at_every_position(prompt, output, rule):
    """Past the first buffer, and past the window."""
    dry, params = make_dry(), parsed_params(DryParams, rule)
    state = dry.state(history_row([7, *prompt]), params)
    for size in range(len(output)):
        logits = torch.zeros(1, V)
        dry.apply(logits, [history_row([7, *prompt], output[:size])], [state])
        if size % 7 == 0:
            found = {i: -value for i, value in enumerate(logits[0].tolist()) if value}
            assert_same(found, naive([7, *prompt, *output[:size]], **rule))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 30))
)
def test_runs_are_those_of_a_comparison_of_all_pairs(ids, cut, window):
    cut = min(cut, len(ids))
    repeats = Repeats(ids[:cut], window)
    for token in ids[cut:]:
        repeats.push(token)
    kept = ids[-window:] if window else ids
    wanted = {}
    for shift in range(1, len(kept)):
        length = 0
        while length < len(kept) - shift and kept[-1 - length] == kept[-1 - shift - length]:
            length += 1
        if length:
            wanted[kept[-shift]] = max(wanted.get(kept[-shift], 0), length)
    found = repeats.continuations(1, 10**6)
    assert dict(zip(found.token_ids.tolist(), found.lengths.tolist(), strict=True)) == wanted


def test_a_repetition_is_penalised_the_more_the_longer_it_is():
    dry = make_dry()
    text = [50, 51, 52, 53, 54]
    found = [penalties(dry, history_row([*text, 99], text[:size])).get(text[size], 0.0) for size in range(1, 5)]
    assert found[0] == 0.0
    assert found[1:] == [pytest.approx(0.8 * 1.75**n) for n in range(3)]


def test_a_breaker_may_begin_in_one_token_and_end_in_another():
    ids = TOKENIZER.encode("ab:\ncd", add_special_tokens=False)
    breaks = Breaks(ids, [b":\n"], TOKENIZER.token_bytes)
    tail = TOKENIZER.encode("cd", add_special_tokens=False)
    assert breaks.since == len(tail)
    grown = Breaks([], [b":\n"], TOKENIZER.token_bytes)
    for token in ids:
        grown.push(token)
    assert (grown.since, grown._tail) == (breaks.since, breaks._tail)
    colon, newline = TOKENIZER.encode(":")[0], TOKENIZER.encode("\n")[0]
    breaks.push(colon)
    assert breaks.ends_with(newline) and not breaks.ends_with(colon)


def test_penalties_stay_finite():
    dry = make_dry()
    found = penalties(dry, history_row([50, 51] * 2000), multiplier=100.0, base=10.0)
    assert found.keys() == {50} and np.isfinite(found[50]) and found[50] > 1e30


def test_requests_decide_and_the_operator_gives_defaults():
    row = history_row([50, 51, 52, 50, 51])
    assert make_dry().state(row, None) is None
    assert make_dry(always=True).state(row, None) is not None
    assert make_dry(always=True).state(row, DryParams(multiplier=0.0)) is None
    assert penalties(make_dry(multiplier=5.0), row, base=2.0) == {52: 5.0}
    assert penalties(make_dry(allowed_length=3), row) == {}


@pytest.mark.parametrize(
    "values",
    [{"multiplier": -1}, {"base": 0.5}, {"allowed_length": 0}, {"last_n": 0}, {"sequence_breakers": [""]}, {"multiplir": 1},
     {"multiplier": "1"}, {"sequence_breakers": ["x"] * 65}, {"sequence_breakers": "x"}, {"base": True}],
)  # fmt: skip
def test_wrong_parameters_are_refused(values):
    with pytest.raises(ValidationError):
        parsed_params(DryParams, values)
