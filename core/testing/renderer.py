"""What every renderer must do. Subclass in a test module, name the class `Test…` and give `make`."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.errors import RequestError
from core.model.spec import ModelFiles, ModelSpec
from core.model.tokenizer import Tokenizer
from core.request import SamplingParams
from core.stages.renderer import Renderer, RendererContext, TokenPrompt
from core.testing.tokenizers import byte_level_bpe, sentencepiece_bpe


def renderer_context(tokenizer: Tokenizer, padding: int = 10) -> RendererContext:
    """A context whose model has `padding` logits more than the tokenizer has tokens."""
    width = tokenizer.vocab_size + padding
    spec = ModelSpec(
        name="tiny",
        files=ModelFiles("hf", Path("tiny"), "tiny"),
        config={"model_type": "llama"},
        vocab_size=width,
        max_model_len=4096,
        eos_token_ids=tokenizer.eos_token_ids,
        unusable_token_ids=tokenizer.unusable_token_ids | frozenset(range(tokenizer.vocab_size, width)),
    )
    return RendererContext(spec, tokenizer)


class RendererContract:
    def make(self, context: RendererContext) -> Renderer:
        raise NotImplementedError("give the renderer under test, with its default settings")

    @pytest.fixture(params=["byte_level", "sentencepiece"])
    def context(self, request: pytest.FixtureRequest) -> RendererContext:
        return renderer_context(byte_level_bpe() if request.param == "byte_level" else sentencepiece_bpe())

    @pytest.fixture
    def renderer(self, context: RendererContext) -> Renderer:
        return self.make(context)

    def test_token_ids_pass_unchanged(self, renderer: Renderer) -> None:
        assert renderer.render(TokenPrompt([5, 5, 6])).token_ids == [5, 5, 6]

    @pytest.mark.parametrize("ids", [[-1], [2**31], [2**63], [1.0], [True], [[]], ["1"], [None], []])
    def test_bad_token_prompts_are_refused(self, renderer: Renderer, ids: Any) -> None:
        with pytest.raises(RequestError) as caught:
            renderer.render(TokenPrompt(ids))
        assert caught.value.param == "prompt"
        assert caught.value.status == 400

    def test_first_id_past_the_vocabulary_is_refused(self, renderer: Renderer, context: RendererContext) -> None:
        last = context.model.vocab_size - 1
        assert renderer.render(TokenPrompt([last])).token_ids == [last]
        with pytest.raises(RequestError):
            renderer.render(TokenPrompt([last + 1]))

    @pytest.mark.parametrize(
        "change",
        [
            {"stop_token_ids": (10**6,)},
            {"stop_token_ids": (-1,)},
            {"allowed_token_ids": (10**6,)},
            {"allowed_token_ids": ()},
            {"allowed_token_ids": (True,)},
            {"logit_bias": {191222: -100.0}},
            {"logit_bias": {-1: 5.0}},
            {"logit_bias": {5: math.nan}},
            {"logit_bias": {5: math.inf}},
            {"logit_bias": {5: 1e9}},
            {"bad_words": (" ",)},
            {"bad_words": ("\t",)},
            {"bad_words": ("\u0007",)},
            {"bad_words": ("",)},
            {"bad_words": ("\ud800",)},
            {"stop": ("\udfff",)},
            {"stop": ("",)},
        ],
        ids=lambda change: ascii(change),
    )
    def test_bad_parameters_are_refused_by_name(self, renderer: Renderer, change: dict[str, Any]) -> None:
        with pytest.raises(RequestError) as caught:
            renderer.prepare(SamplingParams(**change))
        assert caught.value.param == next(iter(change))
        assert caught.value.status == 400

    def test_good_parameters_pass_unchanged(self, renderer: Renderer) -> None:
        params = SamplingParams(stop=("a",), stop_token_ids=(7,), logit_bias={5: -100.0, 6: 100.0}, max_tokens=3)
        assert renderer.prepare(params) == params

    def test_allowed_ids_lose_those_without_a_token(self, renderer: Renderer, context: RendererContext) -> None:
        padding = context.model.vocab_size - 1
        assert renderer.prepare(SamplingParams(allowed_token_ids=(padding, 70))).allowed_token_ids == (70,)
        with pytest.raises(RequestError) as caught:
            renderer.prepare(SamplingParams(allowed_token_ids=(padding,)))
        assert caught.value.param == "allowed_token_ids"

    def test_bad_words_are_resolved_with_and_without_a_space(self, renderer: Renderer) -> None:
        prepared = renderer.prepare(SamplingParams(bad_words=("described",)))
        written = {b"".join(map(renderer.tokenizer.token_bytes, ids)).decode() for ids in prepared.bad_words_token_ids}
        assert written == {"described", " described"}
        assert msgspec.structs.replace(prepared, bad_words_token_ids=()) == SamplingParams(bad_words=("described",))

    def test_threads_may_render_at_once(self, renderer: Renderer) -> None:
        prompts = [TokenPrompt([1, 2, number]) for number in range(50)]
        with ThreadPoolExecutor(4) as pool:
            rendered = list(pool.map(renderer.render, prompts))
        assert [part.token_ids for part in rendered] == [[1, 2, number] for number in range(50)]
