"""transformers' `generate` in float32. Arguments: checkpoint folder, threads."""

import sys

import torch
from common import serve
from transformers import AutoModelForCausalLM

torch.set_num_threads(int(sys.argv[2]))
torch.set_grad_enabled(False)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)


def generate(prompt: list[int], max_new_tokens: int, speculate: bool) -> list[int]:
    ids = torch.tensor([prompt])
    extra = {"prompt_lookup_num_tokens": 5} if speculate else {}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **extra
    )
    return output[0, len(prompt) :].tolist()


serve(generate)
