"""Where the time of steps goes, operation by operation: `model.profile=true`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from core.model.roofline import OperationTime
from plugins.cpu.program import Program
from plugins.cpu.records import Code, MatrixRecord, Op

DECODES, PROMPTS = "decodes", "prompts"


class Profile:
    """Seconds that the first thread took for each operation of a program, of steps with and without prompts."""

    def __init__(self, program: Program):
        self._names = [_name(op, program.matrices) for op in program.ops] + ["rotations"]
        self._seconds = {kind: (ctypes.c_double * (2 * len(self._names)))() for kind in (DECODES, PROMPTS)}
        self._num_steps = dict.fromkeys(self._seconds, 0)

    def counting(self, only_decodes: bool) -> int:
        """Address for `StepRecord.seconds` of a step."""
        kind = DECODES if only_decodes else PROMPTS
        self._num_steps[kind] += 1
        return ctypes.addressof(self._seconds[kind])

    def times(self) -> tuple[OperationTime, ...]:
        """Equal operations added up, in the order in which they run."""
        return tuple(time for kind in self._seconds for time in self._of(kind))

    def _of(self, kind: str) -> list[OperationTime]:
        seconds, count = self._seconds[kind], self._num_steps[kind]
        found: dict[str, OperationTime] = {}
        for index, name in enumerate(self._names):
            known = found.get(name, OperationTime(f"{kind}: {name}", 0, 0.0, 0.0))
            took, waited = known.seconds + seconds[2 * index], known.waited_s + seconds[2 * index + 1]
            found[name] = OperationTime(known.name, known.count + count, took, waited)
        return list(found.values()) if count else []


def _name(op: Op, matrices: Sequence[MatrixRecord]) -> str:
    name = Code(op.code).name.lower()
    if op.code not in (Code.LINEAR, Code.GATED, Code.LOGITS):
        return name
    return f"{name} {matrices[op.matrix].n} x {matrices[op.matrix].k}"
