"""Memory of a running engine, and bytes copied a step.

    python benchmarks/memory.py [BUNDLE]

Peak resident memory of a fresh process that loads the bundle and generates, against the weights and the
KV cache that were in use; then the time of a step for caches of growing capacity, filled equally: what
does not depend on the capacity is not copied.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from builders.compilers.onnxruntime import compile_step  # noqa: E402
from engines.bundle import EngineFacts, open_bundle  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", type=Path, default=ROOT / "build/bundles/smollm2-ngram")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.bundle)
        return
    command = [sys.executable, __file__, str(options.bundle), "--child"]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
    capacities(options.bundle)


def child(path: Path) -> None:
    from engines.engine import Engine

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    engine = Engine.open(path, threads=2, slots=1)
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    out = engine.generate("Write a long story about a lighthouse.", max_new_tokens=400)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = open_bundle(path).manifest
    weights = sum(f.size for n, f in facts.files.items() if n.startswith("weights/"))
    shape = facts.engine.target_cache
    positions = 40 + len(out.tokens)
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * positions * 4
    print(f"interpreter and libraries {before / 1e6:.0f} MB")
    print(f"weights {weights / 1e6:.0f} MB, KV cache in use {cache / 1e6:.0f} MB ({positions} positions)")
    print(f"peak after loading {loaded / 1e6:.0f} MB, after generating {peak / 1e6:.0f} MB")
    print(f"peak ÷ (weights + KV cache) = {peak / (weights + cache):.2f}")


def capacities(path: Path) -> None:
    """One session after the other: several at once would spin against each other."""
    bundle = open_bundle(path)
    base = bundle.manifest.engine
    print("\n| cache capacity | step with 0 drafts | with 4 |\n|---|---|---|")
    for capacity in (1024, 4096, 16384):
        facts = EngineFacts.model_validate({**base.model_dump(), "max_seq_len": capacity, "gamma": 4})
        found = compile_step(bundle.file(base.graph), facts, threads=2)
        cells = [f"{found.plain_seconds * cost * 1e3:.1f} ms" for cost in (1.0, found.step_cost[4])]
        print(f"| {capacity} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
