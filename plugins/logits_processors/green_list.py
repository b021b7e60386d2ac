"""Which tokens are green after a context, and how to tell text that prefers them. No torch: detection needs no model.

Kirchenbauer et al., "A Watermark for Large Language Models", ICML 2023: the tokens before a position and a key split the
vocabulary; text that was sampled with a bonus on the green share has more green tokens than chance gives.

A token's colour is a hash of (key, context, token). Each token has a random 32-bit number h of the key's, each context an odd
factor and an offset; the token is green where h * factor + offset, modulo 2**32, is below gamma * 2**32 (multiply-shift
hashing, Dietzfelbinger et al. 1997). That is one multiplication per token, in integers: the same on every device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

UInt32s = NDArray[np.uint32]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Split:
    """How one context splits the vocabulary: `h * factor + offset < threshold` modulo 2**32 is green."""

    factor: int  # odd
    offset: int


@dataclass(frozen=True, slots=True)
class Detection:
    """What chance says of a text. Without a watermark `z` is about standard normal; 4 and more is one in thirty thousand."""

    num_scored: int  # different (context, token) pairs
    num_green: int
    z: float


class GreenList:
    """The colours under one key. `gamma`: the green share; `context_width`: tokens that make a context."""

    def __init__(self, key: str, gamma: float = 0.25, context_width: int = 1):
        self.gamma = gamma
        self.context_width = context_width
        self.threshold = round(gamma * 2**32)
        self._key = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")

    def hashes(self, token_ids: NDArray[np.int64]) -> UInt32s:
        """The number h of each token."""
        words = token_ids.astype(np.uint64) + np.uint64(1)
        mixed: UInt32s = (_mix_all(words * np.uint64(_GOLDEN) + np.uint64(self._key)) >> np.uint64(32)).astype(
            np.uint32
        )
        return mixed

    def split(self, context: Sequence[int]) -> Split:
        """For the `context_width` tokens before a position."""
        state = _mix(self._key ^ _GOLDEN)
        for token_id in context:
            state = _mix(state + (token_id + 1) * _GOLDEN)
        return Split((state & 0xFFFFFFFF) | 1, state >> 32)

    def detect(self, token_ids: Sequence[int]) -> Detection:
        """How green a text is. Pairs of context and token that come again are scored once: a loop proves nothing.

        z = (green - gamma * n) / sqrt(n * gamma * (1 - gamma)), as in the paper; 0.0 for a text with nothing to score.
        """
        width = self.context_width
        spans = {tuple(token_ids[at - width : at + 1]) for at in range(width, len(token_ids))}
        ordered = sorted(spans)
        hashes = self.hashes(np.array([span[-1] for span in ordered], np.int64)).tolist()
        splits = [self.split(span[:-1]) for span in ordered]
        green = sum(
            (h * split.factor + split.offset) % 2**32 < self.threshold for h, split in zip(hashes, splits, strict=True)
        )
        scored = len(ordered)
        spread = math.sqrt(scored * self.gamma * (1.0 - self.gamma))
        return Detection(scored, green, (green - self.gamma * scored) / spread if scored else 0.0)


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    x &= _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def _mix_all(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same for an array; its arithmetic wraps modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def main(arguments: Sequence[str]) -> int:
    """`python -m plugins.logits_processors.green_list answers.jsonl --key …`: z of each choice that `generate` has written."""
    parser = argparse.ArgumentParser(prog="green_list", description=main.__doc__)
    parser.add_argument("answers", type=Path, help="JSONL as `generate output=…` writes it, with choices[].token_ids")
    parser.add_argument("--key", default="nonet", help="logits_processors.watermark.key")
    parser.add_argument("--gamma", type=float, default=0.25)
    parser.add_argument("--context-width", type=int, default=1)
    given = parser.parse_args(arguments)
    green = GreenList(given.key, given.gamma, given.context_width)
    for line in given.answers.read_text("utf-8").splitlines():
        answer = json.loads(line)
        for choice in answer.get("choices", ()):
            found = green.detect(choice["token_ids"])
            print(f"{answer['id']}: z={found.z:.2f} ({found.num_green} of {found.num_scored} green)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
