"""The built-in reasoning parsers keep the contract."""

from __future__ import annotations

from core.stages.reasoning_parser import NoReasoning
from core.testing.reasoning_parser import ReasoningParserContract
from plugins.reasoning_parsers.harmony import Harmony
from plugins.reasoning_parsers.think import Think


class TestNone(ReasoningParserContract):
    component = NoReasoning


class TestThink(ReasoningParserContract):
    component = Think
    provides = frozenset({"reasoning"})
    prompts = ("<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    examples = {
        "<think>\nHm, why?\n\nWell.\n</think>\n\nBecause.\n": ("Hm, why?\n\nWell.", "Because.\n"),
        " \n<think>Hm.</think>Yes. <think>No.</think>": ("Hm.", "Yes. <think>No.</think>"),
        "Yes. <think>No.</think>": ("", "Yes. <think>No.</think>"),
        "<think>a </thin b": ("a </thin b", ""),
        "<think>a\n</thi": ("a\n</thi", ""),
        "<think></think>": ("", ""),
        "<thinker>": ("", "<thinker>"),
        " <thi": ("", " <thi"),
    }


class TestThinkAlwaysOpened(ReasoningParserContract):
    component = Think
    settings = {"begin": "[THINK]", "end": "[/THINK]", "opened": True}
    provides = frozenset({"reasoning"})
    examples = {
        "Hm.[/THINK] Yes.": ("Hm.", "Yes."),
        "\n[THINK]Hm.[/THINK] Yes.": ("Hm.", "Yes."),
        "[/THINK]Yes.[/THINK]": ("", "Yes.[/THINK]"),
        "no end": ("no end", ""),
    }


class TestHarmony(ReasoningParserContract):
    component = Harmony
    provides = frozenset({"reasoning"})
    prompts = (
        "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        "<|end|><|start|>assistant<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    )
    examples = {
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>": (
            "Hm.",
            "Yes.",
        ),
        "<|channel|>final<|message|>Yes.": ("", "Yes."),
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        "<|constrain|>json<|message|>{}<|call|>": (
            "",
            "I look it up.<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        ),
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>analysis<|message|>b<|end|>": ("ab", ""),
        "<|channel|>analysis<|message|>Hm. <|mess": ("Hm. <|mess", ""),
        "<|channel|>analysis": ("", "<|channel|>analysis"),
        "<|channel|>" + "x" * 600 + "<|message|>": ("", "<|channel|>" + "x" * 600 + "<|message|>"),
        "plain text": ("", "plain text"),
    }
