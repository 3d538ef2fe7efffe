"""Weights as initializers that point into the checkpoint's own files: nothing is read or copied.

Linear layers that read the same input (q, k, v; gate, up) become one GEMM. Where their rows lie
next to each other on disk, one initializer spans them all, so the fusion costs no bytes either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto

from builders.checkpoints.types import TensorRef
from builders.graph.builder import FLOAT, GraphBuilder
from builders.quantize import BLOCK_SIZE

__all__ = ["MICROSOFT_DOMAIN", "Weights"]

MICROSOFT_DOMAIN = "com.microsoft"  # MatMulNBits: int8 weights on the CPU, the one contrib op in use

LM_HEADS = ("lm_head.weight", "model.embed_tokens.weight")  # the second where they are tied

_ELEMENT = {
    "F32": TensorProto.FLOAT,
    "F16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "U8": TensorProto.UINT8,
}


class Weights:
    """Emits the linear layers, norms and embeddings of one checkpoint.

    Args:
        builder: the graph that receives the initializers.
        tensors: the checkpoint's, by canonical name.
        locations: the bundle-relative path of each of the checkpoint's files.
        vocab_size: rows of the embedding and of lm_head to use; rows above are padding.
        prefix: of the initializers' names (`target`, `drafter`).
    """

    def __init__(
        self,
        builder: GraphBuilder,
        tensors: Mapping[str, TensorRef],
        locations: Mapping[Path, str],
        vocab_size: int,
        prefix: str,
    ) -> None:
        self._builder = builder
        self._tensors = tensors
        self._locations = locations
        self._vocab_size = vocab_size
        self._prefix = prefix
        self._emitted: dict[str, str] = {}

    def vector(self, name: str) -> str:
        """A norm's weight or a bias, float32."""
        return self._external(name, self._tensors[name])

    def embedding(self) -> str:
        """The embedding table, [vocab_size, hidden] float32."""
        name = "model.embed_tokens.weight"
        return self._external(name, self._rows(self._tensors[name]))

    def lm_head(self, g: GraphBuilder, x: str) -> str:
        """Logits [rows, vocab_size] of hidden states [rows, hidden]; padded rows are left out."""
        name = next(n for n in LM_HEADS if n in self._tensors)
        # An initializer of its own even where it is tied: onnxruntime then drops the bytes that it has
        # packed for this product, and the embedding's pages stay untouched but for the rows looked up.
        return self.logits(g, x, name, "lm_head.weight")

    def logits(self, g: GraphBuilder, x: str, name: str, initializer: str = "") -> str:
        """Logits [rows, vocab_size] by the table `name` [vocab_size or more, hidden]."""
        tensor = self._rows(self._tensors[name])
        if tensor.dtype == "U8":
            scale = self._rows(self._tensors[f"{name}_scale"])
            return self._matmul_int8(g, x, name, tensor, scale, "lm_head")
        return g.op("Gemm", x, self._external(initializer or name, tensor), transB=1, name="lm_head")

    def lm_head_rows(self, g: GraphBuilder, x: str, ids: str) -> str:
        """Logits [rows, len(ids)] of the tokens `ids` (a constant) alone. Not for int8 weights."""
        key = f"lm_head.rows.{ids}"
        if key not in self._emitted:
            name = next(n for n in LM_HEADS if n in self._tensors)
            table = self._external(name, self._rows(self._tensors[name]))
            # In the outermost graph and once: the runtime folds the lookup when it loads the graph.
            self._emitted[key] = self._builder.op("Gather", table, ids, name="lm_head.rows")
        return g.op("Gemm", x, self._emitted[key], transB=1, name="lm_head")

    def linear(self, g: GraphBuilder, x: str, names: tuple[str, ...], *, residual: str = "") -> str:
        """`x` [rows, in] through one or several linear layers side by side → [rows, sum of outs].

        Args:
            names: module names without `.weight`; a module's `.bias` is used where there is one.
            residual: a [rows, out] tensor to add; rides along as the GEMM's C operand.
        """
        label = "+".join(n.rsplit(".", 1)[-1] for n in names)
        weights = [self._tensors[f"{n}.weight"] for n in names]
        fused = _join(weights)
        parts = [(names, fused)] if fused else [((n,), w) for n, w in zip(names, weights, strict=True)]
        bias = self._bias(g, names)
        addend = residual or bias
        pieces = []
        for group, tensor in parts:
            name = "+".join(group)
            if tensor.dtype == "U8":
                scale = _join([self._tensors[f"{n}.weight_scale"] for n in group])
                if scale is None:
                    raise ValueError(f"scales of {name} are not adjacent")  # our own writer's contract
                pieces.append(self._matmul_int8(g, x, f"{name}.weight", tensor, scale, label))
                continue
            operands = [x, self._external(f"{name}.weight", tensor)]
            if addend and len(parts) == 1:
                operands.append(addend)
            pieces.append(g.op("Gemm", *operands, transB=1, name=label))
        y = pieces[0] if len(pieces) == 1 else g.op("Concat", *pieces, axis=1, name=label)
        in_gemm = addend if len(parts) == 1 and parts[0][1].dtype != "U8" else ""
        for term in (residual, bias):
            if term and term != in_gemm:
                y = g.op("Add", y, term, name=f"{label}.add")
        return y

    def _bias(self, g: GraphBuilder, names: tuple[str, ...]) -> str:
        present = [n for n in names if f"{n}.bias" in self._tensors]
        if not present:
            return ""
        biases = [self._tensors[f"{n}.bias"] for n in names]
        fused = _join(biases)
        if fused:
            return self._external("+".join(names) + ".bias", fused)
        return g.op("Concat", *(self.vector(f"{n}.bias") for n in names), axis=0, name="bias")

    def _matmul_int8(
        self, g: GraphBuilder, x: str, name: str, tensor: TensorRef, scale: TensorRef, label: str
    ) -> str:
        rows, blocks, block = tensor.shape
        return g.op(
            "MatMulNBits",
            x,
            self._external(name, tensor),
            self._external(f"{name}_scale", replace(scale, shape=(rows * blocks,))),
            domain=MICROSOFT_DOMAIN,
            name=label,
            K=blocks * block,
            N=rows,
            bits=8,
            block_size=BLOCK_SIZE,
            accuracy_level=4,
        )

    def _rows(self, tensor: TensorRef) -> TensorRef:
        """The first `vocab_size` rows: row-major storage makes them a prefix of the bytes."""
        rows = tensor.shape[0]
        shape = (self._vocab_size, *tensor.shape[1:])
        return replace(tensor, shape=shape, length=tensor.length // rows * self._vocab_size)

    def _external(self, name: str, tensor: TensorRef) -> str:
        if name in self._emitted:
            return self._emitted[name]
        proto = onnx.TensorProto(
            name=f"{self._prefix}.{name}", data_type=_ELEMENT[tensor.dtype], dims=tensor.shape
        )
        proto.data_location = TensorProto.EXTERNAL
        place = {
            "location": self._locations[tensor.file],
            "offset": str(tensor.offset),
            "length": str(tensor.length),
        }
        for key, value in place.items():
            proto.external_data.add(key=key, value=value)
        result = self._builder.initializer(proto)
        if tensor.dtype in ("F16", "BF16"):
            result = self._builder.op("Cast", result, to=FLOAT, name=f"{proto.name}.f32")
        self._emitted[name] = result
        return result


def _join(tensors: list[TensorRef]) -> TensorRef | None:
    """One tensor that spans all of `tensors`, if they follow each other in one file; else None."""
    first = tensors[0]
    end = first.offset
    for tensor in tensors:
        alike = (tensor.file, tensor.dtype, tensor.shape[1:]) == (first.file, first.dtype, first.shape[1:])
        if not alike or tensor.offset != end:
            return None
        end += tensor.length
    rows = sum(t.shape[0] for t in tensors)
    return replace(first, shape=(rows, *first.shape[1:]), length=end - first.offset)
