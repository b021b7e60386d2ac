"""One request of a workload, and what its client saw of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Answered with exactly `output_len` tokens, through the end of a text."""

    prompt_token_ids: list[int]
    output_len: int
    schema: Mapping[str, Any] | None = None  # JSON schema of the answer
    temperature: float = 0.0
    seed: int | None = None


@dataclass(slots=True)
class Call:
    """Moments are `time.perf_counter` seconds. It fills while the answer comes, so that others may watch."""

    item: WorkItem
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of what brought tokens: often one, sometimes several
    num_tokens: int = 0  # of the answer
    num_first_tokens: int = 1  # that came with the first arrival: a grammar may force several
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None: not told
    ended: float = 0.0
    error: str = ""  # why there is no whole answer

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        num_later = self.num_tokens - self.num_first_tokens
        if num_later < 1 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / num_later

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Start and end of each wait between two arrivals."""
        return list(zip(self.arrivals, self.arrivals[1:], strict=False))


class Target(Protocol):
    """What answers: the engine of this process, or a server."""

    @property
    def vocab_size(self) -> int:
        """Token ids below it may stand in a prompt."""
        ...

    async def call(self, call: Call) -> None:
        """Send it and take its answer in. Raises no error of the one who answers: that is `call.error`."""
        ...

    def counting(self) -> None:
        """What comes now is counted; what was before it was to warm up."""
        ...
