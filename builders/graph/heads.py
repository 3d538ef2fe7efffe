"""Published drafter heads as ONNX nodes: Medusa's residual blocks, EAGLE's one decoder layer.

Both read the target's hidden states of the step before (`features`): the state behind the final norm,
or, for EAGLE-3, the residual stream at three depths (`taps`).

Sources: Cai et al. 2024 (Medusa, section 2.1.1); Li et al. 2024 (EAGLE, section 4.1) and 2025 (EAGLE-3,
section 3.1); the forward passes that were published with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from builders.checkpoints.heads.types import EagleHead, MedusaHeads
from builders.graph.builder import INT64, Branch, GraphBuilder
from builders.graph.decoder import Decoder, KeyValue, Past
from builders.graph.drafting import DraftRules, Drafts, confidence
from builders.graph.frame import Frame
from builders.graph.trees import tree_drafts
from builders.graph.weights import Weights
from engines.trees import Tree

IMPOSSIBLE = -1.0e9  # the logit of a token that the draft vocabulary lacks; finite, so that sums stay so

__all__ = ["EagleDrafter", "feature_width", "medusa_drafts"]


def feature_width(head: EagleHead | MedusaHeads) -> int:
    """Floats that the head reads of the target per token."""
    if isinstance(head, MedusaHeads):
        return head.hidden_size
    return head.target_hidden_size * max(1, len(head.taps))


class EagleDrafter:
    """An EAGLE head (a `DraftModel`): embedding and feature, fused, through one decoder layer.

    Token x[j+1] meets the feature of position j; the layer's output stands for the next feature.
    """

    def __init__(
        self,
        g: GraphBuilder,
        head: EagleHead,
        target: Decoder,
        locations: Mapping[Path, str],
        vocab_size: int,
    ) -> None:
        draft_vocabulary = vocab_size if head.draft_to_target is None else len(head.draft_to_target)
        self.config = head.config
        self.layers = range(1)
        self._head = head
        self._target = target
        self._vocab_size = vocab_size
        self._weights = Weights(g, head.tensors, locations, draft_vocabulary, "drafter")
        self._embedding = target.weights
        if head.own_embedding:
            self._embedding = Weights(g, head.tensors, locations, vocab_size, "drafter.embedding")
        self._layer = Decoder(head.config, self._weights)

    def run(
        self, g: GraphBuilder, tokens: str, states: str, frame: Frame, past: Past, *, first: bool
    ) -> tuple[str, list[KeyValue]]:
        """See `DraftModel.run`."""
        head, layer = self._head, self._layer
        rows = g.op("Gather", self._embedding.embedding(), tokens, name="embed_tokens")
        embedded = layer.flatten(g, rows)
        width = feature_width(head) if first else head.config.hidden_size
        feature = g.op("Reshape", states, g.const([-1, width]), name="rows")
        if head.method == "eagle":
            both = g.op("Concat", embedded, feature, axis=1)
            x = source = self._weights.linear(g, both, ("fc",))
        else:
            fused = self._fuse(g, feature) if first else feature
            normed = layer.norm(g, fused, "model.layers.0.hidden_norm")
            embedded = layer.norm(g, embedded, "model.layers.0.input_layernorm")
            source = g.op("Concat", embedded, normed, axis=1)
            x = normed if head.norm_before_residual else fused
        y, new = layer.layer(g, 0, x, frame, past, attention_input=source)
        if head.head_norm == "recurrent":
            y = layer.final_norm(g, y)
        return layer.unflatten(g, y, tokens), [new]

    def _fuse(self, g: GraphBuilder, taps: str) -> str:
        """Taps [rows, taps * hidden] → [rows, hidden]."""
        head = self._head
        if head.fc_norm == "joint":
            taps = self._layer.norm(g, taps, "input_norm")
        elif head.fc_norm == "each":
            count = len(head.taps)
            parts = g.multi("Split", taps, outputs=count, axis=1, num_outputs=count)
            normed = [self._layer.norm(g, part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            taps = g.op("Concat", *normed, axis=1)
        return self._weights.linear(g, taps, ("fc",))

    def scores(self, g: GraphBuilder, states: str) -> str:
        """See `DraftModel.scores`."""
        head = self._head
        x = self._layer.flatten(g, states)
        if head.head_norm == "logits":
            x = self._layer.final_norm(g, x)
        if head.own_lm_head:
            return self._weights.lm_head(g, x)
        if head.draft_to_target is None:
            return self._target.weights.lm_head(g, x)
        return self._target.weights.lm_head_rows(g, x, g.const(head.draft_to_target))

    def to_target(self, g: GraphBuilder, ids: str) -> str:
        """See `DraftModel.to_target`."""
        table = self._head.draft_to_target
        return ids if table is None else g.op("Gather", g.const(table), ids)

    def widen(self, g: GraphBuilder, scores: str) -> str:
        """See `DraftModel.widen`; tokens outside the draft vocabulary have probability zero."""
        table = self._head.draft_to_target
        if table is None:
            return scores
        place = np.full(self._vocab_size, len(table), np.int64)
        place[table] = np.arange(len(table))
        batch = g.op("Shape", scores, start=0, end=1)
        none = g.op(
            "Expand", g.const([[IMPOSSIBLE]], np.float32), g.op("Concat", batch, g.const([1]), axis=0)
        )
        return g.op("Gather", g.op("Concat", scores, none, axis=1), g.const(place), axis=1)


def medusa_drafts(
    g: GraphBuilder,
    heads: MedusaHeads,
    target: Decoder,
    locations: Mapping[Path, str],
    features: str,
    tree: Tree,
    rules: DraftRules,
    batch: str,
) -> Drafts:
    """All heads look at the last accepted position [B, 1, hidden]; the tree spreads their best tokens.

    Nothing is drawn: draft tokens are the heads' most likely ones, also where the request samples.
    """
    weights = Weights(g, heads.tensors, locations, rules.vocab_size, "drafter")
    then, otherwise = Branch(g.subgraph()), Branch(g.subgraph())
    b, e = then.builder, otherwise.builder
    with g.scope("medusa"):
        x = b.op("Reshape", features, b.const([-1, heads.hidden_size]))
        states = [_residual_blocks(b, weights, heads, h, x) for h in range(tree.depth)]
        tokens, path, sure = [], "", b.const(0)
        for d, scores in enumerate(_logits(b, weights, heads, target, states)):
            level = [n for n in range(1, tree.size + 1) if tree.depths[n] == d + 1]
            best = b.multi("TopK", scores, b.const([tree.level_widths[d]]), outputs=2, axis=1)[1]
            tokens.append(b.op("Gather", best, b.const([tree.ranks[n - 1] for n in level]), axis=1))
            path = b.op("Mul", path, confidence(b, scores)) if path else confidence(b, scores)
            sure = b.op("Add", sure, b.op("Cast", b.op("GreaterOrEqual", path, rules.threshold), to=INT64))
        then.give(b.op("Concat", *tokens, axis=1), INT64)
        then.give(sure, INT64)
        nothing = e.op("Concat", batch, e.const([0]), axis=0)
        otherwise.give(e.op("Expand", e.const([[0]]), nothing), INT64)
        otherwise.give(e.op("Identity", rules.counts), INT64)
        most = g.op("ReduceMax", rules.counts, keepdims=0)
        drafted, sure = g.branch(g.op("Greater", most, g.const(0)), then, otherwise, "If")
        return tree_drafts(g, tree, drafted, g.op("Min", rules.counts, sure), batch)


def _residual_blocks(g: GraphBuilder, weights: Weights, heads: MedusaHeads, head: int, x: str) -> str:
    """x + SiLU(linear(x)), once a layer."""
    for layer in range(heads.num_layers):
        y = weights.linear(g, x, (f"heads.{head}.{layer}.linear",))
        x = g.op("Add", x, g.op("Mul", y, g.op("Sigmoid", y)))
    return x


def _logits(
    g: GraphBuilder, weights: Weights, heads: MedusaHeads, target: Decoder, states: list[str]
) -> list[str]:
    """Each head's logits [B, vocabulary]; heads that share the target's lm_head share one product."""
    if heads.own_lm_head:
        return [weights.logits(g, x, f"heads.{h}.lm_head.weight") for h, x in enumerate(states)]
    together = target.weights.lm_head(g, g.op("Concat", *states, axis=0))
    if len(states) == 1:
        return [together]
    return g.multi("Split", together, outputs=len(states), axis=0, num_outputs=len(states))
