"""int8 weights for the CPU: per block of input channels, symmetric, for onnxruntime's MatMulNBits.

Linear layers and lm_head become uint8 with one float32 scale a block; embeddings and norms stay as
they are. The activations are quantized on the fly, each row by itself but with kernels that depend
on the number of rows: logits of one position differ between a one-token and a several-token step.
An int8 engine is therefore not lossless, and its manifest says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_SIZE", "quantize_rows"]

BLOCK_SIZE = 32
ZERO_POINT = 128  # MatMulNBits' default for 8 bits


def quantize_rows(
    weight: npt.NDArray[np.float32], block: int = BLOCK_SIZE
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Quantize a linear layer's weight.

    Args:
        weight: [out, in]; `in` is padded with zeros to a multiple of `block`.

    Returns:
        (uint8 [out, blocks, block], float32 [out, blocks]); weight ≈ (q - 128) * scale.
    """
    rows, columns = weight.shape
    blocks = -(-columns // block)
    padded = np.zeros((rows, blocks * block), np.float32)
    padded[:, :columns] = weight
    grouped = padded.reshape(rows, blocks, block)
    scale = np.abs(grouped).max(axis=2) / np.float32(127)
    safe = np.where(scale == 0, np.float32(1), scale)
    q = np.rint(grouped / safe[:, :, None]) + ZERO_POINT
    return q.astype(np.uint8), scale.astype(np.float32)
