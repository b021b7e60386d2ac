"""What of a request tells how long its output may be: cheap to read, and bounded however long the prompt is."""

from __future__ import annotations

import math
import zlib
from array import array
from enum import IntEnum

from core.request import Request

HEAD = 16  # tokens: enough to tell system prompts, and so applications, apart
TAIL = 16  # tokens: beyond what a chat template puts at the end, the end of what the user asks


class Kind(IntEnum):
    """Of a feature. Each kind has weights of its own."""

    ALL = 0
    PROMPT_LEN = 1
    MAX_TOKENS = 2
    TENANT = 3
    HEAD = 4
    HEAD_AND_LEN = 5
    PROMPT = 6  # its length and both ends: nearly always the whole prompt
    TAIL_TOKEN = 7  # one feature for each


Feature = tuple[int, int]  # kind, and a 32 bit key, 1 or more


def features_of(request: Request) -> list[Feature]:
    """At most one of each kind, and TAIL of the last. The same in each process and run."""
    prompt = request.prompt_token_ids
    length = _half_octaves(len(prompt))
    tail = prompt[-TAIL:]
    tenant = zlib.crc32(request.tenant.encode(errors="replace"))
    head = _crc(prompt[:HEAD], tenant)
    found: list[Feature] = [
        (Kind.ALL, 1),
        (Kind.PROMPT_LEN, length),
        (Kind.MAX_TOKENS, _half_octaves(request.params.max_tokens)),
        (Kind.TENANT, tenant or 1),
        (Kind.HEAD, head),
        (Kind.HEAD_AND_LEN, (head ^ (length * 0x9E3779B1)) & 0xFFFFFFFF or 1),
        (Kind.PROMPT, _crc(tail, head ^ len(prompt))),
    ]
    found += [(Kind.TAIL_TOKEN, (token & 0xFFFFFFF) + 1) for token in dict.fromkeys(tail)]
    return found


def _half_octaves(count: int) -> int:
    """1, 2, 3 … for 0, 1, 2, 3–4, 5–6, 7–10 …: the ratio between two neighbours is the root of two."""
    return 1 + round(2 * math.log2(1 + count))


def _crc(token_ids: list[int], start: int) -> int:
    return zlib.crc32(array("q", token_ids).tobytes(), start & 0xFFFFFFFF) or 1
