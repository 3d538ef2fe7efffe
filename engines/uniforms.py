"""Uniform random numbers as a function of (seed, sequence, position): Philox4x32-10.

A counter-based generator has no state, so a draw depends on nothing but its key: not on batch mates,
batch slots, restarts, or on how many tokens a step happened to accept. (Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011.)

A position may be drafted again after a rejection before it, with the same uniforms. That is sound:
whether a step reaches a position is decided by the uniforms of earlier positions alone, and what was
drafted beyond a rejection is thrown away, so the numbers are fresh when they finally count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["ACCEPT", "DRAFT", "DRAWS", "SAMPLE", "philox", "uniforms"]

# The last axis of `uniforms`: what each number of a position is for.
DRAFT, ACCEPT, SAMPLE = 0, 1, 2
DRAWS = 3

_ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_LANE = np.uint64(56)
_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], np.uint64)  # of words 2 and 0
# Round r adds r times the Weyl constants to the key's two words.
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], np.uint64)


def philox(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10.

    Args:
        counter: [4, N], 32-bit words.
        key: [2, N], 32-bit words.

    Returns:
        [4, N], 32-bit words.
    """
    keys = (key + _WEYL[:, :, None]) & _MASK  # [rounds, 2, N]
    # Words 2 and 0 are multiplied, words 3 and 1 are only mixed in: two pairs, one array operation each.
    multiplied, mixed = counter[[2, 0]], counter[[1, 3]]
    for round_key in keys:
        product = multiplied * _MULTIPLIERS
        multiplied, mixed = ((product >> _SHIFT) ^ mixed ^ round_key)[::-1], product & _MASK
    return np.stack([multiplied[1], mixed[0], multiplied[0], mixed[1]])


def uniforms(
    seeds: npt.NDArray[np.uint64],
    sequences: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    rows: int,
    *,
    lanes: int = 1,
) -> npt.NDArray[np.float32]:
    """The uniforms of `rows` consecutive positions of each sequence of a batch.

    Args:
        seeds: u64 [B], the requests' seeds.
        sequences: u64 [B], which sequence of that seed.
        positions: i64 [B], below 2^56: the index in its sequence of the token that row 0 decides.
        rows: positions a sequence.
        lanes: up to 256: siblings that are drawn at a position. Lane 0 is the same for any number.

    Returns:
        f32 [B, rows, 3 lanes] in [0, 1), multiples of 2^-24; of each lane (DRAFT, ACCEPT, SAMPLE).
    """
    batch = len(seeds)
    at = (positions[:, None] + np.arange(rows)).astype(np.uint64)
    # The lane is the position's topmost byte.
    at = (at[..., None] | np.arange(lanes, dtype=np.uint64) << _LANE).reshape(-1)
    sequence = np.repeat(sequences.astype(np.uint64), rows * lanes)
    seed = np.repeat(seeds.astype(np.uint64), rows * lanes)
    counter = np.stack([at & _MASK, at >> _SHIFT, sequence & _MASK, sequence >> _SHIFT])
    words = philox(counter, np.stack([seed & _MASK, seed >> _SHIFT]))
    scaled = (words[:DRAWS] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
    return np.ascontiguousarray(scaled.T).reshape(batch, rows, lanes * DRAWS)
