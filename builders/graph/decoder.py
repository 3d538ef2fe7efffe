"""The decoder-only transformer as ONNX nodes: the one implementation of a layer.

Hidden states are [batch * tokens, hidden], so that every linear layer is a Gemm.
"""

from __future__ import annotations

from collections.abc import Callable

from builders.checkpoints.types import DecoderConfig
from builders.graph.builder import GraphBuilder
from builders.graph.frame import Frame
from builders.graph.weights import Weights

__all__ = ["Decoder", "KeyValue", "Past"]

KeyValue = tuple[str, str]  # keys and values, each [batch, kv_heads, positions, head_dim]
Past = Callable[[int, KeyValue], KeyValue]  # (layer, this call's own) -> what attention reads


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

    def unflatten(self, g: GraphBuilder, x: str, tokens: str) -> str:
        """[batch * T, hidden] → [batch, T, hidden], T the width of `tokens` [batch, T]."""
        shape = g.op("Concat", g.op("Shape", tokens), g.const([self.config.hidden_size]), axis=0)
        return g.op("Reshape", x, shape)

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
        return self.weights.lm_head(g, self.final_norm(g, x))

    def final_norm(self, g: GraphBuilder, x: str) -> str:
        """The norm behind the last layer."""
        return self.norm(g, x, "model.norm")

    def layer(
        self, g: GraphBuilder, index: int, x: str, frame: Frame, past: Past, *, attention_input: str = ""
    ) -> tuple[str, KeyValue]:
        """One decoder layer.

        Args:
            x: hidden [batch * tokens, hidden], the residual stream.
            past: gives the keys and values to attend to, in the order of the mask's columns.
            attention_input: [batch * tokens, any width]: what q, k and v are made of, where that is not
                the normed residual stream (EAGLE).

        Returns:
            The layer's output, and the keys and values of this call's tokens.
        """
        root = f"model.layers.{index}"
        with g.scope(f"layers.{index}"):
            with g.scope("self_attn"):
                source = attention_input or self.norm(g, x, f"{root}.input_layernorm")
                attended, new = self._attention(g, index, source, frame, past)
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
