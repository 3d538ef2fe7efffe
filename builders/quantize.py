"""int8 weights for the CPU: per block of input channels, symmetric, for onnxruntime's MatMulNBits.

Linear layers and lm_head become uint8 with one float32 scale a block; embeddings, norms and biases
stay as they are. onnxruntime quantizes the activations on the fly with kernels that depend on the
number of rows: logits of one position differ between a one-token and a several-token step. An int8
engine is therefore not lossless, and its manifest says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from builders.checkpoints.safetensors import read_header
from builders.checkpoints.safetensors_writer import TensorSpec, fusable, write_safetensors
from builders.checkpoints.types import Checkpoint, TensorRef
from engines.errors import CheckpointError

__all__ = ["BLOCK_SIZE", "quantize_int8", "quantize_rows"]

BLOCK_SIZE = 64
ZERO_POINT = 128  # MatMulNBits' default for 8 bits
ROWS_AT_ONCE = 4096

_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight|lm_head\.weight")
_NUMPY: Mapping[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class QuantizationError(CheckpointError):
    """A tensor cannot be quantized."""

    rule = "quantize.shape"
    remedy_text = "Build without quantization: quantization: {scheme: none}."


def quantize_rows(weight: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Quantize rows of a linear layer's weight.

    Args:
        weight: [out, in]; `in` is a multiple of BLOCK_SIZE.

    Returns:
        (uint8 [out, blocks, BLOCK_SIZE], float32 [out, blocks]); weight ≈ (q - 128) * scale.
    """
    grouped = weight.reshape(weight.shape[0], -1, BLOCK_SIZE)
    scale = np.abs(grouped).max(axis=2) / np.float32(127)
    safe = np.where(scale == 0, np.float32(1), scale)
    quantized = np.rint(grouped / safe[:, :, None]) + ZERO_POINT
    return quantized.astype(np.uint8), scale


def quantize_int8(
    checkpoint: Checkpoint, out: Path, *, progress: Callable[[int, int], None] | None = None
) -> Checkpoint:
    """Write `out`/model-int8.safetensors; memory is bounded by a few thousand rows.

    Args:
        out: an existing folder.
        progress: called with (bytes written, bytes in all).

    Returns:
        The checkpoint with its tensors in the new file: linear weights U8 [out, blocks, BLOCK_SIZE],
        their scales F32 [out, blocks] under `….weight_scale`.

    Raises:
        QuantizationError: a linear layer's input width is no multiple of BLOCK_SIZE.
        DiskFullError: no space for the file.
    """
    sources = dict(checkpoint.tensors)
    if checkpoint.config.tie_embeddings:  # the embedding stays; lm_head becomes a copy of its own
        sources["lm_head.weight"] = sources["model.embed_tokens.weight"]
    linear = {name for name in sources if _LINEAR.fullmatch(name)}
    for name in sorted(linear):
        width = sources[name].shape[1]
        if width % BLOCK_SIZE:
            raise QuantizationError(
                f"an input width of {width}", place=name, allowed=f"a multiple of {BLOCK_SIZE}"
            )
    order = fusable(sources)
    specs = [_spec(name, sources[name], name in linear) for name in order]
    # Scales follow in the weights' order: what is adjacent among the weights is so among the scales.
    specs += [
        TensorSpec(f"{name}_scale", "F32", (sources[name].shape[0], sources[name].shape[1] // BLOCK_SIZE))
        for name in order
        if name in linear
    ]

    def chunks(spec: TensorSpec) -> Iterator[npt.NDArray[Any]]:
        name = spec.name.removesuffix("_scale")
        for rows in _rows(sources[name]):
            if name not in linear:
                yield rows
            else:
                quantized, scale = quantize_rows(rows.astype(np.float32))
                yield scale if spec.name.endswith("_scale") else quantized

    file = out / "model-int8.safetensors"
    write_safetensors(file, specs, chunks, progress=progress)
    return quantized_checkpoint(checkpoint, file)


def quantized_checkpoint(checkpoint: Checkpoint, file: Path) -> Checkpoint:
    """`checkpoint` with the tensors of a file that `quantize_int8` wrote."""
    return replace(checkpoint, tensors=read_header(file))


def _spec(name: str, tensor: TensorRef, quantized: bool) -> TensorSpec:
    if not quantized:
        return TensorSpec(name, tensor.dtype, tensor.shape)
    rows, width = tensor.shape
    return TensorSpec(name, "U8", (rows, width // BLOCK_SIZE, BLOCK_SIZE))


def _rows(tensor: TensorRef) -> Iterator[npt.NDArray[Any]]:
    """A tensor's rows, some at a time, mapped rather than read."""
    data = np.memmap(tensor.file, _NUMPY[tensor.dtype], "r", tensor.offset, tensor.shape)
    for start in range(0, tensor.shape[0], ROWS_AT_ONCE):
        yield np.asarray(data[start : start + ROWS_AT_ONCE])
