"""Does a mode's measured speedup follow the formula? For every fused mode of the demo model.

    python benchmarks/formula.py [--rounds 3] [--tokens 96] [--only NAME]

Measured: decoding time (prefill left out) of the plain and the speculating arm over the same prompts,
alternating. Predicted: tokens a step (the article's E, from the measured acceptance) over the cost of a
step (from the cost curve measured beforehand, weighted by the draft lengths that were used).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from builders.compilers.onnxruntime import compile_step  # noqa: E402
from engines.acceptance import AcceptanceStats, expected_tokens_per_step  # noqa: E402
from engines.bundle import EngineFacts, open_bundle  # noqa: E402
from engines.decoding import Decoder, Request  # noqa: E402
from engines.drafting.adaptive import step_cost_at  # noqa: E402
from engines.sessions.onnxruntime import OnnxSession  # noqa: E402
from engines.text import TextCodec  # noqa: E402
from pipelines.build import prompt_set  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--only", default="", help="engines whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(
        "| engine | γ used | accepted | α | E measured | E of α | step cost | predicted | measured | off by |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for path in sorted((ROOT / "build/bundles").iterdir()):
        facts = open_bundle(path).manifest.engine
        if facts.gamma and facts.precision == "fp32" and (not options.only or options.only in path.name):
            row(path, options)


def row(path: Path, options: argparse.Namespace) -> None:
    bundle = open_bundle(path)
    facts = bundle.manifest.engine
    graph = bundle.file(facts.graph)
    codec = TextCodec(path / "tokenizer")
    ids = [codec.encode_chat([{"role": "user", "content": p["text"]}]) for p in prompt_set()]
    ratios, predictions = [], []
    for _ in range(options.rounds):
        # The curve is taken anew beside each round: the machine's speed drifts.
        curve = compile_step(graph, facts, threads=options.threads).step_cost
        session = OnnxSession(graph, facts, threads=options.threads, slots=1)
        seconds, steps = {0: 0.0, facts.gamma: 0.0}, {0: 0, facts.gamma: 0}
        stats = None
        for i, prompt in enumerate(ids):
            for gamma in sorted(seconds, reverse=bool(i % 2)):
                decoder = Decoder(session, facts)
                done = decoder.run([Request(prompt, options.tokens, gamma=gamma)])[0]
                seconds[gamma] += decoder.times.step + decoder.times.propose
                steps[gamma] += decoder.times.steps
                if gamma:
                    stats = done.acceptance if stats is None else stats.merge(done.acceptance)
        assert stats is not None
        ratios.append(seconds[0] / seconds[facts.gamma])
        cost = mean_cost(stats, curve, facts)
        predictions.append((stats.mean_acceptance_length / cost, cost))
    measured = statistics.median(ratios)
    predicted, cost = statistics.median(predictions)
    mean_length = stats.mean_draft_length
    print(
        f"| {path.name} | {mean_length:.1f} | {stats.acceptance_rate:.2f} | {stats.conditional_rate:.2f}"
        f" | {stats.mean_acceptance_length:.2f}"
        f" | {expected_tokens_per_step(stats.conditional_rate, round(mean_length)):.2f} | {cost:.2f}"
        f" | {predicted:.2f} | {measured:.2f} | {measured / predicted - 1:+.1%} |",
        flush=True,
    )


def mean_cost(stats: AcceptanceStats, curve: Sequence[float], facts: EngineFacts) -> float:
    """Of a step, in plain steps, by the draft lengths that were used."""
    if facts.method == "lookahead":  # its curve counts draft tokens, and steps differ in their trees
        tokens = stats.drafted / stats.steps
        low = int(tokens)
        below, above = step_cost_at(curve, low + 1), step_cost_at(curve, low + 2)
        return below + (above - below) * (tokens - low)
    # drafted_at[i]: steps that had a draft token i; so steps of exactly g draft tokens follow.
    at = [stats.steps, *stats.drafted_at, 0]
    lengths = [at[g] - at[g + 1] for g in range(facts.gamma + 1)]
    return sum(n * step_cost_at(curve, g + 1) for g, n in enumerate(lengths)) / stats.steps


if __name__ == "__main__":
    main()
