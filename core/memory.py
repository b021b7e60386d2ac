"""Host memory that a process may still take: what the machine has and what its container allows. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def num_bytes(text: str) -> int:
    """Of a size such as 64MiB or 2GiB. Raises ValueError for another text, and for nothing."""
    number, unit = text[:-3], text[-3:]
    try:
        found = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ValueError("write a size such as 512MiB or 2GiB")
    return found


@dataclass(frozen=True, slots=True)
class _Group:
    """Where one version of Linux control groups keeps its numbers, below `folder`."""

    controller: str  # second field of its line in /proc/self/cgroup; empty for version 2
    folder: str
    limit: str
    usage: str
    reclaimable: str  # line of memory.stat: file pages that the kernel drops before it refuses an allocation


_GROUPS = (
    _Group("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    _Group("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be had without swapping and without meeting a container's limit; None where nothing says.

    `root` is where /proc and /sys lie. The container's own group and all groups above it count.
    """
    known = [*_machine(root), *(left for group in _GROUPS for left in _group_left(root, group))]
    return max(min(known), 0) if known else None


def _machine(root: Path) -> Iterator[int]:
    found = _field(root / "proc/meminfo", "MemAvailable:")
    if found is not None:
        yield found * 1024
    elif root == Path("/") and hasattr(os, "sysconf"):  # no Linux: half of what is built in
        try:
            yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (OSError, ValueError):
            return


def _group_left(root: Path, group: _Group) -> Iterator[int]:
    """What each limit on the way up to the hierarchy's root leaves."""
    top = root / group.folder
    own = _own_group(root, group.controller)
    for folder in (top / own, *(top / parent for parent in own.parents)):  # inside a container only `top` may exist
        limit, usage = _number(folder / group.limit), _number(folder / group.usage)
        if limit is not None and usage is not None:
            yield limit - usage + (_field(folder / "memory.stat", group.reclaimable) or 0)


def _own_group(root: Path, controller: str) -> Path:
    """Path of this process's group, relative to the hierarchy's root."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return Path(path.lstrip("/"))
    return Path()


def _field(path: Path, name: str) -> int | None:
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[:1] == [name]), None)


def _number(path: Path) -> int | None:
    try:
        return int("".join(_lines(path)))
    except ValueError:  # no such file, or "max"
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
