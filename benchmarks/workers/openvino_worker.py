"""OpenVINO GenAI with and without prompt lookup, float32 compute. Arguments: model folder, threads."""

import sys

import numpy as np
import openvino as ov
import openvino_genai
from common import serve

options = {"INFERENCE_NUM_THREADS": int(sys.argv[2]), "INFERENCE_PRECISION_HINT": "f32"}
pipes = {
    False: openvino_genai.LLMPipeline(sys.argv[1], "CPU", **options),
    True: openvino_genai.LLMPipeline(sys.argv[1], "CPU", prompt_lookup=True, **options),
}


def generate(prompt: list[int], max_new_tokens: int, speculate: bool) -> list[int]:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_new_tokens
    config.do_sample = False
    config.eos_token_id = 2
    if speculate:
        config.num_assistant_tokens = 5
        config.max_ngram_size = 3
    ids = np.array([prompt], np.int64)
    inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
    return list(pipes[speculate].generate(inputs, config).tokens[0])


serve(generate)
