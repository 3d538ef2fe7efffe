"""Drafting inside the step: the context, chains (Leviathan et al. 2023), and one level of a tree.

Every draft step is an `If`: it runs only if some sequence still wants a token. A step's keys and
values stay beside the cache until the step is over (`appended_frame`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx

from builders.checkpoints.types import DecoderConfig
from builders.graph.builder import FLOAT, INT64, Branch, GraphBuilder
from builders.graph.cache import Cache
from builders.graph.decoder import Decoder, KeyValue, Past
from builders.graph.frame import Frame, appended_frame, lower_triangle
from engines.verification import function as verification

__all__ = [
    "DraftModel",
    "DraftRules",
    "Drafting",
    "Drafts",
    "PlainDrafter",
    "any_of",
    "confidence",
    "first_columns",
    "pairs_of",
]


class DraftModel(Protocol):
    """What drafts: a decoder-only model, or a head on the target's hidden states."""

    config: DecoderConfig

    @property
    def layers(self) -> range:
        """The layers that run."""

    def run(
        self, g: GraphBuilder, tokens: str, states: str, frame: Frame, past: Past, *, first: bool
    ) -> tuple[str, list[KeyValue]]:
        """Run tokens i64 [B, T] → states [B, T, hidden], keys and values by layer.

        Args:
            states: what the model recurs on: the target's features [B, T, F] where `first`, else
                the states that its own calls gave for the tokens before.
        """

    def scores(self, g: GraphBuilder, states: str) -> str:
        """States [B, T, hidden] → logits [B * T, draft vocabulary]."""

    def to_target(self, g: GraphBuilder, ids: str) -> str:
        """Ids of the draft vocabulary → the target's."""

    def widen(self, g: GraphBuilder, scores: str) -> str:
        """Logits [B, draft vocabulary] → [B, vocabulary]."""


class PlainDrafter:
    """The first layers, the final norm and lm_head of an ordinary decoder (a `DraftModel`)."""

    def __init__(self, decoder: Decoder, layers: range) -> None:
        self.config = decoder.config
        self.layers = layers
        self._decoder = decoder

    def run(
        self, g: GraphBuilder, tokens: str, states: str, frame: Frame, past: Past, *, first: bool
    ) -> tuple[str, list[KeyValue]]:
        """See `DraftModel.run`; a token's past lies in keys and values alone."""
        x = self._decoder.embed(g, tokens)
        new = []
        for layer in self.layers:
            x, pair = self._decoder.layer(g, layer, x, frame, past)
            new.append(pair)
        return self._decoder.unflatten(g, x, tokens), new

    def scores(self, g: GraphBuilder, states: str) -> str:
        """See `DraftModel.scores`."""
        return self._decoder.head(g, self._decoder.flatten(g, states))

    def to_target(self, g: GraphBuilder, ids: str) -> str:
        """The vocabulary is the target's."""
        return ids

    def widen(self, g: GraphBuilder, scores: str) -> str:
        """The vocabulary is the target's."""
        return scores


@dataclass(frozen=True)
class DraftRules:
    """What a call asks of its drafts.

    Attributes:
        counts: i64 [B]: depth to draft to, per sequence: draft tokens of a chain, levels of a tree.
        threshold: f32 [B]: drafting stops where the drafter's own probability of the path so far falls
            below; 0 never stops.
        temperature, top_k, top_p: [B], uniforms: f32 [B, rows, 3]: for draft tokens that are drawn.
        vocab_size: of the target.
    """

    counts: str
    threshold: str
    temperature: str
    top_k: str
    top_p: str
    uniforms: str
    vocab_size: int


@dataclass(frozen=True)
class Drafts:
    """What drafting leaves for the verification.

    Attributes:
        tokens: i64 [B, N].
        counts: i64 [B]: how many of each sequence's first tokens count.
        logits: f32 [B, N, vocabulary], what they were drawn from; empty: they are point masses.
        parents: i64 [B, N], the tree; empty: a chain.
    """

    tokens: str
    counts: str
    logits: str = ""
    parents: str = ""


class Drafting:
    """One model's drafting in one step.

    Attributes:
        first: [B, 1, hidden]: the state of the last context token.
        filled: i64 [B]: positions of the cache that count.
        states: [B, 1 or 0, hidden] of the chain's draft tokens that were run.
        calls: keys and values by call and layer that the next call attends to beside the cache.

    Args:
        g: the outermost graph.
        batch: i64 [1].
        scope: of the nodes' names.
    """

    def __init__(
        self, g: GraphBuilder, model: DraftModel, cache: Cache, rules: DraftRules, batch: str, scope: str
    ) -> None:
        self.states: list[str] = []
        self.calls: list[list[KeyValue]] = []
        self.g = g
        self.model = model
        self._cache = cache
        self.rules = rules
        self.batch = batch
        self._scope = scope
        self.first = ""
        self.filled = cache.lengths
        self._before = g.const(0)  # i64 scalar: tokens in `calls` that come before the drafts

    # -- the context ------------------------------------------------------------------------------

    def read_shared(self, tokens: str, count: str) -> str:
        """Run context `tokens` [B, C] (C = `count`) of a model that shares the target's cache.

        Returns:
            Their states [B, C, hidden].
        """
        g = self.g
        with g.scope(self._scope):
            states, new = self._context(g, tokens, "", count)
            self.first = g.op("Gather", states, g.const([-1]), axis=1)
        self.calls = [new]
        self._before = count
        return states

    def read_pending(self, tokens: str, counts: str, features: str) -> None:
        """Run what the model's own cache has not seen, unless that is nothing, and write the cache.

        Args:
            tokens: i64 [B, D], left-aligned.
            counts: i64 [B]: how many of them are real.
            features: f32 [B, D, F] of the target, where the model reads them.
        """
        g, model = self.g, self.model
        then, otherwise = Branch(g.subgraph()), Branch(g.subgraph())
        b = then.builder
        width = g.op("Squeeze", g.op("Shape", tokens, start=1, end=2), g.const([0]))
        with g.scope(self._scope):
            states, new = self._context(b, tokens, features, width)
            last = b.op("Max", b.op("Sub", counts, b.const(1)), b.const(0))
            row = b.op("GatherND", states, b.op("Unsqueeze", last, b.const([1])), batch_dims=1)
            then.give(b.op("Unsqueeze", row, b.const([1])), FLOAT)
        otherwise.give(self.empty(otherwise.builder, 0, model.config.hidden_size), FLOAT)
        self.give_keys(then, otherwise, new)
        any_tokens = g.op("Greater", width, g.const(0))
        self.first, *flat = g.branch(any_tokens, then, otherwise, f"{self._scope}/context")
        for layer, pair in zip(model.layers, pairs_of(flat), strict=True):
            self._cache.write(layer, [pair])
        self.filled = g.op("Add", self._cache.lengths, counts)

    def _context(self, b: GraphBuilder, tokens: str, features: str, count: str) -> tuple[str, list[KeyValue]]:
        cache = self._cache
        column = b.op("Unsqueeze", cache.lengths, b.const([1]))
        positions = b.op("Add", column, b.op("Range", b.const(0), count, b.const(1)))
        frame = appended_frame(
            b,
            self.model.config,
            filled=cache.lengths,
            positions=positions,
            span=cache.span,
            sees=lower_triangle(b, count),
            new_positions=positions,
        )
        return self.model.run(b, tokens, features, frame, cache.appended(b, []), first=True)

    # -- chains -----------------------------------------------------------------------------------

    def chain(self, gamma: int) -> Drafts:
        """Draft up to `gamma` tokens: run the one before, apply the head, draw."""
        g, rules = self.g, self.rules
        tokens: list[str] = []
        logits: list[str] = []
        wanted = g.op("Greater", rules.counts, g.const(0))  # bool [B]: drafts a token here
        path, kept = "", g.const(0)
        for i in range(gamma):
            with g.scope(f"draft.{i + 1}"):
                token, scores, path = self._draft_one(
                    any_of(g, wanted), i, tokens[-1] if tokens else "", path
                )
                sure = g.op("GreaterOrEqual", path, rules.threshold)
                keeps = g.op("And", sure, g.op("Greater", rules.counts, g.const(i)))
                kept = g.op("Add", kept, g.op("Cast", keeps, to=INT64))
                wanted = g.op("And", keeps, g.op("Greater", rules.counts, g.const(i + 1)))
            tokens.append(token)
            logits.append(scores)
        width = g.op("ReduceMax", kept, keepdims=1)
        return Drafts(
            tokens=first_columns(g, g.op("Concat", *tokens, axis=1), width),
            counts=kept,
            logits=first_columns(g, g.op("Concat", *logits, axis=1), width),
        )

    def _draft_one(self, wanted: str, i: int, previous: str, path: str) -> tuple[str, str, str]:
        """Draft token i [B, 1], its logits [B, 1, V] and the probability of the path so far [B]."""
        g, rules, model = self.g, self.rules, self.model
        then, otherwise = Branch(g.subgraph()), Branch(g.subgraph())
        b, e = then.builder, otherwise.builder
        state = self.first
        new: list[KeyValue] = []
        if previous:
            before = self.states[-1] if self.states else self.first
            state, new = self._run_draft(b, previous, before, b.const(i - 1))
        scores = model.scores(b, state)
        row = b.op("Gather", rules.uniforms, b.const(i), axis=1)
        u = b.op("Gather", row, b.const(verification.DRAFT), axis=1)
        drawn = verification.draw_token(b, scores, rules.temperature, rules.top_k, rules.top_p, u)
        then.give(b.op("Unsqueeze", model.to_target(b, drawn), b.const([1])), INT64)
        then.give(b.op("Unsqueeze", model.widen(b, scores), b.const([1])), FLOAT)
        sure = confidence(b, scores)
        then.give(b.op("Mul", path, sure) if path else sure, FLOAT)
        then.give(state, FLOAT)
        otherwise.give(self.empty(e, 0, elem_type=INT64), INT64)
        otherwise.give(self.empty(e, 0, rules.vocab_size), FLOAT)
        otherwise.give(self._filled_with(e, -1.0), FLOAT)
        otherwise.give(self.empty(e, 0, model.config.hidden_size), FLOAT)
        self.give_keys(then, otherwise, new)
        token, scores, path, state, *flat = g.branch(wanted, then, otherwise, "If")
        if previous:
            self.states.append(state)
            self.calls.append(pairs_of(flat))
        return token, scores, path

    def run_last_draft(self, drafts: Drafts) -> None:
        """Run the chain's last token, too, so that its state and keys exist."""
        g = self.g
        then, otherwise = Branch(g.subgraph()), Branch(g.subgraph())
        b = then.builder
        steps = g.op("Squeeze", g.op("Shape", drafts.tokens, start=1, end=2), g.const([0]))
        ran = g.const(0)
        if self.states:
            states = g.op("Concat", *self.states, axis=1)
            ran = g.op("Squeeze", g.op("Shape", states, start=1, end=2), g.const([0]))
        with g.scope("draft.last"):
            last = b.op("Gather", drafts.tokens, b.const([-1]), axis=1)
            state, new = self._run_draft(b, last, "", b.op("Sub", steps, b.const(1)))
            then.give(state, FLOAT)
            otherwise.give(self.empty(otherwise.builder, 0, self.model.config.hidden_size), FLOAT)
            self.give_keys(then, otherwise, new)
            state, *flat = g.branch(g.op("Greater", steps, ran), then, otherwise, "If")
        self.states.append(state)
        self.calls.append(pairs_of(flat))

    def _run_draft(self, b: GraphBuilder, token: str, state: str, index: str) -> tuple[str, list[KeyValue]]:
        """Run draft token `index` ([B, 1], i64 scalar) behind the chain's earlier tokens."""
        place = b.op("Add", self._before, index)
        news = b.op("Range", b.const(0), b.op("Add", place, b.const(1)), b.const(1))
        column = b.op("Unsqueeze", self.filled, b.const([1]))
        frame = appended_frame(
            b,
            self.model.config,
            filled=self.filled,
            positions=b.op("Add", column, place),
            span=self._cache.span,
            sees=b.const(True, np.bool_),
            new_positions=b.op("Add", column, news),
        )
        past = self._cache.appended(b, self.calls)
        return self.model.run(b, token, state, frame, past, first=False)

    def run_level(
        self, b: GraphBuilder, tokens: str, states: str, depth: int, sees: str, depths: list[int]
    ) -> tuple[str, list[KeyValue]]:
        """Run one level of a tree.

        Args:
            tokens: i64 [B, n]; states: [B, n, hidden] of their parents.
            depth: of these tokens, 0 for the root's children; depths: of all new keys, these included.
            sees: bool [1 or B, n, new keys].
        """
        column = b.op("Unsqueeze", self.filled, b.const([1]))
        here = b.op("Mul", tokens, b.const(0))  # zeros [B, n]
        frame = appended_frame(
            b,
            self.model.config,
            filled=self.filled,
            positions=b.op("Add", b.op("Add", here, column), b.const(depth)),
            span=self._cache.span,
            sees=sees,
            new_positions=b.op("Add", column, b.const(depths)),
        )
        past = self._cache.appended(b, self.calls)
        return self.model.run(b, tokens, states, frame, past, first=False)

    # -- shared pieces ----------------------------------------------------------------------------

    def give_keys(self, then: Branch, otherwise: Branch, new: list[KeyValue]) -> None:
        """Hand out a call's keys and values; the other branch hands out none, of the same type."""
        config = self.model.config
        nothing = self.empty(otherwise.builder, config.num_kv_heads, 0, config.head_dim)
        for pair in new:
            for value in pair:
                then.give(value, FLOAT)
                otherwise.give(nothing, FLOAT)

    def empty(self, g: GraphBuilder, *dims: int, elem_type: int = FLOAT) -> str:
        """A tensor [B, *dims] of which one dimension is 0."""
        zero = onnx.helper.make_tensor("zero", elem_type, [1], [0])
        return g.op("ConstantOfShape", g.op("Concat", self.batch, g.const(dims), axis=0), value=zero)

    def _filled_with(self, g: GraphBuilder, value: float) -> str:
        """A tensor [B]."""
        tensor = onnx.helper.make_tensor("value", FLOAT, [1], [value])
        return g.op("ConstantOfShape", self.batch, value=tensor)


def first_columns(g: GraphBuilder, x: str, count: str) -> str:
    """The first `count` (i64 [1]) entries along axis 1."""
    return g.op("Slice", x, g.const([0]), count, g.const([1]))


def confidence(g: GraphBuilder, scores: str) -> str:
    """The probability of the most likely token of logits [B, V]: f32 [B].

    It depends on what came before alone, not on the token that is drawn; so a draft may end by it
    and the verification stays exact.
    """
    highest = g.op("ReduceMax", scores, g.const([1]), keepdims=1)
    total = g.op("ReduceSum", g.op("Exp", g.op("Sub", scores, highest)), g.const([1]), keepdims=0)
    return g.op("Reciprocal", total)


def any_of(g: GraphBuilder, flags: str) -> str:
    """bool [B] → bool scalar."""
    return g.op("Greater", g.op("ReduceMax", g.op("Cast", flags, to=INT64), keepdims=0), g.const(0))


def pairs_of(flat: list[str]) -> list[KeyValue]:
    """Keys and values by layer, from a flat list of both."""
    return list(zip(flat[::2], flat[1::2], strict=True))
