"""What draft-free drafters would get accepted, on recorded greedy text of the demo model. No timing.

    python benchmarks/drafting.py [--tokens 256] [--lookahead CHECKPOINT]

The text is recorded once, by the engine in build/bundles/smollm2-ngram, into build/drafting.json (remove
it to record anew); n-gram drafters are then replayed against it. Lookahead asks the target about tokens
that are not in the text, so it runs live on transformers (the `reference` extra), given a checkpoint.

Columns: tokens a step; the speedup that a step-cost curve makes of it, with the draft's length chosen
step by step (n-gram) or with whole trees (lookahead).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engines.drafting.adaptive import DraftLength, step_cost_at  # noqa: E402
from engines.drafting.lookahead import Lookahead, TreeProposal, lookahead_size  # noqa: E402
from engines.drafting.suffix_automaton import SuffixAutomaton  # noqa: E402
from engines.engine import Engine  # noqa: E402

# Cost of a step over 1, 2, 4, 5, 8, 16, 32 tokens on a two-core laptop CPU, in plain steps.
MEASURED = {1: 1.0, 2: 1.05, 4: 1.17, 5: 1.2, 8: 1.38, 16: 1.65, 32: 2.5}
GAMMA = 16


@dataclass(frozen=True)
class Recording:
    kind: str
    prompt: list[int]
    output: list[int]


@dataclass
class Tally:
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    cost: float = 0.0

    def add(self, emitted: int, drafted: int) -> None:
        self.tokens += emitted
        self.steps += 1
        self.drafted += drafted
        self.cost += step_cost_at(CURVE, drafted + 1)

    def __str__(self) -> str:
        rates = (self.tokens / self.steps, self.drafted / self.steps, self.tokens / self.cost)
        return " | ".join(f"{rate:.2f}" for rate in rates)


CURVE: list[float] = np.interp(range(1, max(MEASURED) + 1), list(MEASURED), list(MEASURED.values())).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, default=ROOT / "pipelines/prompts.json")
    parser.add_argument("--recorded", type=Path, default=ROOT / "build/drafting.json")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lookahead", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--sizes", default="2,2,3 2,3,2 4,3,4 5,4,3", help="W,N,G …")
    options = parser.parse_args()
    recordings = recorded(options)
    print("| drafter | text | tokens a step | drafted | speedup by curve |\n|---|---|---|---|---|")
    for low in (1, 2, 3):
        report(f"n-gram, min_match {low}", recordings, lambda r, low=low: replay(r, low))
    if options.lookahead is None:
        return
    target = Target(options.lookahead, options.threads)
    for text in options.sizes.split():
        size = tuple(int(part) for part in text.split(","))
        name = f"lookahead {size} ({lookahead_size(*size)} draft tokens)"
        report(name, recordings, lambda r, size=size: live(r, size, target))


def recorded(options: argparse.Namespace) -> list[Recording]:
    if not options.recorded.exists():
        engine = Engine.open(ROOT / "build/bundles/smollm2-ngram", threads=options.threads, slots=1)
        found = []
        for prompt in json.loads(options.prompts.read_text("utf-8")):
            ids = engine.encode(prompt["text"])
            output = engine.generate(ids, max_new_tokens=options.tokens).tokens
            found.append({"kind": prompt["kind"], "prompt": ids, "output": output})
        options.recorded.write_text(json.dumps(found), "utf-8")
    return [Recording(**entry) for entry in json.loads(options.recorded.read_text("utf-8"))]


def report(name: str, recordings: list[Recording], run: Callable[[Recording], list[tuple[int, int]]]) -> None:
    """Print a row per kind of text. `run` gives (emitted, drafted) of each step."""
    tallies: dict[str, Tally] = {"all": Tally()}
    for recording in recordings:
        own = tallies.setdefault(recording.kind, Tally())
        for emitted, drafted in run(recording):
            tallies["all"].add(emitted, drafted)
            own.add(emitted, drafted)
    for kind, tally in sorted(tallies.items()):
        print(f"| {name} | {kind} | {tally} |", flush=True)


def replay(recording: Recording, min_match: int) -> list[tuple[int, int]]:
    drafter, policy = SuffixAutomaton(min_match), DraftLength(CURVE)
    output, done = recording.output, 1  # the first token comes from the prefill
    drafter.extend([*recording.prompt, *output[:1]])
    steps = []
    while done < len(output):
        limit = min(GAMMA, len(output) - done - 1)
        proposal = drafter.propose(limit)
        draft = proposal.tokens[: policy.choose(proposal.match, limit)]
        accepted = 0
        while accepted < len(draft) and draft[accepted] == output[done + accepted]:
            accepted += 1
        policy.observe(proposal.match, len(draft), accepted)
        steps.append((accepted + 1, len(draft)))
        drafter.extend(output[done : done + accepted + 1])
        done += accepted + 1
    return steps


class Target:
    """The checkpoint in transformers: the greedy choice behind every node of a tree."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._model.set_attn_implementation("sdpa")

    def start(self, prompt: list[int]) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        self._run(prompt, list(range(-1, len(prompt) - 1)))

    def choices(self, emitted: list[int], tree: TreeProposal) -> list[int]:
        """The last step's tokens enter the cache; the tree below the last of them leaves no trace."""
        root = len(emitted) - 1
        parents = [*range(-1, root), *(root + parent for parent in tree.parents)]
        choice = self._run([*emitted, *tree.tokens], parents)
        if tree.tokens:
            self._cache.crop(-len(tree.tokens))
        return choice[root:]

    def _run(self, tokens: list[int], parents: list[int]) -> list[int]:
        torch, known, count = self._torch, self._cache.get_seq_length(), len(tokens)
        sees = torch.zeros(count, known + count, dtype=torch.bool)
        sees[:, :known] = True
        depth = torch.zeros(1, count, dtype=torch.long)
        for node, parent in enumerate(parents):
            if parent >= 0:
                sees[node] = sees[parent]
                depth[0, node] = depth[0, parent] + 1
            sees[node, known + node] = True
        with torch.inference_mode():
            logits = self._model(
                torch.tensor([tokens]),
                attention_mask=torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None],
                position_ids=known + depth,
                past_key_values=self._cache,
            ).logits[0]
        choice: list[int] = logits.argmax(-1).tolist()
        return choice


def live(recording: Recording, size: tuple[int, ...], target: Target) -> list[tuple[int, int]]:
    window, ngram, guesses = size
    output, done = recording.output, 1
    text, emitted = output[:1], output[:1]
    drafter = Lookahead(recording.prompt, window, ngram, guesses)
    drafter.extend(emitted)
    target.start(recording.prompt)
    steps = []
    while done < len(output):
        tree = drafter.propose(lookahead_size(window, ngram, guesses))
        choice = target.choices(emitted, tree)
        emitted, node = [], 0
        while True:
            emitted.append(choice[node])
            below = (i + 1 for i, p in enumerate(tree.parents) if (p, tree.tokens[i]) == (node, choice[node]))
            node = next(below, 0)
            if node == 0:
                break
        drafter.observe(choice, emitted)
        text += emitted
        done += len(emitted)
        steps.append((len(emitted), len(tree.tokens)))
    if text[: len(output)] != output:
        print(f"(the text differs from the recorded: {recording.kind})")
    return steps


if __name__ == "__main__":
    main()
