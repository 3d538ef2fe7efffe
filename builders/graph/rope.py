"""Rotary position embedding: every supported scaling is a choice of frequencies.

Sources: RoPE (Su et al. 2021), position interpolation (Chen et al. 2023: `linear`), YaRN (Peng et
al. 2023, section 3), and the piecewise scaling of Llama 3.1 (`llama3`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from builders.checkpoints.types import Rope

__all__ = ["inverse_frequencies"]


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[npt.NDArray[np.float64], float]:
    """Angular speed of each pair of dimensions, and the factor that scales sine and cosine.

    Returns:
        ([head_dim / 2] radians a position, factor).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    return _yarn(rope, plain, head_dim)


def _llama3(rope: Rope, plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    turns = rope.original_max_position / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray((1 - blend) * plain / rope.factor + blend * plain)


def _yarn(rope: Rope, plain: npt.NDArray[np.float64], head_dim: int) -> tuple[npt.NDArray[np.float64], float]:
    """A linear ramp between the dimensions that turn `beta_fast` and `beta_slow` times in the context."""

    def dimension(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float64) - low) / max(high - low, 1e-3)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    speeds = (1 - keep) * plain / rope.factor + keep * plain
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return np.asarray(speeds), factor
