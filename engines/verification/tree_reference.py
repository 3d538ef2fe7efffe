"""The definition of verification on trees, in numpy; chains and the terms are those of `reference`.

A step holds, for each of B sequences, a tree of up to N draft tokens and the target's logits for
R = N + 1 rows: row n is the target's distribution behind node n, row 0 the one behind the root.

Exact: each row's token is drawn from the target (argmax at temperature 0) with the uniform of the
position that it decides, and a child is accepted if it is that token. This is what trying the siblings
in order comes to when drafts are point masses: sibling i is accepted with p(x_i) of what is left after
i - 1 rejections, p(x_i) / (1 - p(x_1) - ...), altogether with probability p(x_i), and what remains is
the target without the siblings. (Miao et al. 2024, SpecInfer, section 4.3.) Here the one draw decides
at once, so what is emitted is what plain sampling with the same seed emits.

Typical acceptance (Cai et al. 2024, Medusa, section 2.3.1) takes every draft token that is probable
enough: p(x) > min(ε, α exp(-H(p))). It is not exact: the output does not follow the target.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engines.sampling import EXP_FLOOR, WEIGHT_SCALE, FloatArray, IntArray, draw, exponential, row_weights
from engines.uniforms import SAMPLE

__all__ = ["FIXED_POINT", "TreeVerdict", "tree_encoding", "verify_tree", "verify_typical"]

FIXED_POINT = 2.0**16  # of logarithms of probabilities: with weights up to 2^30 their sums stay exact

BoolArray = npt.NDArray[np.bool_]


class TreeVerdict(NamedTuple):
    """The outcome of a verify step over trees.

    Attributes:
        accepted: i64 [B]: draft tokens accepted.
        tokens: i64 [B, P]: the accepted path's tokens, the correction or bonus token, then -1.
        path: i64 [B, P - 1]: the accepted path's nodes, then 0.
        finite: bool [B]; as in `reference.Verdict`.
        choice: i64 [B, R]: the target's own token behind every node; -1 where not finite.
    """

    accepted: IntArray
    tokens: IntArray
    path: IntArray
    finite: BoolArray
    choice: IntArray


def tree_encoding(parents: IntArray) -> tuple[BoolArray, IntArray]:
    """Who sees whom, and how deep everyone is.

    Args:
        parents: i64 [B, N]: of nodes 1 … N; 0 is the root, and parents come first.

    Returns:
        bool [B, R, R]: row n sees itself, its ancestors and the root; i64 [B, R].
    """
    batch, size = parents.shape
    seen = np.tile(np.eye(size + 1, dtype=np.bool_), (batch, 1, 1))
    rows = np.arange(batch)
    for node in range(1, size + 1):
        seen[:, node] |= seen[rows, parents[:, node - 1]]
    return seen, seen.sum(-1) - 1


def verify_tree(
    target_logits: FloatArray,
    draft_tokens: IntArray,
    parents: IntArray,
    draft_counts: IntArray,
    temperature: FloatArray,
    top_k: IntArray,
    top_p: FloatArray,
    uniforms: FloatArray,
) -> TreeVerdict:
    """Verify one tree of point-mass draft tokens a sequence.

    Args:
        target_logits: f32 [B, R, V], R = N + 1.
        draft_tokens: i64 [B, N]: node n holds column n - 1.
        parents: i64 [B, N]: see `tree_encoding`.
        draft_counts: i64 [B], 0 … N: a sequence's first nodes that count.
        temperature, top_k, top_p: [B], see `SamplingParams`.
        uniforms: f32 [B, P, 3]: entry d decides the token at depth d + 1. Nodes deeper than P - 1 are
            never accepted.

    Where siblings repeat a token, the deepest accepted node wins, then the lowest: their rows have the
    same context, and thus the same choices, so that it does not matter for what is emitted.
    """
    seen, depths = tree_encoding(parents)
    with np.errstate(invalid="ignore", divide="ignore"):
        choice, _ = _choices(target_logits, depths, temperature, top_k, top_p, uniforms)
    passed = draft_tokens == np.take_along_axis(choice, parents, 1)
    return _verdict(
        target_logits, draft_tokens, choice, passed, seen, depths, draft_counts, uniforms.shape[1]
    )


def verify_typical(
    target_logits: FloatArray,
    draft_tokens: IntArray,
    parents: IntArray,
    draft_counts: IntArray,
    temperature: FloatArray,
    top_k: IntArray,
    top_p: FloatArray,
    uniforms: FloatArray,
    *,
    posterior_threshold: float,
    posterior_alpha: float,
) -> TreeVerdict:
    """The same by typical acceptance at temperatures above 0: not exact.

    Args:
        posterior_threshold: ε; posterior_alpha: α.

    The last token is drawn from the target behind the deepest accepted node, the lowest on ties.
    """
    seen, depths = tree_encoding(parents)
    with np.errstate(invalid="ignore", divide="ignore"):
        choice, weights = _choices(target_logits, depths, temperature, top_k, top_p, uniforms)
        total = weights.sum(-1)
        heat = np.where(temperature > 0, temperature, np.float32(1))[:, None, None]
        below = (target_logits - target_logits.max(-1, keepdims=True)) / heat
        logs = (np.clip(below, np.float32(EXP_FLOOR), np.float32(0)) * np.float32(FIXED_POINT)).astype(
            np.int64
        )
        mean = (weights * logs).sum(-1).astype(np.float32) / (
            total.astype(np.float32) * np.float32(FIXED_POINT)
        )
        # exp(-H) = exp(Σ p log p): of p = w / Σw, log w is the row's logarithm, log Σw its normaliser.
        typical = exponential(mean) / (total.astype(np.float32) / np.float32(WEIGHT_SCALE))
        cut = np.minimum(np.float32(posterior_threshold), np.float32(posterior_alpha) * typical)
        rows = np.arange(len(parents))[:, None]
        tokens = draft_tokens.clip(0, target_logits.shape[-1] - 1)
        p = weights[rows, parents, tokens].astype(np.float32) / total[rows, parents].astype(np.float32)
        likely = p > cut[rows, parents]
    equal = draft_tokens == np.take_along_axis(choice, parents, 1)
    passed = np.where(temperature[:, None] > 0, likely, equal)
    return _verdict(
        target_logits, draft_tokens, choice, passed, seen, depths, draft_counts, uniforms.shape[1]
    )


def _choices(
    logits: FloatArray,
    depths: IntArray,
    temperature: FloatArray,
    top_k: IntArray,
    top_p: FloatArray,
    uniforms: FloatArray,
) -> tuple[IntArray, IntArray]:
    """The target's own token behind every node [B, R], and the weights that it was drawn from."""
    weights = row_weights(logits, temperature, top_k, top_p)
    level = np.minimum(depths, uniforms.shape[1] - 1)
    drawn = draw(weights, np.take_along_axis(uniforms[..., SAMPLE], level, 1))
    return np.where(temperature[:, None] > 0, drawn, logits.argmax(-1)), weights


def _verdict(
    logits: FloatArray,
    draft_tokens: IntArray,
    choice: IntArray,
    passed: BoolArray,
    seen: BoolArray,
    depths: IntArray,
    counts: IntArray,
    levels: int,
) -> TreeVerdict:
    """The deepest node whose whole path passed, and what it emits."""
    finite = np.isfinite(logits).all((1, 2))
    usable = passed & (np.arange(passed.shape[1]) < counts[:, None]) & (depths[:, 1:] < levels)
    usable &= finite[:, None]
    failed = np.pad(~usable, ((0, 0), (1, 0)), constant_values=False)
    reached = np.where((seen & failed[:, None]).any(-1), 0, depths)
    node, accepted = reached.argmax(-1), reached.max(-1)
    on_path = seen[np.arange(len(node)), node]  # [B, R]
    level = np.arange(levels)
    nodes = (on_path[:, None] & (depths[:, None] == level[:, None])).argmax(-1)  # [B, P]
    drafts = np.take_along_axis(np.pad(draft_tokens, ((0, 0), (1, 0))), nodes, 1)
    drafts = np.pad(drafts[:, 1:], ((0, 0), (0, 1)))
    last = choice[np.arange(len(node)), node]
    tokens = np.where(level < accepted[:, None], drafts, -1)
    tokens = np.where((level == accepted[:, None]) & finite[:, None], last[:, None], tokens)
    return TreeVerdict(accepted, tokens, nodes[:, 1:], finite, np.where(finite[:, None], choice, -1))
