"""What a step costs: a sum of terms, each a number of seconds per something that the step does.

Linear in what a plan says before it runs, so that a few hundred measured steps fix it (`core.simulation.fit`). On a CPU, where
compute is nearly all of a step, the sum is close; on an accelerator, where reading weights and computing overlap, it is an upper
bound of the larger of the two that is right at both ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from core.errors import ConfigError, near_matches
from core.simulation.keys import checked
from core.stages.step_cost import attended

MAX_MEAN_ERROR, MAX_TOTAL_ERROR = 0.25, 0.15  # of a fit: of a step on average, and of all steps together
FEW_TOKENS = 4  # up to so many in a step, a matrix product costs more per token: it is one of vectors still


class Seconds(BaseModel):
    """The terms. Each is seconds per one of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    step: float = Field(default=0.0, ge=0, description="each step: launches, weights read, framework")
    few: float = Field(default=0.0, ge=0, description=f"each of the first {FEW_TOKENS} tokens of a step")
    prefill_token: float = Field(default=0.0, ge=0, description="each token of a prompt")
    prefill_chunk: float = Field(default=0.0, ge=0, description="each request that computes a part of its prompt")
    prefill_pair: float = Field(
        default=0.0, ge=0, description="each pair of a prompt's token and one that it attends to"
    )
    decode: float = Field(default=0.0, ge=0, description="each request that generates")
    decode_context: float = Field(default=0.0, ge=0, description="each token that a generating request attends to")
    copy_token: float = Field(default=0.0, ge=0, description="KV of a token, moved to or from host memory")


TERMS = ("step", "few", "prefill_token", "prefill_chunk", "prefill_pair", "decode", "decode_context")
"""Those of a forward pass, in the order of `Work.features`."""


class CostModel(BaseModel):
    """A machine with a model on it, as far as time and memory go. Written by `simulate fit`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    about: str = ""
    seconds: Seconds
    num_kv_slots: int = Field(default=131_072, ge=1, description="tokens that the KV pool holds, unless config says")
    kv_bytes_per_token: int = Field(default=131_072, ge=1)
    max_model_len: int = Field(default=8192, ge=1)
    fit: dict[str, Any] = Field(default_factory=dict, description="how it was measured; nothing reads it")


@dataclass(slots=True)
class Work:
    """What one step does."""

    num_prefill_tokens: int = 0
    num_chunks: int = 0
    num_pairs: int = 0  # a token of a prompt, and one that it attends to
    num_decodes: int = 0
    num_context: int = 0  # tokens that the decodes attend to

    def add_chunk(self, start: int, num_tokens: int) -> None:
        self.num_prefill_tokens += num_tokens
        self.num_chunks += 1
        self.num_pairs += attended(start, num_tokens)

    def add_decode(self, start: int) -> None:
        self.num_decodes += 1
        self.num_context += start + 1

    def features(self) -> tuple[float, ...]:
        """One number per term of `TERMS`."""
        few = min(self.num_prefill_tokens + self.num_decodes, FEW_TOKENS)
        return (
            1.0,
            float(few),
            float(self.num_prefill_tokens),
            float(self.num_chunks),
            float(self.num_pairs),
            float(self.num_decodes),
            float(self.num_context),
        )


class StepClock:
    """Seconds of a step, as fast as Python gets: asked for each one of millions."""

    def __init__(self, seconds: Seconds):
        self._step, self._few = seconds.step, seconds.few
        self._prefill = seconds.prefill_token, seconds.prefill_chunk, seconds.prefill_pair
        self._decode, self._context = seconds.decode, seconds.decode_context

    def of(self, work: Work) -> float:
        token, chunk, pair = self._prefill
        prefill = token * work.num_prefill_tokens + chunk * work.num_chunks + pair * work.num_pairs
        few = self._few * min(work.num_prefill_tokens + work.num_decodes, FEW_TOKENS)
        return self._step + few + prefill + self._decode * work.num_decodes + self._context * work.num_context

    def decodes(self, num_decodes: int, num_context: int) -> float:
        """Of a step without prompts."""
        few = self._few * min(num_decodes, FEW_TOKENS)
        return self._step + few + self._decode * num_decodes + self._context * num_context

    def of_steps(self, work: Work, count: int, leaving: Mapping[int, Sequence[int]]) -> list[float]:
        """Seconds from the start to the end of each of `count` steps in a row, all but the first without prompts.

        `work` is the first of them. `leaving`: where those decodes began (`start`) that take part in only so many.
        """
        now = self.of(work)
        ends = [now]
        decodes, context, per_token = work.num_decodes, work.num_context, self._context
        fixed = self.decodes(decodes, 0)  # as long as nobody leaves
        for done in range(1, count):
            context += decodes
            if done in leaving:
                starts = leaving[done]
                decodes -= len(starts)
                context -= sum(starts) + len(starts) * (1 + done)
                fixed = self.decodes(decodes, 0)
            now += fixed + per_token * context
            ends.append(now)
        return ends


CPU = CostModel(
    about="SmolLM2-135M in bfloat16 on two cores of an AMD EPYC",
    seconds=Seconds(
        step=0.0293,
        few=0.00237,
        prefill_token=0.000824,
        prefill_pair=9.1e-7,
        decode=0.00137,
        decode_context=9.0e-6,
        copy_token=2.5e-6,
    ),
    num_kv_slots=156_816,
    kv_bytes_per_token=23_040,
    max_model_len=8192,
)

GPU = CostModel(
    about="a dense model of 8 billion parameters in bfloat16, 128 KiB of KV per token; an accelerator of 2 TB/s, 312 TFLOP/s",
    seconds=Seconds(
        step=0.010,  # 16 GB of weights at 1.6 TB/s
        prefill_token=7.9e-5,  # 16 GFLOP at 65 % of the peak
        prefill_chunk=5.0e-5,
        prefill_pair=2.6e-9,  # 0.5 MFLOP in 32 layers of 4096
        decode=1.5e-5,  # its products hide behind the weights; its sampling does not
        decode_context=8.2e-8,  # 128 KiB at 1.6 TB/s
        copy_token=5.2e-6,  # 128 KiB at 25 GB/s
    ),
    num_kv_slots=400_000,  # 52 GB
    kv_bytes_per_token=131_072,
    max_model_len=131_072,
)

BUILT_IN: Mapping[str, CostModel] = MappingProxyType({"cpu": CPU, "gpu": GPU})


def doubt(cost: CostModel) -> str:
    """Why figures that rest on this fit mean little, and what to do; empty where they do not, or nobody knows."""
    found = cost.fit.get("residual")
    if not isinstance(found, Mapping):
        return ""
    mean, total = (float(found.get(name, 0.0)) for name in ("mean_error", "total_error"))
    if mean <= MAX_MEAN_ERROR and abs(total) <= MAX_TOTAL_ERROR:
        return ""
    return (
        f"warning: the fit is off by {mean:.0%} of a step on average and by {total:+.0%} of all steps together: the machine was "
        "busy while it was measured; run again"
    )


def load_cost(name: str) -> CostModel:
    """A built-in one, or that of a JSON file. Raises ConfigError naming the key `cost`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name)
    if not path.is_file():
        hint = near_matches(name, BUILT_IN)
        raise ConfigError(
            f"cost={name}: no such file{hint}; `nonet simulate fit output={name}` would write one", "cost"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cost={name}: not JSON: {error}", "cost") from None
    try:
        return checked(CostModel, values)
    except ConfigError as error:
        raise ConfigError(f"cost={name}: {error}", "cost") from None
