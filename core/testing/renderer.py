"""What every renderer must do, as tests::

class TestMine(RendererContract):
    component = Mine
"""

from __future__ import annotations

import copy
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.errors import RequestError
from core.model.spec import ModelFiles, ModelSpec
from core.model.tokenizer import Tokenizer
from core.request import SamplingParams
from core.stages.renderer import ChatPrompt, Prompt, Renderer, RendererContext, TextPrompt, TokenPrompt
from core.testing.contract import Contract
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


def chat(*contents: str) -> list[dict[str, Any]]:
    """The user begins."""
    return [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(contents)]


class RendererContract(Contract):
    @pytest.fixture(params=["byte_level", "sentencepiece"])
    def context(self, request: pytest.FixtureRequest) -> RendererContext:
        return renderer_context(byte_level_bpe() if request.param == "byte_level" else sentencepiece_bpe())

    @pytest.fixture
    def renderer(self, context: RendererContext) -> Renderer:
        made: Renderer = self.make(context)
        return made

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

    def test_parameters_are_left_as_they_are(self, renderer: Renderer) -> None:
        params = SamplingParams(logit_bias={5: 1.0}, bad_words=("described",), allowed_token_ids=(70, 71))
        kept = msgspec.structs.replace(params, logit_bias=dict(params.logit_bias))
        renderer.prepare(params)
        assert params == kept

    def test_text_is_what_the_tokenizer_makes_of_it(self, renderer: Renderer, context: RendererContext) -> None:
        self.needs("text")
        text = "hello world, described again"
        found = renderer.render(TextPrompt(text))
        assert found.text is not None and text in found.text
        assert context.tokenizer.decode(found.token_ids).strip().endswith(text)

    def test_every_message_is_in_the_prompt(self, renderer: Renderer) -> None:
        self.needs("messages")
        text = renderer.render(ChatPrompt(chat("first", "second", "third"))).text or ""
        assert text.index("first") < text.index("second") < text.index("third")

    def test_messages_are_left_as_they_are(self, renderer: Renderer) -> None:
        """A client's other choices, and its log, are made of the same objects."""
        self.needs("messages")
        messages = [*chat("one", "two", "three"), {"role": "user", "content": [{"type": "text", "text": "four"}]}]
        kept = copy.deepcopy(messages)
        for prompt in (ChatPrompt(messages[:3]), ChatPrompt(messages[:2], continue_final_message=True)):
            renderer.render(prompt)
        assert messages == kept, "the renderer changes the messages that it is given"

    def test_a_chat_without_messages_is_refused(self, renderer: Renderer) -> None:
        self.needs("messages")
        with pytest.raises(RequestError) as caught:
            renderer.render(ChatPrompt([]))
        assert (caught.value.param, caught.value.status) == ("messages", 400)

    def test_threads_that_render_at_once_do_not_mix(self, renderer: Renderer) -> None:
        """Worker threads of the front share one renderer."""
        self.needs("messages")
        prompts: list[Prompt] = [ChatPrompt(chat(f"question {index}", f"answer {index}")) for index in range(64)]
        expected = [renderer.render(prompt) for prompt in prompts]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(8) as pool:
                rendered = [list(pool.map(renderer.render, prompts)) for _ in range(3)]
        finally:
            sys.setswitchinterval(interval)
        assert all(found == expected for found in rendered), "a prompt rendered beside others is not what it is alone"

    def test_threads_may_render_at_once(self, renderer: Renderer) -> None:
        prompts = [TokenPrompt([1, 2, number]) for number in range(50)]
        with ThreadPoolExecutor(4) as pool:
            rendered = list(pool.map(renderer.render, prompts))
        assert [part.token_ids for part in rendered] == [[1, 2, number] for number in range(50)]
