"""The margin rule: when may a greedy speculative run differ from the plain run?

The logits of one position are computed by matrix products over one token in a plain step, over several
in a verify step, and differ by rounding. Where the two best logits are closer together than that, either
token is a correct argmax, and everything after it may differ. Any other difference is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["TOLERANCES", "Divergence", "compare_greedy"]

# By dtype of the computation, as safetensors spells it. An argmax can flip where the gap is below twice
# the error of one logit, because the two may err in opposite directions.
#   F32: one logit was measured to move by up to 1e-3 between one-token and several-token steps.
#   F16, BF16: a logit between 16 and 32 is stored in steps of 2^-6 and 2^-3; two such steps of error
#   each cover the rounding of the result and of the hidden state before it.
TOLERANCES: Mapping[str, float] = MappingProxyType({"F32": 2e-3, "F16": 2.0**-4, "BF16": 2.0**-1})


@dataclass(frozen=True)
class Divergence:
    """The first difference between a plain and a speculative run.

    Attributes:
        position: index among the output tokens.
        plain_token, speculative_token: None where that run had already ended.
        gap: top-1 minus top-2 logit of the plain run at that position.
        allowed: the gap is below the tolerance: rounding explains the difference.
    """

    position: int
    plain_token: int | None
    speculative_token: int | None
    gap: float
    allowed: bool


def compare_greedy(
    plain: Sequence[int], speculative: Sequence[int], gap_at: Callable[[int], float], tolerance: float
) -> Divergence | None:
    """Compare the output tokens of a plain and a speculative greedy run by the margin rule.

    A run that ends earlier differs at its end: a stop token flipped, or tokens were lost.

    Args:
        gap_at: top-1 minus top-2 logit of the plain run at an output position. Called once, at the
            first difference; if that is at the end of `plain`, its position is len(plain).
        tolerance: see `TOLERANCES`.

    Returns:
        None if the runs are equal, else the first divergence. Nothing after it can be compared.
    """
    for position in range(max(len(plain), len(speculative))):
        ours = plain[position] if position < len(plain) else None
        theirs = speculative[position] if position < len(speculative) else None
        if ours != theirs:
            gap = gap_at(position)
            return Divergence(position, ours, theirs, gap, allowed=gap < tolerance)
    return None
