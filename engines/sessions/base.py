"""The session protocol: what the decoding loop asks of a runtime. Shapes are NumPy's, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_CONTEXT", "FloatArray", "IntArray", "Pending", "StepInputs", "StepOutputs", "StepSession"]

MAX_CONTEXT = 256  # tokens a sequence and call at most: bounds activations and the stall of running streams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Pending:
    """Committed tokens that the drafter has not seen.

    Attributes:
        tokens: i64 [B, D], left-aligned. A head on the target's states sees each together with the
            features of the position before it.
        counts: i64 [B]: how many of them are real.
        lengths: i64 [B]: positions in the drafter's own cache.
        features: f32 [B, D, F].
    """

    tokens: IntArray
    counts: IntArray
    lengths: IntArray
    features: FloatArray | None = None


@dataclass(frozen=True)
class StepInputs:
    """One call of the fused step for the cache slots `slot` … `slot + B - 1`.

    Attributes:
        tokens: i64 [B, C]: committed tokens that the target has not seen, left-aligned.
        token_counts: i64 [B]: how many of them are real; all C wherever draft tokens follow.
        lengths: i64 [B]: positions in the target's cache.
        draft_counts: i64 [B]: levels to draft, or how many of `draft_tokens` are real, per sequence.
        temperature, top_k, top_p: [B].
        uniforms: f32 [B, P, `EngineFacts.draws`] in [0, 1), P = γ + 1 where the graph drafts, else the
            deepest level of draft tokens + 1.
        draft_tokens: i64 [B, N]: the host's proposals; None where the graph drafts.
        draft_parents: i64 [B, N]: their tree, for engines that take one.
        draft_threshold: f32 [B]: where the graph drafts, see `EngineFacts.confidence_threshold`.
        pending: what the drafter has not seen, for engines whose drafter reads the target's states or
            has a cache of its own.
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
    draft_parents: IntArray | None = None
    draft_threshold: FloatArray | None = None
    pending: Pending | None = None


@dataclass(frozen=True)
class StepOutputs:
    """What one call returned.

    Attributes:
        accepted: i64 [B]: accepted draft tokens.
        emitted: i64 [B, P']: the accepted draft tokens and the target's own token behind them, then -1.
        finite: bool [B]: False where a logit was NaN or infinite.
        verified: i64 [B]: draft tokens that were verified; levels: i64 [B]: their deepest level.
        drafted: i64 [B, N]: the draft tokens, where the graph drafts.
        choice: i64 [B, R]: lookahead: the target's own token behind every node of the tree.
        features: f32 [B, C + P' - 1, F]: the target's states of context and accepted tokens, for
            drafters that read them.
        logits: f32 [B, R, vocabulary], if asked for: row 0 behind the context, row n behind draft token n.
    """

    accepted: IntArray
    emitted: IntArray
    finite: npt.NDArray[np.bool_]
    verified: IntArray
    levels: IntArray
    drafted: IntArray | None = None
    choice: IntArray | None = None
    features: FloatArray | None = None
    logits: FloatArray | None = None


class StepSession(Protocol):
    """A loaded engine with its caches."""

    @property
    def slots(self) -> int:
        """Sequences that the caches hold."""

    def reserve(self, positions: int, draft_positions: int = 0) -> None:
        """Make room in every slot's cache: to be called before a step that reaches further.

        `positions` is the most that any slot in use will hold, `draft_positions` the same for the
        drafter's own cache; what is below is kept.
        """

    def step(self, inputs: StepInputs, *, want_logits: bool = False) -> StepOutputs:
        """Draft, verify, accept and write the caches for the given slots."""

    def move(self, source: int, destination: int, length: int, draft_length: int) -> None:
        """Copy a sequence's cache to another slot: its first `length` and `draft_length` positions."""
