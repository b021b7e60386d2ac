"""What transformers would have chosen at every position of a text that both sides read.

One tie decided otherwise therefore does not make everything after it a mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.lab.shown_logits import shown_logits
from core.model.spec import ModelFiles
from core.testing.harness.pipelines import call

STEP_TOKENS = "scheduler.max_num_scheduled_tokens=512"  # a step's logits are [512, V] float32 at most
AT_ONCE = 5  # passages that the reference reads
NUM_BLOCKS = "cache.num_blocks=600"


class Reference:
    """The model through transformers' own reader, in float32 and with its simplest attention."""

    def __init__(self, files: ModelFiles):
        import transformers

        auto: Any = transformers.AutoModelForCausalLM
        self.model: Any = auto.from_pretrained(
            files.path.parent if files.kind == "gguf" else files.path,
            dtype=torch.float32,
            attn_implementation="eager",
            **_gguf_options(files),
        ).eval()

    def logits(self, token_ids: Sequence[int], num_last: int) -> Tensor:
        """float32 [num_last, V] of the last positions."""
        return self._logits([token_ids], num_last)[0]

    def logits_of(self, passages: Mapping[str, Sequence[int]], num_last: int) -> dict[str, Tensor]:
        """The same of each passage; all are of one length."""
        names = list(passages)
        found: dict[str, Tensor] = {}
        for first in range(0, len(names), AT_ONCE):
            group = names[first : first + AT_ONCE]
            found |= dict(zip(group, self._logits([passages[name] for name in group], num_last), strict=True))
        return found

    @torch.inference_mode()
    def _logits(self, rows: Sequence[Sequence[int]], num_last: int) -> Tensor:
        """[N, num_last, V]"""
        read = torch.tensor([list(ids) for ids in rows])
        found: Tensor = self.model(input_ids=read, use_cache=False, logits_to_keep=num_last).logits
        return found

    def gaps(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Of each token that followed the prompt: see `gaps_of`."""
        logits = self.logits([*prompt, *output[:-1]], len(output))
        gaps: list[float] = gaps_of(logits, torch.tensor(output)).tolist()
        return gaps


def _gguf_options(files: ModelFiles) -> dict[str, Any]:
    if files.kind != "gguf":
        return {}
    import transformers

    config: Any = getattr(transformers, "GgufConfig", None)  # where it is, a file stays quantized unless it says so
    dense = {"quantization_config": config(dequantize=True)} if config else {}
    return {"gguf_file": files.path.name, **dense}


def gaps_of(reference: Tensor, chosen: Tensor) -> Tensor:
    """[n] from logits [n, V] and ids [n]: by how much the reference prefers its own choice; 0 where it is the same."""
    return reference.amax(-1) - reference.gather(-1, chosen[:, None])[:, 0]


@dataclass(slots=True)
class Agreement:
    """Of logits with those of the reference."""

    num_positions: int = 0
    num_equal: int = 0  # best tokens
    largest_gap: float = 0.0  # of the reference's logits, where another token is the best
    largest_difference: float = 0.0  # of any two logits

    def add(self, ours: Tensor, reference: Tensor) -> None:
        """Both float32 [n, V]."""
        gaps = gaps_of(reference, ours.argmax(-1))
        self.num_positions += len(gaps)
        self.num_equal += int((gaps == 0).sum())
        self.largest_gap = max(self.largest_gap, float(gaps.max()))
        self.largest_difference = max(self.largest_difference, float((ours - reference).abs().max()))

    @property
    def top1(self) -> float:
        return self.num_equal / self.num_positions

    def __str__(self) -> str:
        return f"{self.top1:.2%} (gap {self.largest_gap:.3f}, logits {self.largest_difference:.2g})"


class Judged:
    """Takes logits of passages as they come, and compares those of the last positions of each."""

    def __init__(self, passages: Mapping[str, Sequence[int]], references: Mapping[str, Tensor]):
        """`references`: of each passage [n, V], of its last n positions."""
        self.agreement = Agreement()
        self._references = references
        self._firsts = {name: len(ids) - len(references[name]) for name, ids in passages.items()}
        self._next = dict.fromkeys(passages, 0)

    def take(self, name: str, logits: Tensor) -> None:
        """[n, V] of the passage's next n positions."""
        start, first = self._next[name], self._firsts[name]
        self._next[name] = start + len(logits)
        own = logits[max(first - start, 0) :]
        if len(own):
            at = max(start - first, 0)
            self.agreement.add(own.float(), self._references[name][at : at + len(own)])


async def agreement(
    overrides: Sequence[str], passages: Mapping[str, Sequence[int]], references: Mapping[str, Tensor]
) -> Agreement:
    """All passages at once through a whole pipeline, so that they share steps.

    Raises RuntimeError where one is not read to its end.
    """
    judged = Judged(passages, references)
    async with shown_logits([*overrides, STEP_TOKENS, NUM_BLOCKS], judged.take) as pipeline:
        await pipeline.answer_all([call(name, ids, 1, prompt_logprobs=0, logprobs=0) for name, ids in passages.items()])
    expected = sum(len(logits) for logits in references.values())
    if judged.agreement.num_positions != expected:
        raise RuntimeError(f"{judged.agreement.num_positions} of {expected} positions were shown")
    return judged.agreement
