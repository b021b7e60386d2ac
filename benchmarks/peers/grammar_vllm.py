"""What a grammar costs vLLM, as `core.lab.grammar_peers` asks it; run with the Python that has vLLM.

On stdin a JSON object {model, prompts, schema, heavy, num_tokens, heavy_tokens, rounds}; on stdout, in a line of its
own, seconds per token of each round: {"plain": […], "constrained": […], "heavy": […]}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def params_of(job: dict[str, Any], kind: str, seed: int) -> SamplingParams:
    if kind == "plain":
        return SamplingParams(max_tokens=job["num_tokens"], ignore_eos=True, temperature=1.0, seed=seed)
    schema = job["schema"] if kind == "constrained" else job["heavy"]
    most = job["num_tokens"] if kind == "constrained" else job["heavy_tokens"]
    grammar = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    return SamplingParams(max_tokens=most, temperature=1.0, seed=seed, structured_outputs=grammar)


def seconds_per_token(llm: LLM, job: dict[str, Any], kind: str) -> float:
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    params = [params_of(job, kind, seed) for seed in range(len(prompts))]
    started = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - started
    return took / max(len(answer.outputs[0].token_ids) for answer in answers)


def main() -> None:
    job = json.load(sys.stdin)
    llm = LLM(
        model=job["model"],
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=len(job["prompts"]),
        enable_prefix_caching=False,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    times: dict[str, list[float]] = {"plain": [], "constrained": [], "heavy": []}
    for number in range(job["rounds"] + 1):
        for kind, taken in times.items():
            took = seconds_per_token(llm, job, kind)
            if number:  # the first compiles, and warms up
                taken.append(took)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
