"""Verification on trees whose siblings were drawn: the definition, in numpy; terms are `reference`'s.

The drafter draws a node's children one after the other from its distribution q, without replacement: a
token that was drawn weighs nothing in the next draw. The verifier tries them in that order. Child x is
accepted with probability min(1, p(x) / q(x)); where it is rejected, p becomes max(p - q, 0), normalised,
and q loses x. What remains of p after the last rejection gives the correction; a node without children
to try gives the bonus token from p itself. What is emitted is distributed as p: each try is one step of
speculative sampling whose "correction" the next try goes on with. (Jeon et al. 2024, "Recursive
speculative decoding", section 3.1; Miao et al. 2024, SpecInfer, algorithm 2.)

With one child a node this is `reference.verify_chain` with draft logits, token for token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engines.sampling import FloatArray, IntArray, draw, row_weights
from engines.uniforms import ACCEPT, DRAWS, SAMPLE
from engines.verification.reference import BoolArray, _probability, _residual

__all__ = ["NO_TOKEN", "DrawnVerdict", "draw_siblings", "verify_tree_drawn"]

NO_TOKEN = -1  # what is drawn where no token is left; the verifier passes over it


class DrawnVerdict(NamedTuple):
    """The outcome of a verify step: as in `tree_reference.TreeVerdict`.

    Attributes:
        accepted: i64 [B]; tokens: i64 [B, P]; path: i64 [B, P - 1]; finite: bool [B].
    """

    accepted: IntArray
    tokens: IntArray
    path: IntArray
    finite: BoolArray


def draw_siblings(
    logits: FloatArray, temperature: FloatArray, top_k: IntArray, top_p: FloatArray, u: FloatArray
) -> IntArray:
    """Draw W different tokens a sequence; the W best in order where the temperature is 0.

    Args:
        logits: f32 [B, V]; temperature, top_k, top_p: [B]; u: f32 [B, W], the position's DRAFT uniforms.

    Returns:
        i64 [B, W]; NO_TOKEN from where on no token with a weight is left.
    """
    rows, width = np.arange(len(logits)), u.shape[1]
    best = (-logits).argsort(-1, kind="stable")[:, :width]
    tokens = np.full(u.shape, NO_TOKEN, np.int64)
    tokens[:, : best.shape[1]] = best
    with np.errstate(invalid="ignore"):
        weights = row_weights(logits[:, None], temperature, top_k, top_p)[:, 0]
        for w in range(width):
            drawn = draw(weights, u[:, w])
            drawn = np.where(weights.sum(-1) > 0, drawn, NO_TOKEN)
            tokens[:, w] = np.where(temperature > 0, drawn, tokens[:, w])
            weights[rows, drawn.clip(0)] = 0
    return tokens


def verify_tree_drawn(
    target_logits: FloatArray,
    draft_tokens: IntArray,
    parents: IntArray,
    draft_counts: IntArray,
    draft_logits: FloatArray,
    temperature: FloatArray,
    top_k: IntArray,
    top_p: FloatArray,
    uniforms: FloatArray,
) -> DrawnVerdict:
    """Verify one tree of drawn siblings a sequence.

    Args:
        target_logits, draft_tokens, parents, draft_counts: as in `tree_reference.verify_tree`; a node's
            children come in the order in which they were drawn. Tokens outside the vocabulary are passed
            over. How many nodes count must not depend on what was drawn for them.
        draft_logits: f32 [B, R, V]: row n is what node n's children were drawn from.
        temperature, top_k, top_p: [B], see `SamplingParams`.
        uniforms: f32 [B, P, 3 W], see `engines.uniforms`: entry d decides the token at depth d + 1, lane w
            the child w. Further children, and nodes deeper than P - 1, are not tried.
    """
    batch, rows, _ = target_logits.shape
    levels, width = uniforms.shape[1], uniforms.shape[2] // DRAWS
    sequences = np.arange(batch)
    sampled = temperature > 0
    finite = np.isfinite(target_logits).all((1, 2)) & (~sampled | np.isfinite(draft_logits).all((1, 2)))
    best = target_logits.argmax(-1)
    # Columns of nodes; the root's own is no one's child.
    above = np.pad(parents, ((0, 0), (1, 0)), constant_values=-1)
    held = np.pad(draft_tokens, ((0, 0), (1, 0)), constant_values=NO_TOKEN)
    real = np.arange(rows) <= draft_counts[:, None]

    node, accepted = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
    path = np.zeros((batch, levels), np.int64)
    going = finite.copy()
    last = np.full(batch, -1, np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):  # rows that are not finite: computed, refused
        for level in range(levels):
            p = row_weights(target_logits[sequences, node][:, None], temperature, top_k, top_p)
            q = row_weights(draft_logits[sequences, node][:, None], temperature, top_k, top_p)
            children = (above == node[:, None]) & real
            place = children.cumsum(1)
            found = np.zeros(batch, np.bool_)
            following = node
            for w in range(width if level < levels - 1 else 0):
                child = (children & (place == w + 1)).argmax(1)
                x = held[sequences, child]
                inside = (x >= 0) & (x < target_logits.shape[-1])
                tried = going & ~found & (child > 0) & inside & (~sampled | (q.sum((1, 2)) > 0))
                ceiling = uniforms[:, level, DRAWS * w + ACCEPT] * _probability(q, x[:, None])[:, 0]
                likely = ceiling < _probability(p, x[:, None])[:, 0]
                passed = np.where(sampled, likely, x == best[sequences, node])
                following = np.where(tried & passed, child, following)
                found |= tried & passed
                for b in np.flatnonzero(tried & ~passed & sampled):
                    p[b, 0] = _residual(p[b, 0], q[b, 0])
                    q[b, 0, x[b]] = 0
            own = np.where(sampled, draw(p[:, 0], uniforms[:, level, SAMPLE]), best[sequences, node])
            last = np.where(going & ~found, own, last)
            path[:, level] = np.where(found, following, 0)
            accepted += found
            node, going = following, going & found

    column = np.arange(levels)
    tokens = np.where(column < accepted[:, None], held[sequences[:, None], path], -1)
    tokens = np.where((column == accepted[:, None]) & finite[:, None], last[:, None], tokens)
    return DrawnVerdict(accepted, tokens, path[:, :-1], finite)
