"""The definition of verification, in numpy. Other implementations agree with it token for token.

A verify step holds, for each of B sequences, up to G draft tokens and the target's logits for R = G + 1
rows: row i is the target's distribution after i draft tokens. Draft tokens are accepted from the first
on until one is rejected; one more token always follows, from the target itself: the *correction* at the
first rejected position, or the *bonus* token after the last draft token.

Greedy (temperature 0): a draft token is accepted if it is the row's argmax.

Sampled, deterministic drafts (prompt lookup and the like: the drafter's distribution is a point mass):
the row's token is drawn from the target with the position's own uniform, and the draft token is accepted
if it is that token. It is accepted with probability p(x), as rejection sampling would, and what is
emitted is what plain sampling with the same seed emits: speculation changes nothing at all.

Sampled, drafts drawn from a distribution q: x is accepted with probability min(1, p(x) / q(x)); the
correction is drawn from max(p - q, 0), normalised. What is emitted is distributed as p. (Leviathan,
Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023, section 2.3;
Chen et al., "Accelerating large language model decoding with speculative sampling", 2023.)
p and q are filtered alike, by temperature, top-k and top-p.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from engines.sampling import FloatArray, IntArray, draw, row_weights
from engines.uniforms import ACCEPT, SAMPLE

__all__ = ["RESIDUAL_SCALE", "Verdict", "draw_tokens", "verify_chain"]

RESIDUAL_SCALE = 2.0**40  # p - q is often small; 2^22 tokens of residual 1 still sum within 2^63

BoolArray = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", np.float32, np.int64)


class Verdict(NamedTuple):
    """The outcome of a verify step.

    Attributes:
        accepted: i64 [B], draft tokens accepted.
        tokens: i64 [B, R]: the accepted draft tokens, the correction or bonus token, then -1.
        finite: bool [B]; False if a logit of the sequence is NaN or infinite: nothing was accepted, all
            tokens are -1, and the step must be refused. All rows count, the drafter's too if they are
            sampled from. Magnitudes above 1e30 may count as infinite.
    """

    accepted: IntArray
    tokens: IntArray
    finite: BoolArray


def verify_chain(
    target_logits: FloatArray,
    draft_tokens: IntArray,
    draft_counts: IntArray,
    draft_logits: FloatArray | None,
    temperature: FloatArray,
    top_k: IntArray,
    top_p: FloatArray,
    uniforms: FloatArray,
) -> Verdict:
    """Verify one chain of draft tokens a sequence.

    Args:
        target_logits: f32 [B, R, V], R = G + 1.
        draft_tokens: i64 [B, G], ids of the vocabulary; entries beyond the sequence's count are ignored.
        draft_counts: i64 [B], 0 … G. Row `draft_counts[b]` is the bonus row.
        draft_logits: f32 [B, G, V], what the draft tokens were drawn from; None: they are point masses.
        temperature, top_k, top_p: [B], see `SamplingParams`.
        uniforms: f32 [B, R, 3], see `engines.uniforms`.
    """
    with np.errstate(invalid="ignore", divide="ignore"):  # rows that are not finite: computed, refused
        greedy = temperature == 0
        finite = np.isfinite(target_logits).all((1, 2))
        best = target_logits.argmax(-1)
        if draft_logits is None:
            weights = row_weights(target_logits, temperature, top_k, top_p)
            choice = np.where(greedy[:, None], best, draw(weights, uniforms[..., SAMPLE]))
            accepted = _first_rejected(draft_tokens == choice[:, :-1], draft_counts)
            last = _at(choice, accepted)
        else:
            finite &= greedy | np.isfinite(draft_logits).all((1, 2))
            p = row_weights(target_logits, temperature, top_k, top_p)
            q = row_weights(draft_logits, temperature, top_k, top_p)
            ceiling = uniforms[:, :-1, ACCEPT] * _probability(q, draft_tokens)
            likely = ceiling < _probability(p[:, :-1], draft_tokens)
            passed = np.where(greedy[:, None], draft_tokens == best[:, :-1], likely)
            accepted = _first_rejected(passed, draft_counts)
            weights = _at(p, accepted)
            for b in np.flatnonzero(accepted < draft_counts):
                weights[b] = _residual(p[b, accepted[b]], q[b, accepted[b]])
            sampled = draw(weights, _at(uniforms[..., SAMPLE], accepted))
            last = np.where(greedy, _at(best, accepted), sampled)

    accepted = np.where(finite, accepted, 0)
    column = np.arange(target_logits.shape[1])
    tokens = np.full(target_logits.shape[:2], -1, np.int64)
    tokens[:, :-1] = np.where(column[:-1] < accepted[:, None], draft_tokens, -1)
    tokens = np.where((column == accepted[:, None]) & finite[:, None], last[:, None], tokens)
    return Verdict(accepted, tokens, finite)


def draw_tokens(
    logits: FloatArray, temperature: FloatArray, top_k: IntArray, top_p: FloatArray, u: FloatArray
) -> IntArray:
    """The drafter's own draw: argmax where the temperature is 0.

    Args:
        logits: f32 [B, V]; temperature, top_k, top_p: [B]; u: f32 [B], the position's DRAFT uniform.

    Returns:
        i64 [B].
    """
    with np.errstate(invalid="ignore"):
        drawn = draw(row_weights(logits[:, None], temperature, top_k, top_p)[:, 0], u)
    return np.where(temperature > 0, drawn, logits.argmax(-1))


def _first_rejected(passed: BoolArray, counts: IntArray) -> IntArray:
    """[B, G] → i64 [B]: the first of each sequence's drafts that did not pass, else its count."""
    passed = passed & (np.arange(passed.shape[1]) < counts[:, None])
    with_end = np.pad(passed, ((0, 0), (0, 1)), constant_values=False)
    first: IntArray = with_end.argmin(-1)
    return first


def _at(values: npt.NDArray[Scalar], index: IntArray) -> npt.NDArray[Scalar]:
    """[B, R, ...] → [B, ...]: each sequence's own row."""
    chosen: npt.NDArray[Scalar] = values[np.arange(len(index)), index]
    return chosen


def _probability(weights: IntArray, tokens: IntArray) -> FloatArray:
    """f32 [B, G]: the probability of one token in each row of weights [B, G, V]."""
    chosen = np.take_along_axis(weights, tokens[..., None].clip(0, weights.shape[-1] - 1), -1)[..., 0]
    probability: FloatArray = chosen.astype(np.float32) / weights.sum(-1).astype(np.float32)
    return probability


def _residual(p: IntArray, q: IntArray) -> IntArray:
    """Integer weights [V] of max(p - q, 0); p's own if rounding leaves nothing of it."""
    difference = p.astype(np.float32) / np.float32(p.sum()) - q.astype(np.float32) / np.float32(q.sum())
    weights: IntArray = (np.maximum(difference, np.float32(0)) * np.float32(RESIDUAL_SCALE)).astype(np.int64)
    return weights if weights.any() else p
