"""Writes safetensors files and checkpoint folders: streaming, in an order that lets layers fuse.

Linear layers that read the same input are stored side by side (q, k, v; gate, up), weights and
biases each, so that graph emission can address them as one matrix without copying a byte.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from engines.errors import CheckpointError
from engines.files import disk_errors, need_space, publish_folder

__all__ = ["ELEMENT", "OutputExistsError", "TensorSpec", "atomic_folder", "fusable", "write_safetensors"]

ELEMENT: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
_DATA_ALIGNMENT = 64

# Within a layer: what shares an input is adjacent, in the order of the fused matrix.
_LAYER_ORDER = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.o_proj.weight",
    "self_attn.o_proj.bias",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.gate_proj.bias",
    "mlp.up_proj.bias",
    "mlp.down_proj.weight",
    "mlp.down_proj.bias",
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ENDS = {"model.embed_tokens.weight": -1, "model.norm.weight": 1 << 32, "lm_head.weight": (1 << 32) + 1}


class OutputExistsError(CheckpointError):
    """The output folder holds something that a conversion would not have put there."""

    rule = "checkpoint.output-exists"
    remedy_text = "Choose another output folder, or delete this one yourself."


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written. `dtype` is one of `ELEMENT`'s keys."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes."""
        length = ELEMENT[self.dtype].itemsize
        for dim in self.shape:
            length *= dim
        return length


def fusable(names: Iterable[str]) -> list[str]:
    """Hugging Face tensor names in the order in which to store them."""

    def place(name: str) -> tuple[int, int, str]:
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return _ENDS.get(name, (1 << 32) + 2), 0, name
        within = layer[2]
        rank = _LAYER_ORDER.index(within) if within in _LAYER_ORDER else len(_LAYER_ORDER)
        return int(layer[1]), rank, within

    return sorted(names, key=place)


def write_safetensors(
    file: Path,
    specs: Sequence[TensorSpec],
    chunks: Callable[[TensorSpec], Iterable[npt.NDArray[Any]]],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes the tensors in the order of `specs`; at most one chunk is in memory.

    Args:
        file: must not exist.
        specs: names, dtypes and shapes of all tensors.
        chunks: a tensor's values in row-major order, in pieces of the spec's dtype.
        progress: called with (bytes written, bytes in all) after each tensor.

    Raises:
        DiskFullError: no space for it.
        ValueError: `chunks` yields another dtype or another number of values than the spec says.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.length
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)

    need_space(file.parent, 8 + len(text) + end)
    with disk_errors(file), file.open("xb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        written = 0
        for spec in specs:
            written += _write_tensor(out.write, spec, chunks(spec))
            if progress is not None:
                progress(written, end)
        out.flush()
        os.fsync(out.fileno())


def _write_tensor(
    write: Callable[[memoryview], int], spec: TensorSpec, chunks: Iterable[npt.NDArray[Any]]
) -> int:
    written = 0
    for chunk in chunks:
        if chunk.dtype != ELEMENT[spec.dtype]:
            raise ValueError(f"{spec.name}: a chunk in {chunk.dtype} instead of {spec.dtype}")
        # numpy exports no buffer for bfloat16: pass its bytes.
        write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
        written += chunk.nbytes
    if written != spec.length:
        raise ValueError(f"{spec.name}: {written} bytes instead of {spec.length}")
    return written


@contextmanager
def atomic_folder(out: Path, replaceable: frozenset[str]) -> Iterator[Path]:
    """`publish_folder`, unless that would delete what the caller did not write.

    Args:
        out: may exist if it holds nothing but entries named in `replaceable` (an earlier result).
        replaceable: names of the files and folders that the caller writes.

    Raises:
        OutputExistsError: `out` is a file, or holds something else.
        DiskFullError: no space.
    """
    if out.exists():
        strange = {entry.name for entry in out.iterdir()} - replaceable if out.is_dir() else {out.name}
        if strange:
            raise OutputExistsError(f"it exists and holds {min(strange)!r}", place=out)
    with publish_folder(out) as folder:
        yield folder
