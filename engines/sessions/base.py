"""The session protocol: what the decoding loop asks of a runtime. Shapes are NumPy's, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["IntArray", "StepInputs", "StepOutputs", "StepSession"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StepInputs:
    """One call of the fused step for the cache slots `slot` … `slot + B - 1`.

    Attributes:
        tokens: i64 [B, C]: committed tokens that the target has not seen, left-aligned.
        token_counts: i64 [B]: how many of them are real; all C wherever draft tokens follow.
        lengths: i64 [B]: positions in the target's cache.
        draft_counts: i64 [B]: draft tokens to verify, per sequence.
        draft_tokens: i64 [B, G]: the host's proposals; None where the graph drafts.
        draft_steps: G where the graph drafts.
        draft_context: i64 [B, D]: committed tokens that the drafter's own cache has not seen.
        draft_lengths: i64 [B]: positions in the drafter's cache.
        temperature, top_k, top_p: [B].
        uniforms: f32 [B, R, 3] in [0, 1), R = G + 1.
    """

    slot: int
    tokens: IntArray
    token_counts: IntArray
    lengths: IntArray
    draft_counts: IntArray
    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    uniforms: FloatArray
    draft_tokens: IntArray | None = None
    draft_steps: int = 0
    draft_context: IntArray | None = None
    draft_lengths: IntArray | None = None


@dataclass(frozen=True)
class StepOutputs:
    """What one call returned.

    Attributes:
        accepted: i64 [B]: accepted draft tokens.
        emitted: i64 [B, R]: the accepted draft tokens and the target's own token behind them, then -1.
        finite: bool [B]: False where a logit was NaN or infinite.
        logits: f32 [B, R, vocabulary], if asked for: row i follows i draft tokens.
    """

    accepted: IntArray
    emitted: IntArray
    finite: npt.NDArray[np.bool_]
    logits: FloatArray | None = None


class StepSession(Protocol):
    """A loaded engine with its caches."""

    @property
    def slots(self) -> int:
        """Sequences that the caches hold."""

    def reserve(self, positions: int) -> None:
        """Make room in every slot's cache: to be called before a step that reaches further.

        `positions` is the most that any slot in use will hold; what is below is kept.
        """

    def step(self, inputs: StepInputs, *, want_logits: bool = False) -> StepOutputs:
        """Draft, verify, accept and write the caches for the given slots."""

    def move(self, source: int, destination: int, length: int, draft_length: int) -> None:
        """Copy a sequence's cache to another slot: its first `length` and `draft_length` positions."""
