"""Sampling: from logits to integer weights to a token. Part of the verification's definition.

A token's weight is its softmax numerator as an integer, so that sums are exact and do not depend on
their order: every implementation, on any machine, draws the same token from the same logits and
uniforms. For the same reason the exponential is spelled out in single-precision multiplications and
additions; library exponentials differ in the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engines.errors import UsageError

__all__ = [
    "EXP_COEFFICIENTS",
    "EXP_FLOOR",
    "EXP_SQUARINGS",
    "WEIGHT_SCALE",
    "FloatArray",
    "IntArray",
    "SamplingParams",
    "SamplingRangeError",
    "draw",
    "exponential",
    "row_weights",
]

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

WEIGHT_SCALE = 2.0**30  # the most likely token's weight; 2^17 such tokens still sum within 2^63
EXP_FLOOR = -21.0  # exp(-21) is below 2^-30: a weight of zero
EXP_SQUARINGS = 5  # exp(x) = exp(x / 32)^32
# exp(y) = 1 + y (c1 + y (c2 + ...)) on [-21/32, 0], minimax in relative error (6e-8); after the five
# squarings the relative error is below 8e-6.
EXP_COEFFICIENTS = (0.9999962, 0.49992183, 0.16613463, 0.040049344, 0.0060159466)

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1


class SamplingRangeError(UsageError):
    """A sampling parameter is outside its range."""

    rule = "sampling.out-of-range"
    remedy_text = "Choose a value in the allowed range."


@dataclass(frozen=True)
class SamplingParams:
    """How a sequence's tokens are chosen from the target's logits.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding.
        top_k: keep the k most likely tokens (and ties of the last); 0 keeps all.
        top_p: keep the fewest tokens whose probability reaches p (and ties of the last); 1 keeps all.
            Applied to what top_k kept.
        seed: of the sequence's uniforms, 0 … 2^64 - 1.

    Raises:
        SamplingRangeError: a value is not in its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        heat_in_range = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE
        _check("temperature", self.temperature, heat_in_range, "0 (greedy) or 0.001 … 1000")
        _check("top_k", self.top_k, 0 <= self.top_k <= MAX_TOP_K, f"0 (off) or 1 … {MAX_TOP_K}")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, up to 1 (off)")
        _check("seed", self.seed, 0 <= self.seed <= MAX_SEED, f"0 … {MAX_SEED}")


def _check(name: str, value: float, in_range: bool, allowed: str) -> None:
    if not in_range:
        raise SamplingRangeError(f"{name} = {value}", place=name, allowed=allowed)


def exponential(x: FloatArray) -> FloatArray:
    """exp(x) for x ≤ 0 to a relative error of 8e-6; exactly 1 at 0; constant below EXP_FLOOR.

    Every operation is a single-precision multiplication or addition, rounded on its own: a kernel must
    not contract them to fused multiply-adds, or its last bits will differ.
    """
    scale = np.float32(2.0**-EXP_SQUARINGS)
    y: FloatArray = np.clip(x * scale, np.float32(EXP_FLOOR) * scale, np.float32(0))
    c1, c2, c3, c4, c5 = (np.float32(c) for c in EXP_COEFFICIENTS)
    e: FloatArray = np.float32(1) + y * (c1 + y * (c2 + y * (c3 + y * (c4 + y * c5))))
    for _ in range(EXP_SQUARINGS):
        e = e * e
    return e


def row_weights(logits: FloatArray, temperature: FloatArray, top_k: IntArray, top_p: FloatArray) -> IntArray:
    """Integer weights of the filtered distribution of every row.

    A weight is exp((logit - max) / temperature) · 2^30, cut to an integer. top-k keeps the tokens whose
    weight is at least the k-th largest. top-p then goes through the kept tokens from the heaviest down
    and keeps each while the weights before it sum to less than top_p of their total; tokens as heavy as
    the last one kept stay. Dropped tokens weigh nothing.

    Args:
        logits: f32 [B, R, V], finite.
        temperature, top_k, top_p: [B]; a sequence with temperature 0 is treated as at 1.

    Returns:
        i64 [B, R, V], each row's sum positive. A token's probability is f32(weight) / f32(sum).
    """
    heat = np.where(temperature > 0, temperature, np.float32(1))[:, None, None]
    with np.errstate(over="ignore"):  # to minus infinity, whose weight is zero, too
        e = exponential((logits - logits.max(-1, keepdims=True)) / heat)
    weights: IntArray = (e * np.float32(WEIGHT_SCALE)).astype(np.int64)
    if (top_k > 0).any() or (top_p < 1).any():
        threshold = _threshold(weights, top_k[:, None, None], top_p[:, None, None])
        weights = np.where(weights >= threshold, weights, 0)
    return weights


def _threshold(weights: IntArray, top_k: IntArray, top_p: FloatArray) -> IntArray:
    """The smallest weight of every row that both filters keep: i64 [B, R, 1].

    Args:
        weights: i64 [B, R, V]; top_k, top_p: [B, 1, 1].
    """
    ranked = np.sort(weights, -1)[..., ::-1]
    last = np.broadcast_to(np.clip(top_k, 1, ranked.shape[-1]) - 1, (*ranked.shape[:2], 1))
    by_rank = np.where(top_k > 0, np.take_along_axis(ranked, last, -1), 0)

    ranked = np.where(ranked >= by_rank, ranked, 0)
    before = ranked.cumsum(-1) - ranked
    total = ranked.sum(-1, keepdims=True)
    fits = before.astype(np.float32) < top_p * total.astype(np.float32)
    last = np.maximum(fits.sum(-1, keepdims=True), 1) - 1
    by_mass = np.where(top_p < 1, np.take_along_axis(ranked, last, -1), 0)
    threshold: IntArray = np.maximum(by_rank, by_mass)
    return threshold


def draw(weights: IntArray, u: FloatArray) -> IntArray:
    """Draw a token from every row of integer weights, by inversion.

    Args:
        weights: i64 [..., V], each row's sum positive.
        u: f32 [...] in [0, 1).

    Returns:
        i64 [...], the first token whose cumulative weight exceeds u · sum.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[..., -1]
    target = np.minimum((u * total.astype(np.float32)).astype(np.int64), total - 1)
    tokens = (cumulative <= target[..., None]).sum(-1)
    bounded: IntArray = np.minimum(tokens, weights.shape[-1] - 1)  # for rows that are not finite
    return bounded
