"""How long a draft should be: as long as one more token still pays, at the measured cost of a step.

For a chain whose tokens are each accepted with probability α given that the one before was, g draft
tokens yield (1 - α^(g+1)) / (1 - α) tokens a step (Leviathan et al. 2023, equation 1). The length
that maximises yield ÷ cost is chosen anew every step; 0 means plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.acceptance import best_gamma

__all__ = ["MATCH_PRIOR", "DraftLength", "step_cost_at"]

DECAY = 0.9  # old evidence fades: text changes between prose, code and quotes
PRIOR_WEIGHT = 2.0
# α by the length of the match, before a sequence shows its own. Measured on text of several kinds: matches
# of 7 tokens and of 200 are alike, and so is what finer or coarser classes would gain.
MATCH_PRIOR = (0.25, 0.45, 0.6, 0.75, 0.8, 0.85, 0.9)
PATIENCE = 0.95  # how slowly a match length that is not tried is forgiven


def step_cost_at(curve: Sequence[float], tokens: int) -> float:
    """The cost of a step over `tokens` tokens, in plain steps.

    Args:
        curve: measured costs, entry i for i + 1 tokens. Beyond its end the slope of its upper half
            goes on.
    """
    if tokens <= len(curve):
        return curve[tokens - 1]
    half = (len(curve) - 1) // 2
    slope = (curve[-1] - curve[half]) / max(len(curve) - 1 - half, 1)
    return curve[-1] + slope * (tokens - len(curve))


class DraftLength:
    """One sequence's estimate of α, by the length of the match that a draft continues.

    Args:
        curve: the engine's measured step costs (manifest: `step_cost`).
        prior: α before anything was seen, by match length; the last entry serves all longer matches.
    """

    def __init__(self, curve: Sequence[float], prior: Sequence[float] = MATCH_PRIOR) -> None:
        self._curve = curve
        self._prior = prior
        self._accepted = [PRIOR_WEIGHT * alpha for alpha in prior]
        self._tried = [PRIOR_WEIGHT] * len(prior)

    def _kind(self, match: int) -> int:
        return min(match, len(self._tried)) - 1

    def choose(self, match: int, limit: int, batch: int = 1) -> int:
        """The draft length, 0 … `limit`, for a match of `match` tokens.

        In a batch every sequence's tokens count: a step costs what its rows cost, and with all
        sequences drafting alike, g draft tokens turn `batch` rows into `batch` * (g + 1). So drafts
        shrink as the batch grows, until speculation stops by itself.
        """
        if match == 0 or limit <= 0:
            return 0
        kind = self._kind(match)
        alpha = self._accepted[kind] / self._tried[kind]
        return best_gamma(alpha, lambda g: step_cost_at(self._curve, batch * (g + 1)), limit)

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Learn from a step: `accepted` of `drafted` tokens were accepted."""
        if match == 0:
            return
        kind = self._kind(match)
        if drafted == 0:  # drift back to the prior, else one bad stretch would end drafting for good
            self._accepted[kind] += (1 - PATIENCE) * (PRIOR_WEIGHT * self._prior[kind] - self._accepted[kind])
            self._tried[kind] += (1 - PATIENCE) * (PRIOR_WEIGHT - self._tried[kind])
            return
        tried = accepted + (accepted < drafted)  # what came after the first rejection tells nothing
        self._accepted[kind] = DECAY * self._accepted[kind] + accepted
        self._tried[kind] = DECAY * self._tried[kind] + tried
