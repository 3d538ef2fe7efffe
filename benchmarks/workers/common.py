"""The protocol between `speed.py` and its workers: one JSON line in, one out, on stdin and stdout.

A worker loads one engine in an environment of its own and answers requests
`{"prompt": [ids], "max_new_tokens": n, "speculate": bool}` with `{"tokens": [ids], "seconds": s}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[int], int, bool], list[int]]


def serve(generate: Generate) -> None:
    """Answer requests until stdin closes. What the engine prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    out.write(json.dumps({"ready": True}) + "\n")
    out.flush()
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.perf_counter()
        tokens = generate(request["prompt"], request["max_new_tokens"], request["speculate"])
        seconds = time.perf_counter() - begin
        out.write(json.dumps({"tokens": [int(t) for t in tokens], "seconds": seconds}) + "\n")
        out.flush()
