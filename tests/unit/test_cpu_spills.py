"""Kernels keep their sums in registers: one that goes to the stack and back costs more than the product it belongs to."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugins.cpu.library import FLAGS, INSTRUCTIONS, MAIN, SOURCES

KERNELS = ("tile_float32", "tile_bfloat16", "tile_int8", "tile_int4", "ChunkWork")
STACK = re.compile(r"%[yz]mm\d+.*\(%r[sb]p|\(%r[sb]p[^)]*\).*%[yz]mm\d+")
PRODUCT = re.compile(r"\tv(fn?madd|pmadd|pdp|dpbf)")
WHOLE = {
    "avx512_bf16": ("tile_float32", "tile_bfloat16", "tile_int8", "tile_int4", "in_blocks"),
    "avx2": ("tile_float32", "tile_bfloat16"),
}
"""Functions without any move to or from the stack. Others have some, of constants, outside of what repeats."""
ALLOWED = {
    ("avx512_bf16", "ChunkWork"): 14,  # Int8Cache, six rows of two blocks: 24 sums of two registers
    ("avx2", "ChunkWork"): 4,  # BfloatCache, two rows of two blocks
    ("avx2", "tile_int8"): 1,  # the mask of even bytes
}
"""Moves in the innermost loops of products, at most."""


def by_function(assembly: str) -> Iterator[tuple[str, str]]:
    """Each line with the function it belongs to."""
    function = ""
    for line in assembly.splitlines():
        if label := re.match(r"(_Z[\w.$]+):", line):
            function = label[1]
        yield function, line


def spills(assembly: str) -> Counter[str]:
    """Instructions that move a whole register to or from the stack, by function."""
    return Counter(function for function, line in by_function(assembly) if STACK.search(line))


def loop_spills(assembly: str) -> dict[str, int]:
    """The same within loops that have products and no other label: the most of each function's, 0 where there are none."""
    found = dict[str, int]()
    label, body = "", list[str]()
    for function, line in by_function(assembly):
        if start := re.match(r"(\.L\w+):", line):
            label, body = start[1], []
        elif re.match(rf"\tj\w+\t{re.escape(label)}$", line) and any(map(PRODUCT.match, body)):
            found[function] = max(found.get(function, 0), sum(bool(STACK.search(one)) for one in body))
        body.append(line)
    return found


def assembly_of(instructions: str, folder: Path) -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    target = folder / "program.s"
    flags = [flag for flag in (*FLAGS, *INSTRUCTIONS[instructions]) if flag != "-shared"]
    done = subprocess.run(
        [compiler, *flags, "-S", "-o", str(target), str(SOURCES / MAIN)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"g++ cannot compile for this: {done.stderr[-200:]}")
    return target.read_text()


@pytest.mark.parametrize("instructions", ["avx512_bf16", "avx2"])  # avx512 without VNNI has 18 in tile_int8<6>
def test_no_kernel_spills(tmp_path: Path, instructions: str) -> None:
    assembly = assembly_of(instructions, tmp_path)
    whole = {name: count for name, count in spills(assembly).items() if any(one in name for one in WHOLE[instructions])}
    assert not whole, f"to and from the stack: {whole}"
    loops = loop_spills(assembly)
    for kernel in ("tile_float32", "tile_bfloat16", "ChunkWork"):
        assert any(kernel in name for name in loops), f"no loop of {kernel} was seen"
    for name, count in loops.items():
        kernel = next((one for one in KERNELS if one in name), "")
        assert not kernel or count <= ALLOWED.get((instructions, kernel), 0), f"{count} to and from the stack in {name}"


def test_a_spill_is_seen() -> None:
    lines = [
        "_ZN5nonet1fEv.isra.0:",
        ".L1:",
        "\tvmovdqu64\t%zmm3, 64(%rsp)",
        "\tvaddps\t128(%rsp), %ymm1, %ymm2",
        "\tvfmadd231ps\t%ymm1, %ymm2, %ymm3",
        "\tjne\t.L1",
        "_Zg:",
        "\tvmovaps (%rax), %zmm1",
    ]
    assert spills("\n".join(lines)) == {"_ZN5nonet1fEv.isra.0": 2}
    assert loop_spills("\n".join(lines)) == {"_ZN5nonet1fEv.isra.0": 2}
