"""Speed against the peers, pairwise in one run: every prompt goes through every arm, round by round.

    python benchmarks/speed.py --peers build/peers [--rounds 3] [--threads 2]

`make bench` prepares what it needs: the bundles, an environment with the peers, and their models.
An arm is an engine plain or speculating. The order of the arms changes from prompt to prompt; a
result is the ratio of two arms' total times, by round, and the median over the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engines.text import TextCodec  # noqa: E402

WORKERS = Path(__file__).parent / "workers"
MAX_NEW_TOKENS = 128


class Worker:
    """A process with one loaded engine."""

    def __init__(self, python: Path, script: str, *arguments: str) -> None:
        command = [str(python), str(WORKERS / script), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if "ready" not in self._read():
            raise SystemExit(f"{script}: {self._process.communicate()[1][-2000:]}")

    def _read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def generate(self, prompt: list[int], speculate: bool) -> tuple[list[int], float]:
        assert self._process.stdin is not None
        request = {"prompt": prompt, "max_new_tokens": MAX_NEW_TOKENS, "speculate": speculate}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if "tokens" not in answer:
            raise SystemExit(self._process.communicate()[1][-2000:])
        return answer["tokens"], answer["seconds"]  # type: ignore[return-value]


@dataclass
class Arm:
    """An engine, plain or speculating, and what it did: by round, by prompt (tokens, seconds)."""

    name: str
    worker: Worker
    speculate: bool
    runs: list[dict[int, tuple[int, float]]] = field(default_factory=list)

    def rate(self, round_number: int, prompts: list[int]) -> float:
        tokens = sum(self.runs[round_number][p][0] for p in prompts)
        return tokens / sum(self.runs[round_number][p][1] for p in prompts)


def arms(options: argparse.Namespace) -> list[Arm]:
    ours, theirs = Path(sys.executable), options.peers / "venv/bin/python"
    threads = str(options.threads)
    bundles, peers = options.bundles, options.peers
    found = []
    for label, script, python, folder in (
        ("trtspec fp32", "trtspec_worker.py", ours, bundles / "smollm2-ngram"),
        ("trtspec int8", "trtspec_worker.py", ours, bundles / "smollm2-int8"),
        ("transformers fp32", "transformers_worker.py", ours, options.checkpoint),
        ("onnxruntime-genai fp32", "genai_worker.py", theirs, peers / "genai-fp32"),
        ("onnxruntime-genai int8", "genai_worker.py", theirs, peers / "genai-int8"),
        ("openvino-genai fp32", "openvino_worker.py", theirs, peers / "openvino-fp32"),
        ("openvino-genai int8", "openvino_worker.py", theirs, peers / "openvino-int8"),
    ):
        if not re.search(options.only, label):
            continue
        if not folder.exists():
            print(f"left out: {label} ({folder} is missing; `make bench` prepares it)")
            continue
        worker = Worker(python, script, str(folder), threads)
        found.append(Arm(label, worker, False))
        if "transformers" not in label:  # slow, and no target asks for it
            found.append(Arm(f"{label} + speculation", worker, True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, default=ROOT / "build/peers")
    parser.add_argument("--bundles", type=Path, default=ROOT / "build/bundles")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build/checkpoints/smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="engines whose name matches this pattern")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    codec = TextCodec(options.checkpoint)
    prompts = json.loads((ROOT / "pipelines/prompts.json").read_text("utf-8"))
    ids = [codec.encode_chat([{"role": "user", "content": p["text"]}]) for p in prompts]
    contestants = arms(options)
    for arm in contestants:
        arm.worker.generate(ids[0][:8], arm.speculate)
    for number in range(options.rounds):
        for arm in contestants:
            arm.runs.append({})
        for p, prompt in enumerate(ids):
            shift = (p + number) % len(contestants)
            for arm in contestants[shift:] + contestants[:shift]:
                tokens, seconds = arm.worker.generate(prompt, arm.speculate)
                arm.runs[-1][p] = (len(tokens), seconds)
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    report(contestants, [p["kind"] for p in prompts], options)


def report(contestants: list[Arm], kinds: list[str], options: argparse.Namespace) -> None:
    everything = list(range(len(kinds)))
    names = sorted(set(kinds), key=kinds.index)
    by_name = {arm.name: arm for arm in contestants}
    header = ["tokens/s, median of rounds", "all", *names]
    print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for arm in contestants:
        row = [arm.name]
        for subset in [everything, *([i for i in everything if kinds[i] == n] for n in names)]:
            row.append(f"{statistics.median(arm.rate(r, subset) for r in range(options.rounds)):.1f}")
        print("| " + " | ".join(row) + " |")
    chat = [i for i in everything if kinds[i] == "chat"]
    ours, spec = "trtspec fp32", "trtspec fp32 + speculation"
    peers = ["onnxruntime-genai", "openvino-genai"]
    pairs = [(ours, "transformers fp32", everything, 1.4)]
    pairs += [(spec, f"{p} fp32 + speculation", everything, 1.1) for p in peers]
    pairs += [(spec, ours, chat, 0.97)]
    for suffix in ("", " + speculation"):
        pairs += [(f"trtspec int8{suffix}", f"{p} int8{suffix}", everything, 1.0) for p in peers]
    print("\n| ratio | prompts | median | range | target |\n|---|---|---|---|---|")
    rows = []
    for first, second, subset, target in pairs:
        if first not in by_name or second not in by_name:
            continue
        ratios = [
            by_name[first].rate(r, subset) / by_name[second].rate(r, subset) for r in range(options.rounds)
        ]
        where = "chat" if subset is chat else "all"
        middle = statistics.median(ratios)
        rows.append({"first": first, "second": second, "prompts": where, "ratios": ratios, "target": target})
        spread = f"{min(ratios):.2f} – {max(ratios):.2f}"
        print(f"| {first} ÷ {second} | {where} | {middle:.2f} | {spread} | ≥ {target} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
