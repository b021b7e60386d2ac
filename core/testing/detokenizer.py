"""What every detokenizer must do, as tests::

class TestMine(DetokenizerContract):
    component = Mine
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from core.batch import TokenLogprobs
from core.model.tokenizer import Tokenizer
from core.outputs import TokenDelta
from core.request import EngineRequest, FinishReason, SamplingParams
from core.stages.detokenizer import Detokenizer, DetokenizerContext, TextDelta
from core.testing.contract import Contract
from core.testing.tokenizers import byte_level_bpe, sentencepiece_bpe

EMOJI_TEXT = "ďábelské 🔥 👩‍👩‍👧‍👦 ครับ"


def all_tokenizers() -> list[Tokenizer]:
    return [byte_level_bpe(), sentencepiece_bpe(), sentencepiece_bpe(prefix_space=True)]


def cut(ids: Sequence[int], rng: random.Random) -> list[list[int]]:
    """`ids` in pieces of random sizes, as steps with speculation deliver them."""
    points = sorted({0, len(ids), *(rng.randint(0, len(ids)) for _ in range(rng.randint(0, 6)))})
    return [list(ids[start:end]) for start, end in pairwise(points)] or [[]]


def run(
    detokenizer: Detokenizer,
    pieces: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    prompt: Sequence[int] = (1, 310),
    finish_reason: FinishReason = FinishReason.LENGTH,
    stop_reason: int | str | None = None,
) -> list[TextDelta]:
    """One sequence from start to end; the finish reason comes with the last piece."""
    params = params or SamplingParams()
    detokenizer.start(EngineRequest(request_id="a", prompt_token_ids=list(prompt), params=params, seed=0))
    deltas: list[TextDelta] = []
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        delta = TokenDelta(
            request_id="a",
            token_ids=list(piece),
            logprobs=[TokenLogprobs(token_id, -1.0, 1) for token_id in piece],
            finish_reason=finish_reason if last else None,
            stop_reason=stop_reason if last else None,
        )
        deltas += detokenizer.push([delta])
    return deltas


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


class DetokenizerContract(Contract):
    def make_detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        detokenizer: Detokenizer = self.make(DetokenizerContext(tokenizer))
        return detokenizer

    def test_joined_text_equals_decode_for_any_ids_and_split(self) -> None:
        rng = random.Random(1)
        for tokenizer in all_tokenizers():
            prompt = tokenizer.encode("prompt text")
            before = tokenizer.decode(prompt)
            for _ in range(60):
                ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 30))]
                deltas = run(self.make_detokenizer(tokenizer), cut(ids, rng), prompt=prompt)
                assert before + text_of(deltas) == tokenizer.decode([*prompt, *ids])

    def test_no_replacement_character_for_text_that_completes(self) -> None:
        for tokenizer in all_tokenizers():
            ids = tokenizer.encode(EMOJI_TEXT, add_special_tokens=False)
            deltas = run(self.make_detokenizer(tokenizer), [[token_id] for token_id in ids])
            assert all("\ufffd" not in delta.text for delta in deltas)
            assert text_of(deltas).endswith(EMOJI_TEXT)

    def test_cut_in_a_character_ends_in_one_replacement_character(self) -> None:
        for tokenizer in all_tokenizers():
            ids = tokenizer.encode(EMOJI_TEXT, add_special_tokens=False)
            for length in range(1, len(ids) + 1):
                one_by_one = run(self.make_detokenizer(tokenizer), [[token_id] for token_id in ids[:length]])
                at_once = run(self.make_detokenizer(tokenizer), [ids[:length]])
                assert text_of(one_by_one) == text_of(at_once)
                assert text_of(at_once).count("\ufffd") <= 1
                assert "\ufffd" not in text_of(one_by_one[:-1])

    def test_nothing_of_a_stop_string_is_delivered_whatever_the_split(self) -> None:
        params = SamplingParams(stop=("DEFGHIJ", "zz"))
        rng = random.Random(2)
        for tokenizer in all_tokenizers():
            ids = tokenizer.encode("the alphabet: ABCDEFGHIJ and more", add_special_tokens=False)
            for _ in range(10):
                deltas = run(self.make_detokenizer(tokenizer), cut(ids, rng), params)
                assert text_of(deltas).lstrip() == "the alphabet: ABC"
                assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "DEFGHIJ")
                assert deltas[-1].stop_matched
                assert sum(delta.finish_reason is not None for delta in deltas) == 1

    def test_withheld_text_is_flushed_when_it_ends_otherwise(self) -> None:
        for tokenizer in all_tokenizers():
            ids = tokenizer.encode("hello zz", add_special_tokens=False)
            deltas = run(
                self.make_detokenizer(tokenizer), [[token_id] for token_id in ids], SamplingParams(stop=("zzzz",))
            )
            assert text_of(deltas).lstrip() == "hello zz"
            assert deltas[-1].finish_reason is FinishReason.LENGTH
            assert not deltas[-1].stop_matched

    @pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ax")])
    def test_a_stop_string_is_text_where_the_client_wants_it(self, include: bool, text: str) -> None:
        params = SamplingParams(stop=("x",), include_stop_str_in_output=include)
        for tokenizer in all_tokenizers():
            ids = tokenizer.encode("axb", add_special_tokens=False)
            assert text_of(run(self.make_detokenizer(tokenizer), [ids], params)).lstrip() == text

    def test_stop_strings_before_min_tokens_are_text(self) -> None:
        tokenizer = byte_level_bpe()
        ids = tokenizer.encode("xqxqxq", add_special_tokens=False)
        assert len(ids) == 6
        pieces = [[token_id] for token_id in ids]
        deltas = run(self.make_detokenizer(tokenizer), pieces, SamplingParams(stop=("q",), min_tokens=4))
        assert text_of(deltas) == "xqxqx" and sum(len(delta.token_ids) for delta in deltas) == 6

    def test_a_stop_string_wins_over_length_in_the_same_step(self) -> None:
        tokenizer = byte_level_bpe()
        ids = tokenizer.encode("axb", add_special_tokens=False)
        deltas = run(self.make_detokenizer(tokenizer), [ids], SamplingParams(stop=("b",)))
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "b")
        assert text_of(deltas) == "ax"

    @pytest.mark.parametrize("skip", [True, False])
    @pytest.mark.parametrize("stop_reason", [5, None])
    def test_the_token_that_ended_it_has_no_text_but_counts(self, skip: bool, stop_reason: int | None) -> None:
        """5 is an EOS of this tokenizer, and a stop_token_id of the request."""
        tokenizer = byte_level_bpe()
        params = SamplingParams(stop_token_ids=(5,), skip_special_tokens=skip)
        ids = [*tokenizer.encode("hello"), 5]
        detokenizer = self.make_detokenizer(tokenizer)
        deltas = run(detokenizer, [ids], params, finish_reason=FinishReason.STOP, stop_reason=stop_reason)
        assert text_of(deltas) == "hello"
        assert [token_id for delta in deltas for token_id in delta.token_ids] == ids
        assert not deltas[-1].stop_matched and deltas[-1].stop_reason == stop_reason

    def test_a_special_token_that_is_shown_is_text(self) -> None:
        """`shown_token_ids` (API 1.3): markers that parsers read. Others stay hidden, and no end of a sequence has a text."""
        tokenizer = byte_level_bpe()
        shown, other = sorted(tokenizer.special_token_ids)[:2]
        ids = [*tokenizer.encode("a"), shown, other, *tokenizer.encode("b")]
        for at in (1, len(ids)):
            detokenizer = self.make_detokenizer(tokenizer)
            deltas = run(detokenizer, [ids[:at], ids[at:]], SamplingParams(shown_token_ids=(shown,)))
            assert text_of(deltas) == f"a{tokenizer.token_text(shown)}b"

    def test_an_end_without_tokens_is_delivered(self) -> None:
        detokenizer = self.make_detokenizer(byte_level_bpe())
        detokenizer.start(EngineRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams(), seed=0))
        (end,) = detokenizer.push([TokenDelta(request_id="a", finish_reason=FinishReason.ABORT)])
        assert (end.finish_reason, end.text) == (FinishReason.ABORT, "")

    def test_tokens_and_logprobs_are_delivered_once_and_aligned(self) -> None:
        rng = random.Random(3)
        for tokenizer in all_tokenizers():
            ids = [rng.randrange(tokenizer.vocab_size) for _ in range(25)]
            for interval in (1, 4, 100):
                deltas = run(self.make_detokenizer(tokenizer), cut(ids, rng), SamplingParams(stream_interval=interval))
                assert [token_id for delta in deltas for token_id in delta.token_ids] == ids
                for delta in deltas:
                    assert tuple(entry.token_id for entry in delta.logprobs) == delta.token_ids

    def test_stream_interval_first_token_then_every_n_then_the_end(self) -> None:
        tokenizer = byte_level_bpe()
        ids = tokenizer.encode("abcdefghij", add_special_tokens=False)
        assert len(ids) >= 8
        deltas = run(
            self.make_detokenizer(tokenizer), [[token_id] for token_id in ids], SamplingParams(stream_interval=3)
        )
        sizes = [len(delta.token_ids) for delta in deltas]
        assert sizes[0] == 1
        assert set(sizes[1:-1]) == {3}
        assert sum(sizes) == len(ids)

    def test_any_ids_are_survived(self) -> None:
        for tokenizer in all_tokenizers():
            ids = [-1, tokenizer.vocab_size, 2**31, 2**63, 0, 5]
            assert text_of(run(self.make_detokenizer(tokenizer), [[token_id] for token_id in ids])) == ""

    def test_unknown_and_ended_sequences_are_ignored(self) -> None:
        tokenizer = byte_level_bpe()
        detokenizer = self.make_detokenizer(tokenizer)
        late = TokenDelta(request_id="a", token_ids=[300], finish_reason=FinishReason.LENGTH)
        assert detokenizer.push([late]) == []
        run(detokenizer, [[300], [301]])
        assert detokenizer.push([late]) == []
        detokenizer.start(EngineRequest(request_id="b", prompt_token_ids=[1], params=SamplingParams(), seed=0))
        detokenizer.drop(["b", "b", "never seen"])
        assert detokenizer.push([TokenDelta(request_id="b", token_ids=[300])]) == []

    def test_sequences_do_not_mix(self) -> None:
        for tokenizer in all_tokenizers():
            detokenizer = self.make_detokenizer(tokenizer)
            texts = {"a": "漢字 🔥", "b": "สวัสดี hello"}
            ids = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in texts.items()}
            for name in texts:
                detokenizer.start(EngineRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams(), seed=0))
            got = dict.fromkeys(texts, "")
            for step in range(max(map(len, ids.values()))):
                step_deltas = [
                    TokenDelta(request_id=n, token_ids=i[step : step + 1]) for n, i in ids.items() if i[step:]
                ]
                for delta in detokenizer.push(step_deltas):
                    got[delta.request_id] += delta.text
            assert got == texts
