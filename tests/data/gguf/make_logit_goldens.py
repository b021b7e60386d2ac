"""Regenerates logit_goldens.json: what llama.cpp says comes after 100 lines of tokenizer_lines.json.

Per model: [line number, number of prompt tokens, five best ids, their log-probabilities]. Needs llama-cpp-python.

Usage: python make_logit_goldens.py FOLDER_WITH_MODELS
"""

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama

HERE = Path(__file__).parent
MODELS = ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf")
NUM_LINES, NUM_BEST = 100, 5


def rows(model: Llama, lines: list[str]) -> list[list[object]]:
    found = []
    for number, line in enumerate(lines):
        ids = model.tokenize(line.encode(), add_bos=True, special=True)
        if len(line) < 8 or len(ids) > 200 or len(found) == NUM_LINES:
            continue
        model.reset()
        model.eval(ids)
        logits = model.scores[len(ids) - 1].astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        best = np.argsort(-logprobs, kind="stable")[:NUM_BEST]
        found.append([number, len(ids), best.tolist(), [round(float(logprobs[i]), 4) for i in best]])
    assert len(found) == NUM_LINES
    return found


def main(folder: Path) -> None:
    lines = json.loads((HERE / "tokenizer_lines.json").read_text())
    goldens = {}
    for name in MODELS:
        (path,) = folder.rglob(name)
        model = Llama(str(path), n_ctx=256, logits_all=True, n_threads=1, verbose=False)
        goldens[name] = rows(model, lines)
    lines_of_json = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in goldens.items())
    (HERE / "logit_goldens.json").write_text("{\n" + lines_of_json + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
