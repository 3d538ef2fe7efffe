"""Our engine. Arguments: bundle folder, threads."""

import sys
from pathlib import Path

from common import serve

from engines.bundle import open_bundle
from engines.decoding import Decoder, Request
from engines.sessions.onnxruntime import OnnxSession

bundle = open_bundle(Path(sys.argv[1]))
facts = bundle.manifest.engine
session = OnnxSession(bundle.file(facts.graph), facts, threads=int(sys.argv[2]), slots=1)


def generate(prompt: list[int], max_new_tokens: int, speculate: bool) -> list[int]:
    request = Request(prompt, max_new_tokens, gamma=None if speculate else 0)
    return Decoder(session, facts).run([request])[0].tokens


serve(generate)
