"""Does speculation pay? One engine, the same prompts plain and speculating, in one run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines.acceptance import AcceptanceStats
from engines.engine import Engine, Prompt
from engines.exactness import Divergence, compare_greedy

__all__ = ["Measurement", "measure"]


@dataclass(frozen=True)
class Measurement:
    """Greedy generation over a prompt set, batch 1.

    Attributes:
        tokens: output tokens of one arm.
        plain_seconds, speculative_seconds: end to end, prefill included.
        steps: verify steps of the speculating arm.
        step_seconds, draft_seconds, prefill_seconds, host_seconds: of the speculating arm, by phase.
        divergences: outputs that differ from plain decoding (see `engines.exactness`).
    """

    tokens: int
    plain_seconds: float
    speculative_seconds: float
    steps: int
    acceptance: AcceptanceStats
    prefill_seconds: float
    step_seconds: float
    draft_seconds: float
    host_seconds: float
    divergences: tuple[Divergence, ...]

    @property
    def speedup(self) -> float:
        """Plain time ÷ speculative time, over all prompts."""
        return self.plain_seconds / self.speculative_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the manifest."""
        plain = {k: v for k, v in vars(self).items() if isinstance(v, int | float)}
        return plain | {
            "speedup": self.speedup,
            "tokens_per_second": self.tokens_per_second,
            "acceptance": self.acceptance.to_dict(),
            "divergences": [vars(d) for d in self.divergences],
        }

    @property
    def tokens_per_second(self) -> float:
        """Of the speculating arm."""
        return self.tokens / self.speculative_seconds


def measure(
    engine: Engine, prompts: Sequence[Prompt], *, max_new_tokens: int, tolerance: float
) -> Measurement:
    """Generate for every prompt with and without speculation, alternating which goes first.

    Args:
        tolerance: of the margin rule, in logits.
    """
    engine.generate(prompts[0], max_new_tokens=2)  # warm up
    seconds = {True: 0.0, False: 0.0}
    divergences: list[Divergence] = []
    stats = AcceptanceStats.empty(engine.facts.gamma)
    phases = dict.fromkeys(("prefill", "step", "propose", "host", "steps"), 0.0)
    tokens = 0
    for index, prompt in enumerate(prompts):
        outputs = {}
        for speculate in (False, True) if index % 2 else (True, False):
            before = dict(vars(engine.times))
            begin = time.perf_counter()
            outputs[speculate] = engine.generate(
                prompt, max_new_tokens=max_new_tokens, gamma=None if speculate else 0
            )
            seconds[speculate] += time.perf_counter() - begin
            if speculate:
                for phase in phases:
                    phases[phase] += vars(engine.times)[phase] - before[phase]
        plain, speculative = outputs[False], outputs[True]
        tokens += len(plain.tokens)
        stats = stats.merge(speculative.acceptance)
        ids = engine.encode(prompt)
        found = compare_greedy(
            plain.tokens,
            speculative.tokens,
            lambda i, ids=ids, out=plain.tokens: engine.top_gap([*ids, *out[:i]]),  # type: ignore[misc]
            tolerance,
        )
        if found is not None:
            divergences.append(found)
    return Measurement(
        tokens=tokens,
        plain_seconds=seconds[False],
        speculative_seconds=seconds[True],
        steps=int(phases["steps"]),
        acceptance=stats,
        prefill_seconds=phases["prefill"],
        step_seconds=phases["step"],
        draft_seconds=phases["propose"],
        host_seconds=phases["host"],
        divergences=tuple(divergences),
    )
