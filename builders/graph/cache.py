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
        compacted: a tree's accepted path is written a second time (`keep_path`). What the first write
            left is then an output of its own, `.step`: a runtime that binds both outputs to the
            input's memory writes in place twice; an unbound value would be a copy of the cache.
    """

    def __init__(
        self, g: GraphBuilder, who: str, config: DecoderConfig, lengths: str, *, compacted: bool = False
    ) -> None:
        self._g = g
        self._shape: list[int | str] = ["B", config.num_kv_heads, f"S.{who}", config.head_dim]
        self._written = ".step" if compacted else ".out"
        self.lengths = g.input(lengths, INT64, ["B"])
        self._names: list[KeyValue] = [
            (
                g.input(f"{who}.k.{i}", FLOAT, self._shape),
                g.input(f"{who}.v.{i}", FLOAT, self._shape),
            )
            for i in range(config.num_layers)
        ]
        self._pairs = list(self._names)  # the caches as they are by now
        self._new: dict[int, KeyValue] = {}
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
        keys, values = zip(*pieces, strict=True)
        new = (_joined(g, keys), _joined(g, values))
        self._new[layer] = new
        self._scatter(layer, new, self.lengths, self._written)
        return self._pairs[layer]

    def keep_path(self, rows: str, start: str) -> None:
        """Compact what was written: of the step's tokens, `rows` move to the places from `start` on.

        Args:
            rows: i64 [batch, path]: indices of this step's tokens.
            start: i64 [batch]: cache position of the first of them.
        """
        g = self._g
        index = g.op("Unsqueeze", rows, g.const([2]))
        for layer, pair in self._new.items():
            picked = []
            for new in pair:
                by_token = g.op("Transpose", new, perm=[0, 2, 1, 3])
                kept = g.op("GatherND", by_token, index, batch_dims=1)
                picked.append(g.op("Transpose", kept, perm=[0, 2, 1, 3]))
            self._scatter(layer, (picked[0], picked[1]), start, ".out")

    def _scatter(self, layer: int, new: KeyValue, start: str, suffix: str) -> None:
        g = self._g
        written = []
        for name, cached, rows in zip(self._names[layer], self._pairs[layer], new, strict=True):
            result = g.op("TensorScatter", cached, rows, start, axis=2, mode="linear")
            written.append(g.output(f"{name}{suffix}", result, FLOAT, self._shape))
        self._pairs[layer] = (written[0], written[1])


def _joined(g: GraphBuilder, parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=2)
