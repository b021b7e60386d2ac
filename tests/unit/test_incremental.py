import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.outputs import TokenDelta
from core.request import EngineRequest, FinishReason, SamplingParams
from core.stages.detokenizer import DetokenizerContext
from core.stages.incremental import Incremental
from core.testing.detokenizer import EMOJI_TEXT, run, text_of
from core.testing.tokenizers import byte_level_bpe, sentencepiece_bpe

BYTE_LEVEL, GEMMA, LLAMA = byte_level_bpe(), sentencepiece_bpe(), sentencepiece_bpe(prefix_space=True)
ALL = [BYTE_LEVEL, GEMMA, LLAMA]
any_tokenizer = st.sampled_from(ALL)


def make(tokenizer, **values):
    return Incremental(Incremental.Settings(**values), DetokenizerContext(tokenizer))


def one_by_one(ids):
    return [[token_id] for token_id in ids]


@settings(max_examples=300)
@given(st.data(), any_tokenizer, st.lists(st.integers(0, 340), min_size=1, max_size=25), st.booleans(), st.booleans())
def test_joined_text_is_what_decode_adds_to_the_prompt(data, tokenizer, ids, skip, bos_only):
    prompt = [1] if bos_only else tokenizer.encode("some prompt")
    cuts = sorted({0, len(ids), *data.draw(st.lists(st.integers(0, len(ids)), max_size=5))})
    pieces = [ids[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    params = SamplingParams(skip_special_tokens=skip, stream_interval=data.draw(st.integers(1, 5)))
    text = text_of(run(make(tokenizer), pieces, params, prompt))
    assert tokenizer.decode(prompt, skip) + text == tokenizer.decode([*prompt, *ids], skip)


@given(any_tokenizer, st.lists(st.integers(6, 420), min_size=1, max_size=25))
def test_joined_text_is_what_the_library_adds_to_the_prompt(tokenizer, ids):
    """The library itself as oracle, wherever the text is well-formed."""
    prompt = tokenizer.encode("some prompt")
    whole = tokenizer._backend.decode([*prompt, *ids])
    if "\ufffd" not in whole:
        assert (
            tokenizer._backend.decode(prompt) + text_of(run(make(tokenizer), one_by_one(ids), prompt=prompt)) == whole
        )


@given(any_tokenizer, st.text(alphabet="ab 🔥漢ñ.", min_size=1, max_size=30), st.data())
def test_stop_strings_do_not_depend_on_the_split(tokenizer, text, data):
    stops = tuple(data.draw(st.lists(st.text(alphabet="ab 🔥漢", min_size=1, max_size=3), min_size=1, max_size=3)))
    params = SamplingParams(stop=stops, include_stop_str_in_output=data.draw(st.booleans()))
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed, whole = run(make(tokenizer), one_by_one(ids), params), run(make(tokenizer), [ids], params)
    assert text_of(streamed) == text_of(whole)
    assert streamed[-1].stop_reason == whole[-1].stop_reason
    assert [i for d in streamed for i in d.token_ids] == [i for d in whole for i in d.token_ids]
    if not params.include_stop_str_in_output:
        assert not any(stop in text_of(whole) for stop in stops)


@pytest.mark.parametrize("tokenizer", ALL)
def test_a2_lone_bytes(tokenizer):
    lone = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in (b"\xf0", b"\x9f")]
    assert len(lone) == 2
    for count in (1, 2, 3):
        deltas = run(make(tokenizer), one_by_one((lone * 2)[:count]))
        text = text_of(deltas)
        assert text and set(text) == {"\ufffd"} and text.encode() and deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("tokenizer", ALL)
def test_a4_no_half_characters(tokenizer):
    deltas = run(make(tokenizer), one_by_one(tokenizer.encode(EMOJI_TEXT, add_special_tokens=False)))
    assert text_of(deltas).lstrip() == EMOJI_TEXT
    assert not any("\ufffd" in delta.text for delta in deltas)


@pytest.mark.parametrize("tokenizer", ALL)
def test_a5_space_after_punctuation(tokenizer):
    ids = tokenizer.encode("engine. It was", add_special_tokens=False)
    assert text_of(run(make(tokenizer), one_by_one(ids))).lstrip() == "engine. It was"


def test_a5_leading_space_depends_on_the_prompt():
    word = LLAMA.token_id("▁It")
    after_text = run(make(LLAMA), [[word]], prompt=LLAMA.encode("engine."))
    at_start = run(make(LLAMA), [[word]], prompt=[1])
    assert (text_of(after_text), text_of(at_start)) == (" It", "It")
    assert text_of(run(make(GEMMA), [[GEMMA.token_id("▁It")]], prompt=[])) == " It"


@pytest.mark.parametrize("tokenizer", ALL)
def test_a6_interrupted_character(tokenizer):
    byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    space = next(i for data, i in byte.items() if data.startswith(b" ") and len(data) > 1)
    ids = [byte[b"\xe6"], byte[b"\xbc"], space, byte[b"\xa2"], byte[b"a"]]
    word = tokenizer.token_text(space)
    assert (
        text_of(run(make(tokenizer), one_by_one(ids)))
        == f"\ufffd{word}\ufffda"
        == tokenizer.decode([300, *ids])[-len(word) - 3 :]
    )


def test_a_long_run_of_hopeless_bytes_is_not_withheld():
    byte = next(i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(i) == b"\x9f")
    deltas = run(make(BYTE_LEVEL), one_by_one([byte] * 50))
    assert [delta.text for delta in deltas] == ["\ufffd"] * 50


@pytest.mark.parametrize("tokenizer", ALL)
def test_b1_stop_string_over_several_tokens(tokenizer):
    ids = tokenizer.encode("ABCDEFGHIJKL", add_special_tokens=False)
    deltas = run(make(tokenizer), one_by_one(ids), SamplingParams(stop=("DEFGHIJ",)), prompt=[300])
    assert text_of(deltas).strip() == "ABC"


def test_b2_same_with_and_without_streaming():
    ids = BYTE_LEVEL.encode("Thought: look\nObservation: it", add_special_tokens=False)
    params = SamplingParams(stop=("\nObservation:",))
    for pieces in (one_by_one(ids), [ids]):
        deltas = run(make(BYTE_LEVEL), pieces, params)
        assert (text_of(deltas), deltas[-1].finish_reason) == ("Thought: look", FinishReason.STOP)


def test_b4_withheld_text_is_in_the_last_delta():
    ids = BYTE_LEVEL.encode("okzz", add_special_tokens=False)
    deltas = run(make(BYTE_LEVEL), one_by_one(ids), SamplingParams(stop=("zzzz",)))
    assert deltas[-1].text.endswith("zz") and deltas[-1].finish_reason is FinishReason.LENGTH


def test_b6_match_inside_a_token_counts_all_tokens():
    hello = BYTE_LEVEL.encode(" hello world", add_special_tokens=False)
    [delta] = run(make(BYTE_LEVEL), [hello], SamplingParams(stop=("ell",)))
    assert (delta.text, delta.stop_reason, delta.stop_matched) == (" h", "ell", True)
    cut = next(n for n in range(1, len(hello) + 1) if "ell" in BYTE_LEVEL.decode(hello[:n]))
    assert delta.token_ids == tuple(hello[:cut]) and len(delta.logprobs) == cut


def test_b6_ordinary_stop_token_with_include_keeps_its_text():
    word = BYTE_LEVEL.encode("b")[0]
    for include, text in ((False, "a"), (True, "ab")):
        params = SamplingParams(stop_token_ids=(word,), include_stop_str_in_output=include)
        ids = [*BYTE_LEVEL.encode("a"), word]
        assert text_of(run(make(BYTE_LEVEL), [ids], params, finish_reason=FinishReason.STOP, stop_reason=word)) == text


def test_interval_of_the_setting_unless_the_request_has_one():
    ids = BYTE_LEVEL.encode("qxqxqxq", add_special_tokens=False)
    assert [len(d.token_ids) for d in run(make(BYTE_LEVEL, stream_interval=3), one_by_one(ids))] == [1, 3, 3]
    own = run(make(BYTE_LEVEL, stream_interval=3), one_by_one(ids), SamplingParams(stream_interval=1))
    assert [len(d.token_ids) for d in own] == [1] * 7


def test_a_delta_without_tokens_is_not_delivered_but_an_end_is():
    detokenizer = make(BYTE_LEVEL)
    detokenizer.start(EngineRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams(), seed=0))
    assert detokenizer.push([TokenDelta(request_id="a")]) == []
    [end] = detokenizer.push([TokenDelta(request_id="a", finish_reason=FinishReason.ABORT)])
    assert end.finish_reason is FinishReason.ABORT and end.text == ""


def test_each_token_is_decoded_once(monkeypatch):
    """Work per token does not grow with the output: every id is looked up exactly once."""
    tokenizer = byte_level_bpe()
    looked_up = []
    real = tokenizer.token_bytes
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token_id: looked_up.append(token_id) or real(token_id))
    ids = tokenizer.encode(EMOJI_TEXT * 20)
    run(make(tokenizer), one_by_one(ids), prompt=[1])
    assert looked_up in (ids, ids[1:])  # the first is looked up as the start of a text
