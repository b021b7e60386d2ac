"""How an engine is asked for batches of tokens, whichever Python it is in: `core.lab.peers.offline` is the other side.

On stdin a JSON object in each line. The first says what to load; each of the others is a job `{"prompts": [[id, …], …],
"output_lens": [n, …]}`, to be answered with exactly so many tokens, greedily. On stdout a line for each: `{"ready": NAME}`, then
`{"seconds": S}`. What engines print themselves goes to stderr. The end of stdin is the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], list[int]], None]


def main(name: str, load: Callable[[dict[str, Any]], Generate]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines log on stdout
    generate = load(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        generate(job["prompts"], job["output_lens"])
        print(json.dumps({"seconds": time.perf_counter() - started}), file=answers, flush=True)
