"""Acceptance arithmetic: what was accepted, and what that is worth. Pure functions and counts.

Terms: a *verify step* checks some draft tokens (none, in a plain step) and emits the accepted ones plus
one. *Acceptance rate* is accepted ÷ drafted. *Mean acceptance length* is tokens a step, the bonus token
included. Position i's *unconditional* rate is P(position i accepted), its *conditional* rate the same
given that everything before it was accepted. α, which the formulas take, is the conditional rate pooled
over all positions; the acceptance rate is lower, because it also counts drafts behind a rejection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["AcceptanceStats", "best_gamma", "expected_tokens_per_step", "predicted_speedup"]

JsonValue = int | float | None | list[int] | list[float | None]


@dataclass
class AcceptanceStats:
    """Counts of verify steps by draft position. Steps may draft different numbers of tokens.

    Attributes:
        steps: verify steps.
        drafted_at: [i] steps that drafted a token at position i.
        tried_at: [i] of these, the steps that had accepted every position before i.
        accepted_at: [i] of these, the steps that accepted position i.
        siblings: draft tokens of trees beyond one a position.

    Rates are nan where nothing was counted.
    """

    steps: int = 0
    drafted_at: list[int] = field(default_factory=list)
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    siblings: int = 0

    @classmethod
    def empty(cls, gamma: int) -> AcceptanceStats:
        """No steps yet, with `gamma` positions."""
        return cls(0, [0] * gamma, [0] * gamma, [0] * gamma)

    @classmethod
    def from_histogram(cls, histogram: Sequence[int]) -> AcceptanceStats:
        """Steps that all drafted the same number of tokens, γ = len(histogram) - 1.

        Args:
            histogram: [i] steps that accepted exactly i draft tokens.
        """
        stats = cls.empty(len(histogram) - 1)
        for accepted, steps in enumerate(histogram):
            stats.record(len(histogram) - 1, accepted, steps)
        return stats

    def record(self, drafted: int, accepted: int, steps: int = 1, *, nodes: int | None = None) -> None:
        """Count `steps` steps that drafted `drafted` tokens and accepted the first `accepted`.

        Args:
            nodes: draft tokens, where they form a tree: `drafted` is then its depth.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} tokens accepted of {drafted}")
        self.steps += steps
        self.siblings += steps * ((drafted if nodes is None else nodes) - drafted)
        for counts, length in (
            (self.drafted_at, drafted),
            (self.tried_at, min(accepted + 1, drafted)),
            (self.accepted_at, accepted),
        ):
            counts.extend([0] * (drafted - len(counts)))
            for i in range(length):
                counts[i] += steps

    def merge(self, other: AcceptanceStats) -> AcceptanceStats:
        """The counts of both, as a new object."""
        return AcceptanceStats(
            self.steps + other.steps,
            _add(self.drafted_at, other.drafted_at),
            _add(self.tried_at, other.tried_at),
            _add(self.accepted_at, other.accepted_at),
            self.siblings + other.siblings,
        )

    @property
    def drafted(self) -> int:
        """Draft tokens verified."""
        return sum(self.drafted_at) + self.siblings

    @property
    def accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(self.accepted_at)

    @property
    def rejections(self) -> int:
        """Steps that stopped before their drafts ran out."""
        return sum(self.tried_at) - self.accepted

    @property
    def histogram(self) -> list[int]:
        """[i] steps that accepted exactly i draft tokens, i = 0 … γ."""
        at_least = [self.steps, *self.accepted_at, 0]
        return [at_least[i] - at_least[i + 1] for i in range(len(at_least) - 1)]

    @property
    def acceptance_rate(self) -> float:
        """Accepted ÷ drafted."""
        return _ratio(self.accepted, self.drafted)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step: (accepted + steps) ÷ steps."""
        return _ratio(self.accepted + self.steps, self.steps)

    @property
    def mean_draft_length(self) -> float:
        """The effective γ: positions drafted a step; a tree counts by its depth."""
        return _ratio(sum(self.drafted_at), self.steps)

    @property
    def unconditional(self) -> list[float]:
        """[i] P(position i accepted), over the steps that drafted it."""
        return [_ratio(a, d) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def conditional(self) -> list[float]:
        """[i] P(position i accepted | it was drafted and everything before it accepted)."""
        return [_ratio(a, t) for a, t in zip(self.accepted_at, self.tried_at, strict=True)]

    @property
    def conditional_rate(self) -> float:
        """α, the conditional rate pooled over positions: accepted ÷ (accepted + rejections)."""
        return _ratio(self.accepted, self.accepted + self.rejections)

    def to_dict(self) -> dict[str, JsonValue]:
        """Counts and rates as JSON values; None where a rate is undefined."""
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rejections": self.rejections,
            "acceptance_rate": _json(self.acceptance_rate),
            "mean_acceptance_length": _json(self.mean_acceptance_length),
            "mean_draft_length": _json(self.mean_draft_length),
            "conditional_rate": _json(self.conditional_rate),
            "siblings": self.siblings,
            "drafted_at": list(self.drafted_at),
            "tried_at": list(self.tried_at),
            "accepted_at": list(self.accepted_at),
            "unconditional": [_json(rate) for rate in self.unconditional],
            "conditional": [_json(rate) for rate in self.conditional],
        }


def expected_tokens_per_step(alpha: float, gamma: int) -> float:
    """(1 - α^(γ+1)) ÷ (1 - α), the bonus token included (Leviathan et al. 2023, equation 1).

    Args:
        alpha: probability that a draft token is accepted once those before it were, 0 … 1.
        gamma: draft tokens a step, 0 or more.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"α = {alpha} is not in 0 … 1")
    if gamma < 0:
        raise ValueError(f"γ = {gamma} is negative")
    # The geometric series itself: no cancellation near α = 1, where the closed form loses all digits.
    return math.fsum(alpha**i for i in range(gamma + 1))


def predicted_speedup(alpha: float, gamma: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens a step ÷ cost of a step: how many times faster than plain decoding.

    Args:
        alpha, gamma: as for `expected_tokens_per_step`.
        draft_cost: of one draft token, in plain target steps.
        verify_cost: of the step that verifies γ draft tokens, in plain target steps.
    """
    return expected_tokens_per_step(alpha, gamma) / (verify_cost + gamma * draft_cost)


def best_gamma(alpha: float, cost_of: Callable[[int], float], max_gamma: int) -> int:
    """The draft length, 0 … max_gamma, with the most expected tokens per cost; the shorter on ties.

    Args:
        cost_of: the whole cost of a step with that many draft tokens, drafting included.
    """
    return max(
        range(max_gamma + 1), key=lambda gamma: expected_tokens_per_step(alpha, gamma) / cost_of(gamma)
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _json(rate: float) -> float | None:
    return None if math.isnan(rate) else rate


def _add(a: list[int], b: list[int]) -> list[int]:
    width = max(len(a), len(b))
    padded = [counts + [0] * (width - len(counts)) for counts in (a, b)]
    return [x + y for x, y in zip(*padded, strict=True)]
