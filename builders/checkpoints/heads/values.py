"""Weights that are no numbers: one NaN in a drafter makes every draft of it worthless, silently."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from builders.checkpoints.heads.source import HeadError
from builders.checkpoints.heads.types import EagleHead, MedusaHeads
from builders.checkpoints.safetensors_writer import ELEMENT
from builders.checkpoints.types import Checkpoint, TensorRef

__all__ = ["NotFiniteError", "check_values", "pieces"]

PIECE = 4 << 20  # values at a time


class NotFiniteError(HeadError):
    """A drafter's weights hold a NaN or an infinite value."""

    rule = "head.not-finite"
    remedy_text = "The training diverged or the file is damaged: use another checkpoint."


def check_values(drafter: Checkpoint | MedusaHeads | EagleHead) -> None:
    """Reads all weights once, a few MiB at a time.

    Raises:
        NotFiniteError: names the first value that is NaN or infinite.
    """
    for tensor in drafter.tensors.values():
        if tensor.dtype not in ELEMENT:
            continue  # in a checkpoint there may be other things: no graph reads them
        start = 0
        for piece in pieces(tensor, ELEMENT[tensor.dtype]):
            finite = np.isfinite(piece)
            if not finite.all():
                first = int(np.argmin(finite))
                bad = int(piece.size - np.count_nonzero(finite))
                place = [int(i) for i in np.unravel_index(start + first, tensor.shape)]
                raise NotFiniteError(
                    f"{piece[first]} at {place} ({bad} such among {piece.size} values)",
                    place=f"{tensor.file}:{tensor.name}",
                    allowed="finite numbers",
                )
            start += piece.size


def pieces(tensor: TensorRef, element: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """A tensor's values in row-major order, a few MiB at a time."""
    count = math.prod(tensor.shape)
    for start in range(0, count, PIECE):
        size = min(PIECE, count - start)
        yield np.fromfile(tensor.file, element, size, offset=tensor.offset + start * element.itemsize)
