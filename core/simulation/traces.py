"""Traces of real services, read row by row.

- azure: Azure LLM inference traces (github.com/Azure/AzurePublicDataset, 2023 and 2024), CSV with a header:
  TIMESTAMP (a date and time), ContextTokens, GeneratedTokens.
- burstgpt: BurstGPT (github.com/HPMLL/BurstGPT), CSV with a header: Timestamp (seconds), Model, Request tokens,
  Response tokens, Total tokens, Log Type, and in later releases Session ID and Elapsed time.
- mooncake: Mooncake (github.com/kvcache-ai/Mooncake), one JSON object per line: timestamp (milliseconds), input_length,
  output_length, and hash_ids, one per 512 tokens of the prompt: equal ids at equal places are equal content.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from math import isfinite
from typing import Any, TextIO

import msgspec
import numpy as np

from core.errors import ConfigError, near_matches, shown
from core.simulation.records import Arrival
from core.simulation.synthetic import CHUNK, Shape, Streams, bounded, drawn_priorities, tenant_names, with_content

FIELDS: Mapping[str, tuple[str, str, str]] = {  # time, prompt and output of a CSV format
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}
GZIP = b"\x1f\x8b"
MAX_TOKENS = 10_000_000  # of one request; more is no number of tokens
MAX_LINE = 1 << 22  # characters
NUM_SORTED = 4096  # rows that may be out of order among each other


@dataclass(frozen=True, slots=True)
class Source:
    """Which rows of which file. Seconds count from its first row."""

    path: str
    format: str
    speedup: float = 1.0
    start_s: float = 0.0
    end_s: float | None = None
    tenant_column: str | None = None
    hash_block_size: int = 512


@dataclass(frozen=True, slots=True, order=True)
class TraceRow:
    """One row. Rows are ordered by time, then by line."""

    time_s: float
    line: int
    num_prompt_tokens: int = field(compare=False)
    num_output_tokens: int = field(compare=False)
    tenant: str | None = field(default=None, compare=False)
    block_hashes: tuple[int, ...] = field(default=(), compare=False)


class Trace:
    """A `core.simulation.records.Traffic`. Requests without a prompt or an output are left out: they had failed.

    Raises ConfigError that names file, line and field, while it is read, and where nothing of it is chosen.
    `left_out`: how many rows that were come to are no requests, by why. Of the latest iteration.
    """

    def __init__(self, source: Source, shape: Shape):
        self._source = source
        self._shape = shape
        self.left_out: Counter[str] = Counter()

    @property
    def shares_content(self) -> bool:
        return self._source.format == "mooncake" or bool(self._shape.system_prompts or self._shape.followups)

    def __iter__(self) -> Iterator[Arrival]:
        streams = Streams(self._shape.seed)
        arrivals = self._arrivals(streams)
        if self.shares_content and self._source.format != "mooncake":
            return iter(with_content(arrivals, self._shape, streams))
        return arrivals

    def _arrivals(self, streams: Streams) -> Iterator[Arrival]:
        self.left_out = Counter()
        rows = islice(chosen(self._source, self.left_out), self._shape.num_requests)
        while chunk := list(islice(rows, CHUNK)):
            yield from self._chunk(chunk, streams)

    def _chunk(self, rows: Sequence[TraceRow], streams: Streams) -> Iterator[Arrival]:
        shape, source = self._shape, self._source
        bounds, outputs = bounded(np.array([row.num_output_tokens for row in rows], np.int64), shape.bound)
        tenants = tenant_names(shape.tenant_shares, streams.tenant, len(rows))
        priorities = drawn_priorities(shape.priority_shares or (1.0,), streams.priority, len(rows))
        labels = zip(rows, outputs.tolist(), bounds.tolist(), tenants, priorities, strict=True)
        for row, output, bound, tenant, priority in labels:
            yield Arrival(
                (row.time_s - source.start_s) / source.speedup,
                row.num_prompt_tokens,
                output,
                bound,
                tenant if row.tenant is None else row.tenant,
                priority,
                shape.ttl_s,
                row.block_hashes,
                source.hash_block_size,
            )


def chosen(source: Source, left_out: Counter[str]) -> Iterator[TraceRow]:
    """The requests between `start_s` and `end_s`, by time, which counts from the first row of the file that is a request.

    `left_out` counts the other rows there, by what they lack. Raises ConfigError where no request is left.
    """
    first: float | None = None
    last, is_empty = 0.0, True
    for row in in_order(_rows(source), source.path):
        why = _lacks(row)
        first = row.time_s if first is None and not why else first
        at = 0.0 if first is None else row.time_s - first
        if source.end_s is not None and at >= source.end_s:
            break
        last = at
        if at < source.start_s:
            continue
        if why:
            left_out[why] += 1
            continue
        is_empty = False
        yield replace(row, time_s=at)
    if is_empty:
        raise _nothing(source, left_out, last)


def _rows(source: Source) -> Iterator[TraceRow]:
    with _opened(source.path) as lines:
        yield from TRACES[source.format](lines, source)


def _lacks(row: TraceRow) -> str:
    """Why this is no request; empty where it is one."""
    if not row.num_prompt_tokens:
        return "without a prompt"
    return "" if row.num_output_tokens else "without an output"


def _nothing(source: Source, left_out: Counter[str], last: float) -> ConfigError:
    """`last`: seconds of the last row that was looked at."""
    if rows := ", ".join(f"{number} {why}" for why, number in left_out.items()):
        return ConfigError(f"path={source.path}: no request in it was answered ({rows})", "path")
    if not source.start_s:
        return ConfigError(f"path={source.path}: there is no row in it; is it the right file?", "path")
    part = f"start_s={source.start_s:g}" + (f" end_s={source.end_s:g}" if source.end_s is not None else "")
    return ConfigError(
        f"{part}: no request of {source.path} is there (the last one before comes at {last:g} s); choose another part",
        "start_s",
    )


def in_order(rows: Iterable[TraceRow], path: str) -> Iterator[TraceRow]:
    """By time. Raises ConfigError for a row that comes more than `NUM_SORTED` rows too late."""
    heap: list[TraceRow] = []
    last = -float("inf")
    for row in rows:
        if row.time_s < last:
            raise ConfigError(
                f"{path}:{row.line}: its time is before that of earlier rows; sort the file by time", "path"
            )
        heapq.heappush(heap, row)
        if len(heap) > NUM_SORTED:
            last = heap[0].time_s
            yield heapq.heappop(heap)
    yield from sorted(heap)


@contextmanager
def _opened(path: str) -> Iterator[TextIO]:
    """Text of a file, plain or gzip. What goes wrong with the file while it is read is a ConfigError too."""
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == GZIP
        opener: Any = gzip.open if packed else open
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as lines:
            yield lines
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"path={path}: the gzip data is damaged ({error}); fetch the file again", "path") from None
    except OSError as error:
        raise ConfigError(f"path={path}: {error.strerror or error}", "path") from None


# Formats


def _lines(file: TextIO, path: str) -> Iterator[str]:
    """Of bounded length: a line of a compressed file may be longer than memory."""
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise ConfigError(
                f"path={path}:{number}: a line of more than {MAX_LINE} characters; is it a trace?", "path"
            )
        yield line


def _azure(lines: TextIO, source: Source) -> Iterator[TraceRow]:
    return _csv(lines, source, FIELDS["azure"], _moment)


def _burstgpt(lines: TextIO, source: Source) -> Iterator[TraceRow]:
    return _csv(lines, source, FIELDS["burstgpt"], float)


def _csv(
    lines: TextIO, source: Source, names: tuple[str, str, str], time: Callable[[str], float]
) -> Iterator[TraceRow]:
    """Columns are found by the header, in any order; spaces, underscores and case do not count."""
    rows = csv.reader(_lines(lines, source.path))
    try:
        header = {_folded(name): index for index, name in enumerate(next(rows, []))}
        wanted = [*names, source.tenant_column] if source.tenant_column else list(names)
        for name in wanted:
            if _folded(name) not in header:
                hint = _other_format(header, source.format) or near_matches(_folded(name), header)
                raise ConfigError(f"{source.path}:1: field {name!r} is not in the header{hint}", "path")
        columns = [header[_folded(name)] for name in wanted]
        for cells in rows:
            if cells:
                yield _csv_row(cells, columns, wanted, time, f"{source.path}:{rows.line_num}", rows.line_num)
    except csv.Error as error:
        raise ConfigError(f"{source.path}:{rows.line_num}: {error}", "path") from None


def _csv_row(
    cells: Sequence[str],
    columns: Sequence[int],
    names: Sequence[str],
    time: Callable[[str], float],
    where: str,
    line: int,
) -> TraceRow:
    if max(columns) >= len(cells):
        missing = names[columns.index(max(columns))]
        raise ConfigError(f"{where}: field {missing!r} is missing: the row has {len(cells)} fields", "path")
    found = [cells[column].strip() for column in columns]
    return TraceRow(
        _number(found[0], time, names[0], where),
        line,
        _num_tokens(found[1], names[1], where),
        _num_tokens(found[2], names[2], where),
        found[3] if len(found) > 3 else None,
    )


def _other_format(header: Collection[str], own: str) -> str:
    """What to write where the first line (its fields, folded) is that of another format."""
    found = [name for name, fields in FIELDS.items() if all(_folded(field) in header for field in fields)]
    if not found and any(field.startswith("{") for field in header):
        found = ["mooncake"]
    return f"; it looks like a trace of {found[0]}: write workload={found[0]}" if found and found[0] != own else ""


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _mooncake(lines: TextIO, source: Source) -> Iterator[TraceRow]:
    as_row, as_any = msgspec.json.Decoder(_MooncakeRow), msgspec.json.Decoder(dict[str, Any])
    for number, line in enumerate(_lines(lines, source.path), 1):
        if not line.strip():
            continue
        where = f"{source.path}:{number}"
        try:
            row = as_row.decode(line)
            tenant = as_any.decode(line).get(source.tenant_column) if source.tenant_column else None
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: field {_field(str(error))}", "path") from None
        except (msgspec.DecodeError, RecursionError) as error:
            hint = _other_format({_folded(name) for name in line.strip().split(",")}, source.format)
            raise ConfigError(f"{where}: not a JSON object ({error}){hint}", "path") from None
        if source.tenant_column and tenant is None:
            raise ConfigError(f"{where}: field {source.tenant_column!r} is missing", "path")
        yield _mooncake_row(row, source, where, number, tenant)


def _mooncake_row(row: _MooncakeRow, source: Source, where: str, line: int, tenant: Any) -> TraceRow:
    num_prompt = _num_tokens(row.input_length, "input_length", where)
    num_output = _num_tokens(row.output_length, "output_length", where)
    num_blocks = -(-num_prompt // source.hash_block_size)
    if row.hash_ids and len(row.hash_ids) != num_blocks:
        raise ConfigError(
            f"{where}: field 'hash_ids' has {len(row.hash_ids)} ids where {num_prompt} tokens in blocks of "
            f"{source.hash_block_size} have {num_blocks}; is hash_block_size right?",
            "path",
        )
    seconds = _number(row.timestamp, float, "timestamp", where) / 1000
    return TraceRow(seconds, line, num_prompt, num_output, None if tenant is None else str(tenant), row.hash_ids)


# Fields


def _num_tokens(given: str | int, name: str, where: str) -> int:
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 <= number <= MAX_TOKENS or number != int(number):
        raise ConfigError(f"{where}: field {name!r} is no number of tokens (got {shown(given)})", "path")
    return int(number)


def _number(given: Any, parse: Callable[[Any], float], name: str, where: str) -> float:
    try:
        number = parse(given)
    except (ValueError, OverflowError):
        number = float("nan")
    if not isfinite(number):
        raise ConfigError(f"{where}: field {name!r} is no time (got {shown(given)})", "path")
    return number


def _moment(text: str) -> float:
    """Seconds of a date and time, whose fraction may have any number of digits; without a zone it is UTC."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _folded(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter not in " _-")


def _field(problem: str) -> str:
    """`Expected `int`, got `str` - at `$.x`` with the field's name first."""
    text, _, place = problem.partition(" - at `$.")
    return f"{place.rstrip('`')!r}: {text}" if place else text


TRACES: Mapping[str, Callable[[TextIO, Source], Iterator[TraceRow]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "burstgpt": _burstgpt,
}
