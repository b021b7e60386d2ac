"""Hugging Face transformers, asked as `offline.py` says: prompts of a job one after another, with its own cache."""

from __future__ import annotations

from typing import Any

from offline import Generate, main


def load(setting: dict[str, Any]) -> Generate:
    import torch
    import transformers

    torch.set_num_threads(setting["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(setting["model"], dtype=torch.bfloat16)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], output_lens: list[int]) -> None:
        for ids, most in zip(prompts, output_lens, strict=True):
            given = torch.tensor([ids])
            answer = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                min_new_tokens=most,
                max_new_tokens=most,
                do_sample=False,
                pad_token_id=0,
            )
            assert answer.shape[1] == len(ids) + most

    return generate


if __name__ == "__main__":
    main("transformers", load)
