"""A model's KV cache in the graph: inputs, the two ways to attend to it, and its outputs."""

from __future__ import annotations

from collections.abc import Sequence

from builders.checkpoints.types import DecoderConfig
from builders.graph.builder import FLOAT, INT64, GraphBuilder
from builders.graph.decoder import KeyValue, Past

__all__ = ["Cache"]


class Cache:
    """The caches of all layers of one model.

    Attributes:
        lengths: i64 [batch], a graph input: positions in the cache before this step.
        span: i64 scalar: positions that the bound caches hold at most.

    Args:
        g: the outermost graph.
        who: prefix of the tensors' names: `target` or `drafter`.
    """

    def __init__(self, g: GraphBuilder, who: str, config: DecoderConfig, lengths: str) -> None:
        self._g = g
        self._who = who
        self._shape: list[int | str] = ["B", config.num_kv_heads, f"S.{who}", config.head_dim]
        self.lengths = g.input(lengths, INT64, ["B"])
        self._pairs: list[KeyValue] = [
            (
                g.input(f"{who}.k.{i}", FLOAT, self._shape),
                g.input(f"{who}.v.{i}", FLOAT, self._shape),
            )
            for i in range(config.num_layers)
        ]
        axis = g.op("Shape", self._pairs[0][0], start=2, end=3)
        self.span = g.op("Squeeze", axis, g.const([0]), name=f"{who}.span")

    def in_place(self, layer: int, new: KeyValue) -> KeyValue:
        """Write this call's keys and values behind each length; attention reads the cache. A `Past`."""
        return self.write(layer, [new])

    def appended(self, g: GraphBuilder, earlier: Sequence[Sequence[KeyValue]]) -> Past:
        """Attention reads the cache, then what earlier calls of this step left, then this call's own."""

        def past(layer: int, new: KeyValue) -> KeyValue:
            pieces = [self._pairs[layer], *(call[layer] for call in earlier), new]
            keys, values = zip(*pieces, strict=True)
            return g.op("Concat", *keys, axis=2, name="keys"), g.op("Concat", *values, axis=2, name="values")

        return past

    def write(self, layer: int, pieces: Sequence[KeyValue]) -> KeyValue:
        """Write new keys and values behind each sequence's length; to be called once a layer."""
        g = self._g
        written = []
        for cached, parts in zip(self._pairs[layer], zip(*pieces, strict=True), strict=True):
            new = parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=2)
            result = g.op("TensorScatter", cached, new, self.lengths, axis=2, mode="linear")
            written.append(g.output(f"{cached}.out", result, FLOAT, self._shape))
        return written[0], written[1]
