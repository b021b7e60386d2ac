"""Free memory of the host: the least of what the machine and every container limit leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.memory import free_host_memory

GIB = 1 << 30


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(available: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: {2 * available // 1024} kB\nMemAvailable: {available // 1024} kB\n"}


def v2(folder: str, limit: int | str, usage: int, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{usage}\n",
        f"{at}/memory.stat": f"anon 1\ninactive_file {inactive}\n",
    }


def test_without_a_container_the_machine_says(tmp_path: Path) -> None:
    assert free_host_memory(put(tmp_path, meminfo(8 * GIB))) == 8 * GIB


def test_nothing_known(tmp_path: Path) -> None:
    assert free_host_memory(tmp_path) is None


@pytest.mark.parametrize("cgroup", ["0::/\n", "0::/not/mounted/here\n", ""])
def test_a_container_limit_and_its_page_cache(tmp_path: Path, cgroup: str) -> None:
    """Files that were read (weights) fill the container, and are given back before an allocation fails."""
    files = {**meminfo(64 * GIB), "proc/self/cgroup": cgroup, **v2("", 4 * GIB, 3 * GIB, inactive=2 * GIB)}
    assert free_host_memory(put(tmp_path, files)) == 3 * GIB


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        **meminfo(64 * GIB),
        "proc/self/cgroup": "0::/pod/app\n",
        **v2("pod/app", "max", GIB),
        **v2("pod", 4 * GIB, GIB),
    }
    assert free_host_memory(put(tmp_path, files)) == 3 * GIB


def test_version_one_groups(tmp_path: Path) -> None:
    files = {
        **meminfo(64 * GIB),
        "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/box\n0::/\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/box/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{30 * GIB}\n",
    }
    assert free_host_memory(put(tmp_path, files)) == 2 * GIB


def test_over_the_limit_is_nothing_rather_than_less(tmp_path: Path) -> None:
    files = {**meminfo(64 * GIB), **v2("", GIB, 2 * GIB)}
    assert free_host_memory(put(tmp_path, files)) == 0


def test_this_machine_says_something() -> None:
    free = free_host_memory()
    assert free is not None and free > 0
