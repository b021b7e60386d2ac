"""What a run keeps of its requests and of its course: columns that grow by a row per request, and a thinned-out history."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from typing import Final

import numpy as np

from core.errors import OverloadedError, RequestError, printable
from core.simulation.records import Arrival, Finish, Floats, Ints, Outcomes, Timeline

NAN: Final = float("nan")
MAX_MOMENTS: Final = 1024
NUMBER: Final = re.compile(r"\d+(\.\d+)?")
MAX_REASONS: Final = 20  # texts that are told apart
OTHER_REASONS: Final = "other reasons"


class Columns:
    """One row per request, in order of arrival."""

    def __init__(self) -> None:
        self.arrival_s, self.scheduled_s, self.first_token_s, self.end_s = (array("d") for _ in range(4))
        self.num_prompt, self.num_output, self.num_cached, self.num_preemptions = (array("q") for _ in range(4))
        self.finish, self.tenant = array("q"), array("q")
        self._tenants: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.arrival_s)

    def add(self, arrival: Arrival) -> int:
        """The row of a request that has just arrived."""
        self.arrival_s.append(arrival.time_s)
        self.num_prompt.append(arrival.num_prompt_tokens)
        self.tenant.append(self._tenants.setdefault(arrival.tenant, len(self._tenants)))
        self.scheduled_s.append(NAN)
        self.first_token_s.append(NAN)
        self.end_s.append(NAN)
        self.num_output.append(0)
        self.num_cached.append(0)
        self.num_preemptions.append(0)
        self.finish.append(Finish.ERROR)
        return len(self.arrival_s) - 1

    def outcomes(self) -> Outcomes:
        return Outcomes(
            arrival_s=_floats(self.arrival_s),
            scheduled_s=_floats(self.scheduled_s),
            first_token_s=_floats(self.first_token_s),
            end_s=_floats(self.end_s),
            num_prompt_tokens=_ints(self.num_prompt),
            num_output_tokens=_ints(self.num_output),
            num_cached_tokens=_ints(self.num_cached),
            num_preemptions=_ints(self.num_preemptions),
            finish=_ints(self.finish),
            tenant=_ints(self.tenant),
            tenants=tuple(self._tenants),
        )


class Reasons:
    """Why requests were not served: texts in which numbers do not count, by what became of the request."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def add(self, finish: Finish, text: str) -> None:
        counts = self._counts.setdefault(finish.name.lower(), Counter())
        reason = NUMBER.sub("N", printable(text)).removesuffix("; try again later")
        counts[reason if reason in counts or len(counts) < MAX_REASONS else OTHER_REASONS] += 1

    def counts(self) -> dict[str, dict[str, int]]:
        """Most frequent first."""
        return {finish: dict(counts.most_common()) for finish, counts in self._counts.items()}


def explained(error: RequestError | OverloadedError) -> str:
    """Why admission turned a request away, with the code that a client would read where it says more than that it is wrong."""
    code = error.code if isinstance(error, RequestError) else "invalid_value"
    return error.message if code == "invalid_value" else f"{code}: {error.message}"


class History:
    """The state at moments that are at least `interval` apart; where they become too many, every other one is dropped."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, int, float]] = []
        self._interval = 0.001
        self.next_s = 0.0

    def add(self, time_s: float, running: int, waiting: int, kv_used: float) -> None:
        self._rows.append((time_s, running, waiting, kv_used))
        if len(self._rows) >= MAX_MOMENTS:
            self._rows = self._rows[::2]
            self._interval *= 2
        self.next_s = self._rows[-1][0] + self._interval

    def timeline(self) -> Timeline:
        times, running, waiting, kv = zip(*self._rows, strict=True) if self._rows else ((), (), (), ())
        return Timeline(
            np.array(times, float), np.array(running, np.int64), np.array(waiting, np.int64), np.array(kv, float)
        )


def _floats(column: array[float]) -> Floats:
    return np.array(column, dtype=np.float64)


def _ints(column: array[int]) -> Ints:
    return np.array(column, dtype=np.int64)
