"""The kernel that draws on a GPU: its tokens in Triton's interpreter, and that it compiles for real targets. Each in a process of
its own: the interpreter is chosen before `triton` is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (extra `gpu`)"),
    pytest.mark.slow,
]

INTERPRETED = """
import numpy as np, torch
from core.request import SamplingParams
from core.stages.sampler import SamplerContext
from core.testing.sampler import make_logits, make_row, metadata_of
from core.testing.sampler_reference import ReferenceSampler, spec_of
from plugins.samplers.columns import build_columns
from plugins.samplers.draw import Streams, uniforms
from plugins.samplers.standard import Standard
from plugins.samplers.triton_draw import TritonDraw

V = 100  # two blocks, the second of them not full
SHAPES = [
    {}, {"temperature": 1e-5}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.9}, {"top_p": 0.5}, {"top_p": 0.2}, {"top_p": 1e-9},
    {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.8}, {"min_p": 0.02, "top_p": 0.7}, {"top_k": 7, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
]
logits = make_logits(2 * len(SHAPES), V, seed=3)
logits[: len(SHAPES)] = logits[: len(SHAPES)].round()  # ties
logits[3, ::2] = float("-inf")
logits[4] = 0.0
rows = [make_row(f"r{i}", SamplingParams(**SHAPES[i % len(SHAPES)]), seed=i) for i in range(len(logits))]
which = np.array([i for i in range(len(rows)) if i != 7])
wide = torch.cat([logits, logits], 1)[:, :V]  # rows that are not neighbours in memory
found = TritonDraw(64).draw(wide, build_columns(rows, V, "cpu").limits, Streams.of_rows(rows), which)
reference = ReferenceSampler(spec_of(V), lambda *key: float(uniforms(*([part] for part in key[:3]), key[3])[0]))
host = Standard(Standard.Settings(), SamplerContext(spec_of(V))).sample(logits.clone(), metadata_of(rows)).token_ids
for index, token_id in zip(which.tolist(), found.tolist(), strict=True):
    near = reference.acceptable(logits[index].numpy(), rows[index])
    assert token_id in near, (index, rows[index].params, token_id, near)
    assert len(near) > 1 or host[f"r{index}"] == (token_id,)
print("drawn:", len(found))
"""

COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from plugins.samplers.triton_draw import _BLOCK, _NUM_WARPS, _draw_row

SIGNATURE = {
    "logits_ptr": "*fp32", "rows_ptr": "*i64", "values_ptr": "*fp64", "out_ptr": "*i64", "V": "i32", "row_stride": "i32",
    "num_values": "i32", "ATTEMPTS": "constexpr", "BLOCK": "constexpr",
}
backend, arch, lanes, least = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, lanes)
source = ASTSource(fn=_draw_row, signature=SIGNATURE, constexprs={"ATTEMPTS": 4, "BLOCK": _BLOCK})
kernel = triton.compile(source, target=target, options={"num_warps": _NUM_WARPS})
assert kernel.metadata.shared <= least, kernel.metadata.shared
assert len(kernel.asm["cubin" if backend == "cuda" else "hsaco"]) > 10_000
print("compiled for", backend, arch)
"""


def run(code: str, *arguments: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def test_the_kernel_draws_the_tokens_of_the_host() -> None:
    assert run(INTERPRETED, TRITON_INTERPRET="1").strip() == "drawn: 27"


@pytest.mark.parametrize(
    "target", [("cuda", "80", "32", "101376"), ("cuda", "90", "32", "101376"), ("hip", "gfx942", "64", "65536")]
)
def test_it_compiles_ahead_of_time(target: tuple[str, ...], tmp_path: Path) -> None:
    """For targets that are not here; shared memory is checked against the least that any card of the kind has."""
    assert "compiled" in run(COMPILED, *target, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
