"""vLLM's offline class, asked as `offline.py` says. `model` is a folder as Hugging Face has them."""

from __future__ import annotations

from typing import Any

from offline import Generate, main


def load(setting: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=setting["model"],
        dtype="bfloat16",
        max_model_len=setting["max_model_len"],
        max_num_seqs=setting["max_num_seqs"],
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], output_lens: list[int]) -> None:
        params = [SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True) for most in output_lens]
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert [len(answer.outputs[0].token_ids) for answer in answers] == output_lens

    return generate


if __name__ == "__main__":
    main("vllm", load)
