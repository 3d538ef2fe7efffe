"""onnxruntime-genai and its n-gram speculation. Arguments: model folder, threads.

It uses about one thread unless told otherwise, so the thread count goes into its session options.
"""

import json
import sys

import onnxruntime_genai as og
from common import serve

config = og.Config(sys.argv[1])
threads = {"model": {"decoder": {"session_options": {"intra_op_num_threads": int(sys.argv[2])}}}}
config.overlay(json.dumps(threads))
model = og.Model(config)


def generate(prompt: list[int], max_new_tokens: int, speculate: bool) -> list[int]:
    params = og.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=len(prompt) + max_new_tokens)
    if speculate:
        params.set_speculative_options(ngram_size=NGRAM, max_draft_tokens=DRAFT)
    generator = og.Generator(model, params)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    return list(generator.get_sequence(0))[len(prompt) :]


NGRAM, DRAFT = (int(a) for a in (sys.argv[3:5] or ("3", "5")))
serve(generate)
