"""Kernels keep their sums in registers: one that goes to the stack and back costs more than the product it belongs to."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from plugins.cpu.library import FLAGS, INSTRUCTIONS, MAIN, SOURCES

KERNELS = {
    "avx512_bf16": ("tile_float32", "tile_bfloat16", "tile_int8", "tile_int4", "in_blocks", "ChunkWork"),
    "avx512": ("tile_bfloat16", "tile_int8", "tile_int4", "in_blocks", "ChunkWork"),
    "avx2": ("tile_float32", "tile_bfloat16", "tile_int4", "in_blocks", "ChunkWork"),  # tile_int8: between two groups
}
STACK = re.compile(r"%[yz]mm\d+.*\(%r[sb]p|\(%r[sb]p[^)]*\).*%[yz]mm\d+")


def spills(assembly: str) -> Counter[str]:
    """Instructions that move a whole register to or from the stack, by function."""
    found, function = Counter[str](), ""
    for line in assembly.splitlines():
        if label := re.match(r"(_Z\w+):", line):
            function = label[1]
        elif STACK.search(line):
            found[function] += 1
    return found


@pytest.mark.parametrize("instructions", KERNELS)
def test_no_kernel_spills(tmp_path: Path, instructions: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    target = tmp_path / "program.s"
    flags = [flag for flag in (*FLAGS, *INSTRUCTIONS[instructions]) if flag != "-shared"]
    done = subprocess.run(
        [compiler, *flags, "-S", "-o", str(target), str(SOURCES / MAIN)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"g++ cannot compile for this: {done.stderr[-200:]}")
    found = spills(target.read_text())
    kernels = {name: count for name, count in found.items() if any(kernel in name for kernel in KERNELS[instructions])}
    assert not kernels, f"to and from the stack: {kernels}"


def test_a_spill_is_seen() -> None:
    lines = [
        "_ZN5nonet1fEv:",
        "\tvmovdqu64\t%zmm3, 64(%rsp)",
        "\tvaddps\t128(%rsp), %ymm1, %ymm2",
        "_Zg:",
        "\tvmovaps (%rax), %zmm1",
    ]
    assert spills("\n".join(lines)) == {"_ZN5nonet1fEv": 2}
