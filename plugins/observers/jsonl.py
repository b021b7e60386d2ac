"""`observers: jsonl`. A file of JSON lines: one per ended request, and per step where asked for."""

from __future__ import annotations

import errno
import os
import time
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from core.components import CHAINS
from core.errors import ConfigError
from core.observers import ObserverContext
from core.outputs import RequestRecord, StageSpan, StepStats
from core.version import nonet_version
from plugins.observers.wall_clock import WallClock

MAX_HELD_BYTES = 1 << 20
PRIVATE = 0o600  # a trace says who asked how much


class JsonLines:
    """Appends. Each line has `kind` (start, request, step) and `time` (of day, in seconds); null is what never came.
    The `start` line says which pipeline the next lines are of; it is written once the front runs, so a start that was
    refused leaves none.

    Past `max_bytes` the file becomes `<path>.1`, in place of the one before. A failed write loses its lines, and counts
    as a failure of the observer. Raises ConfigError where the file cannot be opened.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        path: Path = Path("nonet-trace.jsonl")
        requests: bool = Field(default=True, description="a line per ended request")
        steps: bool = Field(default=False, description="a line per engine step")
        flush_interval: float = Field(default=1.0, ge=0, description="seconds that a line may wait in memory")
        max_bytes: int = Field(default=256 << 20, ge=1 << 12, description="size at which a new file is begun")

    def __init__(self, settings: Settings, context: ObserverContext):
        self._settings = settings
        self._start = {"kind": "start", "version": nonet_version(), **_pipeline(context)}
        self._lines: list[bytes] = []
        self._flushed_at = time.monotonic()
        self._encode = msgspec.json.Encoder().encode
        self._held = 0  # bytes in `_lines`
        self._front_runs = False
        self._begun = False  # the start line is in the file
        self._size = 0
        try:
            self._file = _appending(settings.path)
        except OSError as error:
            advice = "name another with observers.jsonl.path=…"
            raise ConfigError(
                f"observers.jsonl.path: cannot write {settings.path}: {error.strerror}; {advice}"
            ) from None

    def step_finished(self, stats: StepStats) -> None:
        self._front_runs = True
        if self._settings.steps and stats.num_requests:
            self._add("step", time.time(), msgspec.structs.asdict(stats))

    def request_finished(self, record: RequestRecord) -> None:
        self._front_runs = True
        if self._settings.requests:
            clock = WallClock()
            ended = clock.seconds(record.spans[-1].end) if record.spans else time.time()
            self._add("request", ended, request_row(record, clock))

    def flush(self) -> None:
        if self._front_runs and not self._begun:
            self._begin()
        if self._lines and time.monotonic() - self._flushed_at >= self._settings.flush_interval:
            self._write()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._write()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _add(self, kind: str, at: float, row: dict[str, Any]) -> None:
        if self._file.closed:
            return
        self._lines.append(self._encode({"kind": kind, "time": at, **row}) + b"\n")
        self._held += len(self._lines[-1])
        if self._held > MAX_HELD_BYTES:
            self._write()

    def _write(self) -> None:
        data = b"".join(self._lines)
        self._lines.clear()
        self._held = 0
        self._flushed_at = time.monotonic()
        if not self._front_runs:
            return
        if not self._begun:
            self._begin()
        if self._size and self._size + len(data) > self._settings.max_bytes:
            self._rotate()
        self._size += _written(self._file, data)

    def _rotate(self) -> None:
        path = self._settings.path
        os.replace(path, path.with_name(f"{path.name}.1"))
        file = _appending(path)
        self._file.close()
        self._file = file
        self._begin()

    def _begin(self) -> None:
        """Say which pipeline the lines are of, on a line of its own whatever was there."""
        size = self._file.seek(0, os.SEEK_END)
        line = self._encode({**self._start, "time": time.time()}) + b"\n"
        head = b"" if _ends_with_newline(self._settings.path, size) else b"\n"
        self._size = size + _written(self._file, head + line)
        self._begun = True


def request_row(record: RequestRecord, clock: WallClock) -> dict[str, Any]:
    """Times in seconds."""
    timings, usage = record.timings, record.usage
    return {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "operation": record.operation,
        "finish_reasons": record.finish_reasons,
        "error": record.error,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "num_preemptions": record.num_preemptions,
        "queue_s": timings.queue,
        "ttft_s": timings.ttft,
        "tpot_s": timings.tpot,
        "e2e_s": timings.e2e,
        "trace_context": record.trace_context,
        "spans": [_span_row(span, clock) for span in record.spans],
    }


def _span_row(span: StageSpan, clock: WallClock) -> dict[str, Any]:
    start, end = clock.seconds(span.start), clock.seconds(span.end)
    return {"stage": span.stage, "start": start, "end": end, "busy_s": span.busy_s}


def _pipeline(context: ObserverContext) -> dict[str, Any]:
    """By group who it is; a chain has a list, in its order."""
    parts: dict[str, str | list[str]] = {group: [] for group in CHAINS}
    for part in context.description.parts:
        who = f"{part.provided.component.name} ({part.wheel})"
        chain = parts.get(part.group)
        if isinstance(chain, list):
            chain.append(who)
        else:
            parts[part.group] = who
    return {"model": context.model.name, "parts": parts}


def _appending(path: Path) -> FileIO:
    """Unbuffered: what is held back is ours to count. Raises OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    return FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags, PRIVATE))


def _written(file: FileIO, data: bytes) -> int:
    """Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    return len(data)


def _ends_with_newline(path: Path, size: int) -> bool:
    """A process that was killed may have left half a line."""
    if size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
