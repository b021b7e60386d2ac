"""OpenVINO GenAI with continuous batching, asked as `offline.py` says.

`model` is a GGUF file, or a folder that `optimum-cli export openvino` made: GenAI reads some GGUF files by itself (of llama and
qwen2, in F16, Q8_0, Q4_0 and Q4_K_M).
"""

from __future__ import annotations

from typing import Any

from offline import Generate, main


def load(setting: dict[str, Any]) -> Generate:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = setting["max_num_seqs"]
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False
    threads = {"INFERENCE_NUM_THREADS": setting["num_threads"]}
    pipeline = genai.ContinuousBatchingPipeline(setting["model"], scheduler, "CPU", threads)

    def generate(prompts: list[list[int]], output_lens: list[int]) -> None:
        configs = [
            genai.GenerationConfig(max_new_tokens=most, ignore_eos=True, do_sample=False, apply_chat_template=False)
            for most in output_lens
        ]
        given = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        answers = pipeline.generate(given, configs)
        assert [len(answer.m_generation_ids[0]) for answer in answers] == output_lens

    return generate


if __name__ == "__main__":
    main("openvino", load)
