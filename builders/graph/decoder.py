"""The decoder-only transformer as ONNX nodes: the one implementation of a layer.

A call of the layers sees its past in one of two ways:

* *in place*: new keys and values are scattered into the cache behind each sequence's length, and
  attention reads the cache itself. No byte of the cache is copied. The target verifies this way.
* *appended*: attention reads the cache followed by the keys and values of this step's calls. The
  drafter's unrolled steps work this way, since a cache can be written only once a step.

Either way nothing is rolled back: rows above a sequence's length are garbage that the next step
overwrites, and a tree of draft tokens differs from a chain by its mask only.

Hidden states are [batch * tokens, hidden], so that every linear layer is a Gemm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from builders.checkpoints.types import DecoderConfig
from builders.graph.builder import FLOAT, GraphBuilder
from builders.graph.rope import inverse_frequencies
from builders.graph.weights import Weights

__all__ = ["Decoder", "Frame", "KeyValue", "Past", "appended_frame", "in_place_frame"]

MASKED = -1.0e9  # far below any attention score, yet finite: a padded row stays free of NaN

KeyValue = tuple[str, str]  # keys and values, each [batch, kv_heads, positions, head_dim]
Past = Callable[[int, KeyValue], KeyValue]  # (layer, this call's own) -> what attention reads


@dataclass(frozen=True)
class Frame:
    """Where a call's tokens stand.

    Attributes:
        cosine, sine: of the rotary angles, float [batch, tokens, head_dim / 2].
        masks: additive attention mask float [batch, 1, tokens, positions], by: has a sliding window?
        split: i64 [4], the shape [batch, tokens, -1, head_dim].
    """

    cosine: str
    sine: str
    masks: dict[bool, str]
    split: str


class Decoder:
    """Emits one checkpoint's layers into whichever graph (or branch) it is given."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights

    def embed(self, g: GraphBuilder, tokens: str) -> str:
        """Token ids [batch, tokens] → hidden [batch * tokens, hidden]."""
        rows = g.op("Gather", self.weights.embedding(), tokens, name="embed_tokens")
        return self.flatten(g, rows)

    def flatten(self, g: GraphBuilder, x: str) -> str:
        """[batch, tokens, hidden] → [batch * tokens, hidden]."""
        return g.op("Reshape", x, g.const([-1, self.config.hidden_size]), name="rows")

    def norm(self, g: GraphBuilder, x: str, name: str) -> str:
        """RMSNorm over the last axis."""
        return g.op(
            "RMSNormalization",
            x,
            self.weights.vector(f"{name}.weight"),
            axis=-1,
            epsilon=self.config.rms_norm_eps,
            name=name.rsplit(".", 1)[-1],
        )

    def head(self, g: GraphBuilder, x: str) -> str:
        """Hidden [rows, hidden] → logits [rows, vocabulary]."""
        return self.weights.lm_head(g, self.norm(g, x, "model.norm"))

    def layer(self, g: GraphBuilder, index: int, x: str, frame: Frame, past: Past) -> tuple[str, KeyValue]:
        """One decoder layer.

        Args:
            x: hidden [batch * tokens, hidden].
            past: gives the keys and values to attend to, in the order of the mask's columns.

        Returns:
            The layer's output, and the keys and values of this call's tokens.
        """
        root = f"model.layers.{index}"
        with g.scope(f"layers.{index}"):
            with g.scope("self_attn"):
                attended, new = self._attention(
                    g, index, self.norm(g, x, f"{root}.input_layernorm"), frame, past
                )
                x = self.weights.linear(g, attended, (f"{root}.self_attn.o_proj",), residual=x)
            with g.scope("mlp"):
                y = self.norm(g, x, f"{root}.post_attention_layernorm")
                y = self.weights.linear(g, y, (f"{root}.mlp.gate_proj", f"{root}.mlp.up_proj"))
                gate, up = g.multi("Split", y, outputs=2, axis=1, num_outputs=2)
                y = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
                x = self.weights.linear(g, y, (f"{root}.mlp.down_proj",), residual=x)
        return x, new

    def _attention(
        self, g: GraphBuilder, index: int, x: str, frame: Frame, past: Past
    ) -> tuple[str, KeyValue]:
        c = self.config
        root = f"model.layers.{index}.self_attn"
        packed = self.weights.linear(g, x, (f"{root}.q_proj", f"{root}.k_proj", f"{root}.v_proj"))
        heads = g.op("Transpose", g.op("Reshape", packed, frame.split), perm=[0, 2, 1, 3])
        if c.qk_norm:
            sizes = g.const([c.num_heads, c.num_kv_heads, c.num_kv_heads])
            q, k, v = g.multi("Split", heads, sizes, outputs=3, axis=1)
            q, k = self.norm(g, q, f"{root}.q_norm"), self.norm(g, k, f"{root}.k_norm")
            qk = g.op("Concat", q, k, axis=1)
        else:
            sizes = g.const([c.num_heads + c.num_kv_heads, c.num_kv_heads])
            qk, v = g.multi("Split", heads, sizes, outputs=2, axis=1)
        # One rotation for queries and keys: they share positions and tables.
        qk = g.op("RotaryEmbedding", qk, frame.cosine, frame.sine)
        q, k = g.multi("Split", qk, g.const([c.num_heads, c.num_kv_heads]), outputs=2, axis=1)
        keys, values = past(index, (k, v))
        mask = frame.masks[index in c.sliding_layers]
        attended = g.op("Attention", q, keys, values, mask, scale=float(c.head_dim**-0.5))
        rows = g.op("Transpose", attended, perm=[0, 2, 1, 3])
        return g.op("Reshape", rows, g.const([-1, c.num_heads * c.head_dim])), (k, v)


def in_place_frame(g: GraphBuilder, config: DecoderConfig, *, lengths: str, count: str, span: str) -> Frame:
    """The frame of a chain of `count` tokens a sequence, written into the cache before it is read.

    Args:
        lengths: i64 [batch]: positions in the cache before this step.
        count: i64 scalar.
        span: i64 scalar: positions that the cache holds at most; the mask has as many columns.
    """
    with g.scope("frame"):
        column = g.op("Unsqueeze", lengths, g.const([1]))
        positions = g.op("Add", column, g.op("Range", g.const(0), count, g.const(1)))
        queries = g.op("Unsqueeze", positions, g.const([2]))
        cached = g.op("Range", g.const(0), span, g.const(1))
        seen = g.op("LessOrEqual", cached, queries)
        return _frame(g, config, positions, seen, g.op("Sub", queries, cached))


def appended_frame(
    g: GraphBuilder, config: DecoderConfig, *, lengths: str, start: str, stop: str, span: str
) -> Frame:
    """The frame of the step's new tokens `start` … `stop` - 1, which follow the cache in the mask.

    Args:
        start, stop: i64 scalars, counted from the first token that is not in the cache.
    """
    with g.scope("frame"):
        column = g.op("Unsqueeze", lengths, g.const([1]))
        news = g.op("Range", start, stop, g.const(1))
        positions = g.op("Add", column, news)
        queries = g.op("Unsqueeze", positions, g.const([2]))
        cached = g.op("Range", g.const(0), span, g.const(1))
        keys = g.op(
            "Unsqueeze", g.op("Add", column, g.op("Range", g.const(0), stop, g.const(1))), g.const([1])
        )
        shape = g.op("Shape", positions)
        wide = g.op("Concat", shape, g.op("Unsqueeze", span, g.const([0])), axis=0)
        filled = g.op("Expand", g.op("Less", cached, g.op("Unsqueeze", lengths, g.const([1, 2]))), wide)
        seen = g.op("Concat", filled, g.op("LessOrEqual", keys, queries), axis=2)
        ages = g.op("Concat", g.op("Sub", queries, cached), g.op("Sub", queries, keys), axis=2)
        return _frame(g, config, positions, seen, ages)


def _frame(g: GraphBuilder, config: DecoderConfig, positions: str, seen: str, ages: str) -> Frame:
    """Masks from what a token may see and, for sliding windows, from how far back it lies."""
    masks = {}
    if len(config.sliding_layers) < config.num_layers:
        masks[False] = _additive(g, seen)
    if config.sliding_layers:
        near = g.op("Less", ages, g.const(config.sliding_window or 0))
        masks[True] = _additive(g, g.op("And", seen, near))
    speeds, factor = inverse_frequencies(config.rope, config.head_dim)
    turns = g.op("Cast", g.op("Unsqueeze", positions, g.const([2])), to=FLOAT)
    angles = g.op("Mul", turns, g.const(speeds, np.float32))
    cosine, sine = g.op("Cos", angles), g.op("Sin", angles)
    if factor != 1.0:
        cosine, sine = (g.op("Mul", t, g.const(factor, np.float32)) for t in (cosine, sine))
    split = g.op("Concat", g.op("Shape", positions), g.const([-1, config.head_dim]), axis=0)
    return Frame(cosine, sine, masks, split)


def _additive(g: GraphBuilder, seen: str) -> str:
    mask = g.op("Where", seen, g.const(0.0, np.float32), g.const(MASKED, np.float32))
    return g.op("Unsqueeze", mask, g.const([1]))
