"""What every reasoning parser must do, as tests::

    class TestMine(ReasoningParserContract):
        component = Mine
        provides = frozenset({"reasoning"})
        examples = {"<think>Hm.</think>Yes.": ("Hm.", "Yes.")}  # text -> its reasoning and its content
        prompts = ("<|assistant|><think>",)  # ends of prompts that make a difference

Where hypothesis is installed, it looks for texts and cuts of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from core.isolation.tools import markers_of
from core.stages.reasoning_parser import ReasoningParser, ReasoningParserContext, ReasoningSpan, SplitText
from core.testing.contract import Contract
from core.testing.engines import fake_spec
from core.testing.tool_parser import chunks

Split = tuple[str, str]  # reasoning and content

PLAIN = (
    "",
    "Hello.",
    "  leading and trailing  \n",
    "a < b and b > c, <b>tags</b> and | bars |\r\n\tand \u2028 lines",
    "漢字 🔥 👩‍👩‍👧‍👦 ďábelské \u0000 \ufffd",
)
"""No marker, whatever the format, nor the beginning of one at the end."""

ANSWERS = (
    "<think>Let me see.</think>Yes.",
    "<think>\nLet me see.\n</think>\n\nYes.\n",
    "Let me see.</think>Yes.",
    "<think></think>Yes.",
    "<think>never closed",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
    "[THINK]Let me see.[/THINK]Yes.",
    "◁think▷Let me see.◁/think▷Yes.",
)
"""As models of several families write them."""

_PIECES = (
    *ANSWERS,
    *PLAIN,
    "<think>",
    "</think>",
    "<",
    "</",
    "<|",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    " ",
    "\n",
    "final",
)


class ReasoningParserContract(Contract):
    examples: ClassVar[Mapping[str, Split]] = {}
    prompts: ClassVar[Sequence[str]] = ()

    @pytest.fixture
    def parser(self) -> ReasoningParser:
        return self.make_parser()

    def make_parser(self) -> ReasoningParser:
        parser: ReasoningParser = self.make(ReasoningParserContext(fake_spec()))
        return parser

    def all_prompts(self) -> tuple[str, ...]:
        return ("", "<|im_start|>assistant\n", *self.prompts)

    def split(self, parser: ReasoningParser, pieces: Iterable[str], prompt: str = "") -> Split:
        stream = parser.stream(prompt)
        said: list[SplitText] = [*map(stream.push, pieces), stream.finish()]
        assert all(type(one) is SplitText for one in said)
        return "".join(one.reasoning for one in said), "".join(one.content for one in said)

    def texts(self) -> tuple[str, ...]:
        whole = (*self.examples, *ANSWERS)
        return (*PLAIN, *whole, *(text + text for text in whole), *(text[: len(text) // 2] for text in whole))

    def test_all_text_is_content_where_nothing_is_split(self, parser: ReasoningParser) -> None:
        if "reasoning" in self.provides:
            pytest.skip("it splits")
        for text in self.texts():
            assert self.split(parser, list(text)) == ("", text)
            assert parser.span(text) is None

    def test_text_without_markers_comes_out_whole(self, parser: ReasoningParser) -> None:
        """As content; as reasoning, but for white space at its ends, where the prompt has begun it."""
        for prompt in self.all_prompts():
            span = parser.span(prompt)
            for text in PLAIN:
                reasoning, content = self.split(parser, [text], prompt)
                if span is None or span.begin:
                    assert (reasoning, content) == ("", text), f"of {text!r} {reasoning!r} and {content!r} are left"
                else:
                    assert (reasoning + content).strip() == text.strip(), (
                        f"of {text!r} {(reasoning, content)!r} is left"
                    )

    def test_nothing_is_made_up(self, parser: ReasoningParser) -> None:
        """Reasoning and content are parts of the text, in its order."""
        for prompt in self.all_prompts():
            for text in self.texts():
                for part in self.split(parser, [text], prompt):
                    rest = iter(text)
                    assert all(char in rest for char in part), f"of {text!r} it makes {part!r}"

    def test_examples_are_split(self, parser: ReasoningParser) -> None:
        for text, expected in self.examples.items():
            assert self.split(parser, list(text)) == expected, f"of {text!r}"

    @pytest.mark.parametrize("seed", range(3))
    def test_streamed_equals_whole_under_any_chunking(self, parser: ReasoningParser, seed: int) -> None:
        rng = random.Random(seed)
        for prompt in self.all_prompts():
            for text in self.texts():
                whole = self.split(parser, [text], prompt)
                for pieces in (list(text), chunks(text, rng), [text[:1], text[1:]], [text[:-1], text[-1:]]):
                    found = self.split(parser, pieces, prompt)
                    assert found == whole, f"{text!r} in the pieces {pieces} gives {found}, at once {whole}"

    def test_no_text_and_no_cut_is_too_odd(self, parser: ReasoningParser) -> None:
        """Texts and cuts that hypothesis finds."""
        hypothesis = pytest.importorskip("hypothesis")
        strategies = pytest.importorskip("hypothesis.strategies")
        pieces = strategies.sampled_from((*_PIECES, *self.examples)) | strategies.text(max_size=3)
        texts = strategies.lists(pieces, max_size=6).map("".join)
        prompts = strategies.sampled_from(self.all_prompts())

        def check(text: str, prompt: str, rng: random.Random) -> None:
            whole = self.split(parser, [text], prompt)
            assert self.split(parser, chunks(text, rng), prompt) == whole
            assert self.split(parser, list(text), prompt) == whole

        limits = hypothesis.settings(max_examples=120, deadline=None, derandomize=True, database=None)
        limits(hypothesis.given(texts, prompts, strategies.randoms(use_true_random=False))(check))()

    @pytest.mark.parametrize("unit", ["<", "<think>", "</think>", " ", "a ", "<|channel|>", "<|start|>", "[", "\n"])
    def test_long_texts_end(self, parser: ReasoningParser, unit: str) -> None:
        text = unit * (20_000 // len(unit))
        for prompt in self.all_prompts():
            assert self.split(parser, [text], prompt) == self.split(parser, list(text), prompt)

    def test_text_comes_while_it_is_written(self, parser: ReasoningParser) -> None:
        """Once it is clear what it is: here, long after the start."""
        stream, said = parser.stream(""), ""
        for _ in range(100):
            split = stream.push("word ")
            said += split.reasoning + split.content
        assert len(said) > 300, "nothing comes before the end"

    def test_the_span_is_where_the_reasoning_is(self, parser: ReasoningParser) -> None:
        """Text between its markers is no content, and text behind the second one is content at once."""
        for prompt in self.all_prompts():
            span = parser.span(prompt)
            if span is None:
                continue
            assert type(span) is ReasoningSpan and span.end
            reasoning, content = self.split(parser, [f"{span.begin}{span.end}Yes."], prompt)
            assert (reasoning, content) == ("", "Yes."), f"behind {span} comes {content!r}"
            if span.begin:
                assert self.split(parser, [f"{span.begin}Hm.{span.end}Yes."], prompt) == ("Hm.", "Yes.")

    def test_markers_are_a_few_texts(self) -> None:
        """`special_tokens`, where it has them: the same each time, whatever was split."""
        parser = self.make_parser()
        found = markers_of(parser)
        for text in self.texts()[-6:]:
            self.split(parser, [text])
        assert markers_of(parser) == found == markers_of(self.make_parser())
        assert len(set(found)) == len(found), f"special_tokens has a text twice: {found}"

    def test_streams_do_not_mix(self, parser: ReasoningParser) -> None:
        texts = self.texts()[-6:]
        streams: list[Any] = [parser.stream("") for _ in texts]
        said: list[list[SplitText]] = [[] for _ in texts]
        for at in range(max(map(len, texts))):
            for stream, text, one in zip(streams, texts, said, strict=True):
                if at < len(text):
                    one.append(stream.push(text[at]))
        for stream, text, one in zip(streams, texts, said, strict=True):
            one.append(stream.finish())
            found = "".join(s.reasoning for s in one), "".join(s.content for s in one)
            assert found == self.split(parser, [text])
