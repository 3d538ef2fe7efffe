"""The fused step: draft, verify, accept and write the caches, in one graph.

One call takes, for every sequence of the batch, the committed tokens that the target has not seen
(`tokens`: the whole prompt at prefill, one token afterwards), drafts up to γ tokens, runs the target
over all of them, writing the caches in place, and verifies. The host keeps `lengths` and adds what
was accepted; rows of the cache above a sequence's length are garbage that the next step overwrites.

Inputs (B sequences, C tokens, G draft tokens, R = G + 1):
    tokens i64 [B, C], token_counts i64 [B], lengths i64 [B]
    draft_counts i64 [B]     draft tokens to verify, per sequence; G > 0 needs token_counts == C
    draft_tokens i64 [B, G]  only where the host proposes (none, ngram)
    draft_steps i64 []       G, where the graph drafts (draft_model, layer_skip)
    draft.tokens i64 [B, D], draft.lengths i64 [B]
                             draft_model: what its own cache has not seen (D = 0: leave it alone)
    temperature f32 [B], top_k i64 [B], top_p f32 [B], uniforms f32 [B, R, 3]
    target.k.N, target.v.N, drafter.k.N, drafter.v.N  [B, kv_heads, S, head_dim]: the caches; the
                             host chooses S, at least the longest length plus this step's tokens
Outputs:
    accepted i64 [B], emitted i64 [B, R], finite bool [B], drafted i64 [B, G],
    logits f32 [B, R, vocabulary], and every cache under its name with `.out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from builders.checkpoints.types import Checkpoint, DecoderConfig
from builders.graph.builder import BOOL, FLOAT, INT64, Branch, GraphBuilder
from builders.graph.cache import Cache
from builders.graph.decoder import Decoder, KeyValue, appended_frame, in_place_frame
from builders.graph.weights import MICROSOFT_DOMAIN, Weights
from engines.bundle import CacheShape
from engines.verification import function as verification

__all__ = ["StepGraph", "emit_step"]


@dataclass(frozen=True)
class StepGraph:
    """What was emitted."""

    file: Path
    nodes: int
    cache_capacity: int
    target_cache: CacheShape
    draft_cache: CacheShape | None


def emit_step(
    target: Checkpoint,
    drafter: Checkpoint | None,
    *,
    method: str,
    gamma: int,
    exit_layer: int | None,
    max_seq_len: int,
    vocab_size: int,
    locations: Mapping[Path, str],
    out: Path,
) -> StepGraph:
    """Write `out`/step.onnx for one drafting method.

    Args:
        gamma: draft tokens a step at most (0 for `none`); the graph serves any smaller number.
        exit_layer: `layer_skip`: how many of the target's first layers draft.
        max_seq_len: prompt and output together, in tokens.
        vocab_size: the tokenizer's real vocabulary; wider logits are cut to it.
        locations: bundle-relative path of every weight file of both checkpoints.

    The method and its settings were validated with the deployment spec.
    """
    capacity = max_seq_len + gamma  # the last step's rejected rows need a place, too
    g = GraphBuilder()
    step = _Step(g, target, gamma, vocab_size, locations)
    if method == "draft_model":
        assert drafter is not None
        step.draft_with_model(drafter, locations)
    elif method == "layer_skip":
        assert exit_layer is not None
        step.draft_with_first_layers(exit_layer)
    else:
        step.take_drafts()
    step.verify()
    domains = {verification.DOMAIN: verification.VERSION, MICROSOFT_DOMAIN: 1}
    model = g.model("step", verification.functions(), domains, {"method": method, "gamma": str(gamma)})
    path = out / "step.onnx"
    onnx.save_model(model, str(path))
    return StepGraph(
        file=path,
        nodes=len(model.graph.node),
        cache_capacity=capacity,
        target_cache=_cache_shape(target.config),
        draft_cache=_cache_shape(drafter.config) if drafter is not None else None,
    )


def _cache_shape(config: DecoderConfig) -> CacheShape:
    return CacheShape(layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim)


class _Step:
    """The parts of a step, in the order in which they run."""

    def __init__(
        self,
        g: GraphBuilder,
        target: Checkpoint,
        gamma: int,
        vocab_size: int,
        locations: Mapping[Path, str],
    ) -> None:
        self.g = g
        self.gamma = gamma
        self.vocab_size = vocab_size
        self.target = Decoder(target.config, Weights(g, target, locations, vocab_size, "target"))
        self.tokens = g.input("tokens", INT64, ["B", "C"])
        self.token_counts = g.input("token_counts", INT64, ["B"])
        self.cache = Cache(g, "target", target.config, "lengths")
        self.draft_counts = g.input("draft_counts", INT64, ["B"])
        self.temperature = g.input("temperature", FLOAT, ["B"])
        self.top_k = g.input("top_k", INT64, ["B"])
        self.top_p = g.input("top_p", FLOAT, ["B"])
        self.uniforms = g.input("uniforms", FLOAT, ["B", "R", 3])
        self.batch = g.op("Shape", self.tokens, start=0, end=1)
        self.context = g.op("Squeeze", g.op("Shape", self.tokens, start=1, end=2), g.const([0]))  # C
        # What drafting leaves for the verification:
        self.drafts = ""  # i64 [B, G]
        self.draft_logits = ""  # f32 [B, G, vocabulary]; empty: the drafts are point masses
        self.hidden = ""  # [B, C + G, hidden]: context and drafts, after `start_layer` layers
        self.start_layer = 0

    # -- drafting -------------------------------------------------------------------------------

    def take_drafts(self) -> None:
        """`none`, `ngram`: the host proposes; the graph runs the target over what it is given."""
        self.drafts = self.g.input("draft_tokens", INT64, ["B", "G"])
        self._embed_for_target()

    def draft_with_model(self, drafter: Checkpoint, locations: Mapping[Path, str]) -> None:
        """`draft_model`: a second checkpoint with a cache of its own (Leviathan et al. 2023)."""
        g, config = self.g, drafter.config
        steps = g.input("draft_steps", INT64, [])
        tokens = g.input("draft.tokens", INT64, ["B", "D"])
        cache = Cache(g, "drafter", config, "draft.lengths")
        count = g.op("Squeeze", g.op("Shape", tokens, start=1, end=2), g.const([0]))
        weights = Weights(g, drafter, locations, self.vocab_size, "drafter")
        run = Drafting(self, Decoder(config, weights), range(config.num_layers), cache, count, "drafter")
        run.read_context_if_any(tokens)
        run.draft(steps)
        for layer in range(config.num_layers):
            cache.write(layer, [call[layer] for call in run.calls])
        self.drafts, self.draft_logits = run.tokens, run.logits
        self._embed_for_target()

    def draft_with_first_layers(self, exit_layer: int) -> None:
        """`layer_skip`: the first layers, the final norm and lm_head draft (Elhoushi et al. 2024).

        The verification goes on from the drafter's hidden states and keys: nothing is computed twice.
        """
        g = self.g
        steps = g.input("draft_steps", INT64, [])
        run = Drafting(self, self.target, range(exit_layer), self.cache, self.context, "target")
        context = run.read_context(self.tokens, self.token_counts)
        run.draft(steps)
        run.run_last_draft(steps)
        for layer in range(exit_layer):
            self.cache.write(layer, [call[layer] for call in run.calls])
        self.drafts, self.draft_logits = run.tokens, run.logits
        self.hidden = g.op("Concat", context, *run.states, axis=1)
        self.start_layer = exit_layer

    def _embed_for_target(self) -> None:
        tokens = self.g.op("Concat", self.tokens, self.drafts, axis=1)
        with self.g.scope("target"):
            self.hidden = self.unflatten(self.g, self.target, self.target.embed(self.g, tokens), tokens)

    # -- verification ---------------------------------------------------------------------------

    def verify(self) -> None:
        """Run the target over context and drafts, writing its cache, and verify."""
        g, target = self.g, self.target
        drafted = g.op("Squeeze", g.op("Shape", self.drafts, start=1, end=2), g.const([0]))
        total = g.op("Add", self.context, drafted)
        with g.scope("target"):
            frame = in_place_frame(
                g, target.config, lengths=self.cache.lengths, count=total, span=self.cache.span
            )
            x = target.flatten(g, self.hidden)
            for layer in range(self.start_layer, target.config.num_layers):
                x, _ = target.layer(g, layer, x, frame, self.cache.in_place)
            logits = target.head(g, g.op("Gather", x, self._verified_rows(total), name="verified_rows"))
        size = g.op("Concat", self.batch, g.const([-1, self.vocab_size]), axis=0)
        logits = g.op("Reshape", logits, size)
        g.output("logits", logits, FLOAT, ["B", "R", self.vocab_size])
        accepted, emitted, finite = verification.verify_chain(
            g,
            "logits",
            self.drafts,
            self.draft_counts,
            self.draft_logits,
            self.temperature,
            self.top_k,
            self.top_p,
            self.uniforms,
        )
        g.output("accepted", accepted, INT64, ["B"])
        g.output("emitted", emitted, INT64, ["B", "R"])
        g.output("finite", finite, BOOL, ["B"])
        if self.draft_logits:
            g.output("drafted", g.op("Identity", self.drafts), INT64, ["B", "G"])

    def _verified_rows(self, total: str) -> str:
        """Flat indices i64 [B * R]: each sequence's last context token, then its draft tokens."""
        g = self.g
        first = g.op("Unsqueeze", g.op("Sub", self.token_counts, g.const(1)), g.const([1]))
        drafts = g.op("Range", self.context, total, g.const(1))
        wide = g.op("Concat", self.batch, g.op("Shape", drafts), axis=0)
        columns = g.op("Concat", first, g.op("Expand", drafts, wide), axis=1)
        sequence = g.op("Range", g.const(0), g.op("Squeeze", self.batch, g.const([0])), g.const(1))
        offset = g.op("Mul", g.op("Unsqueeze", sequence, g.const([1])), total)
        return g.op("Reshape", g.op("Add", columns, offset), g.const([-1]))

    # -- shared pieces --------------------------------------------------------------------------

    def unflatten(self, g: GraphBuilder, model: Decoder, x: str, tokens: str) -> str:
        """[B * T, hidden] → [B, T, hidden], T the width of `tokens`."""
        shape = g.op("Concat", g.op("Shape", tokens), g.const([model.config.hidden_size]), axis=0)
        return g.op("Reshape", x, shape)

    def empty(self, g: GraphBuilder, *dims: int, elem_type: int = FLOAT) -> str:
        """A tensor [B, *dims] of which one dimension is 0."""
        zero = onnx.helper.make_tensor("zero", elem_type, [1], [0])
        return g.op("ConstantOfShape", g.op("Concat", self.batch, g.const(dims), axis=0), value=zero)


class Drafting:
    """γ drafting steps, unrolled; each runs only if the call asks for that many.

    Attributes:
        tokens: i64 [B, G]; logits: f32 [B, G, vocabulary].
        states: hidden states [B, 1 or 0, hidden] of the draft tokens that were run.
        calls: keys and values by call and layer: the context's first, then one draft token's each.

    Args:
        context: i64 scalar: tokens that come before the drafts in this step.
    """

    def __init__(
        self, step: _Step, model: Decoder, layers: range, cache: Cache, context: str, scope: str
    ) -> None:
        self.step = step
        self.model = model
        self.layers = layers
        self.cache = cache
        self.context = context
        self.scope = scope
        self.tokens = ""
        self.logits = ""
        self.states: list[str] = []
        self.calls: list[list[KeyValue]] = []
        self._first = ""  # [B, 1, hidden]: the last context token's state

    def read_context(self, tokens: str, counts: str) -> str:
        """Run the layers over context `tokens` [B, C]; returns their states [B, C, hidden]."""
        g = self.step.g
        with g.scope(self.scope):
            states, new = self._run(g, tokens, g.const(0), self.context)
            column = g.op("Unsqueeze", g.op("Sub", counts, g.const(1)), g.const([1]))
            self._first = g.op("Unsqueeze", g.op("GatherND", states, column, batch_dims=1), g.const([1]))
        self.calls = [new]
        return states

    def read_context_if_any(self, tokens: str) -> None:
        """Run the layers over context `tokens` [B, D], unless D is 0. Equally many a sequence."""
        g = self.step.g
        then, otherwise = Branch(g.subgraph()), Branch(g.subgraph())
        b = then.builder
        with g.scope(self.scope):
            states, new = self._run(b, tokens, b.const(0), self.context)
            then.give(b.op("Gather", states, b.const([-1]), axis=1), FLOAT)
        otherwise.give(self.step.empty(otherwise.builder, 0, self.model.config.hidden_size), FLOAT)
        self._give_keys(then, otherwise, new)
        any_tokens = g.op("Greater", self.context, g.const(0))
        self._first, *flat = g.branch(any_tokens, then, otherwise, f"{self.scope}/context")
        self.calls = [_pairs(flat)]

    def draft(self, steps: str) -> None:
        """Draft `steps` (i64 scalar) tokens: run the one before, apply the head, draw."""
        g = self.step.g
        tokens: list[str] = []
        logits: list[str] = []
        for i in range(self.step.gamma):
            with g.scope(f"draft.{i + 1}"):
                token, scores = self._draft_one(steps, i, tokens[-1] if tokens else "")
            tokens.append(token)
            logits.append(scores)
        self.tokens = g.op("Concat", *tokens, axis=1)
        self.logits = g.op("Concat", *logits, axis=1)

    def _draft_one(self, steps: str, i: int, previous: str) -> tuple[str, str]:
        step, g, config = self.step, self.step.g, self.model.config
        then, otherwise = Branch(g.subgraph()), Branch(g.subgraph())
        b, e = then.builder, otherwise.builder
        state = self._first
        new: list[KeyValue] = []
        if previous:
            state, new = self._run_draft(b, previous, b.const(i - 1))
        scores = self.model.head(b, self.model.flatten(b, state))
        row = b.op("Gather", step.uniforms, b.const(i), axis=1)
        u = b.op("Gather", row, b.const(verification.DRAFT), axis=1)
        drawn = verification.draw_token(b, scores, step.temperature, step.top_k, step.top_p, u)
        then.give(b.op("Unsqueeze", drawn, b.const([1])), INT64)
        then.give(b.op("Unsqueeze", scores, b.const([1])), FLOAT)
        then.give(state, FLOAT)
        otherwise.give(step.empty(e, 0, elem_type=INT64), INT64)
        otherwise.give(step.empty(e, 0, step.vocab_size), FLOAT)
        otherwise.give(step.empty(e, 0, config.hidden_size), FLOAT)
        self._give_keys(then, otherwise, new)
        wanted = g.op("Greater", steps, g.const(i))
        token, scores, state, *flat = g.branch(wanted, then, otherwise, "If")
        if previous:
            self.states.append(state)
            self.calls.append(_pairs(flat))
        return token, scores

    def run_last_draft(self, steps: str) -> None:
        """Run the last draft token, too, so that its state and keys exist."""
        step, g = self.step, self.step.g
        then, otherwise = Branch(g.subgraph()), Branch(g.subgraph())
        b = then.builder
        with g.scope("draft.last"):
            last = b.op("Gather", self.tokens, b.const([-1]), axis=1)
            state, new = self._run_draft(b, last, b.op("Sub", steps, b.const(1)))
            then.give(state, FLOAT)
            otherwise.give(step.empty(otherwise.builder, 0, self.model.config.hidden_size), FLOAT)
            self._give_keys(then, otherwise, new)
            state, *flat = g.branch(g.op("Greater", steps, g.const(0)), then, otherwise, "If")
        self.states.append(state)
        self.calls.append(_pairs(flat))

    def _run_draft(self, b: GraphBuilder, token: str, index: str) -> tuple[str, list[KeyValue]]:
        """Run draft token `index` ([B, 1], i64 scalar) through the layers."""
        start = b.op("Add", self.context, index)
        return self._run(b, token, start, b.op("Add", start, b.const(1)))

    def _run(self, b: GraphBuilder, tokens: str, start: str, stop: str) -> tuple[str, list[KeyValue]]:
        """Tokens `start` … `stop` - 1 of this step → states [B, T, hidden], keys and values by layer."""
        cache, model = self.cache, self.model
        frame = appended_frame(
            b, model.config, lengths=cache.lengths, start=start, stop=stop, span=cache.span
        )
        past = cache.appended(b, self.calls)
        x = model.embed(b, tokens)
        new = []
        for layer in self.layers:
            x, pair = model.layer(b, layer, x, frame, past)
            new.append(pair)
        return self.step.unflatten(b, model, x, tokens), new

    def _give_keys(self, then: Branch, otherwise: Branch, new: list[KeyValue]) -> None:
        """Hand out a call's keys and values; the other branch hands out none, of the same type."""
        config = self.model.config
        nothing = self.step.empty(otherwise.builder, config.num_kv_heads, 0, config.head_dim)
        for pair in new:
            for value in pair:
                then.give(value, FLOAT)
                otherwise.give(nothing, FLOAT)


def _pairs(flat: list[str]) -> list[KeyValue]:
    return list(zip(flat[::2], flat[1::2], strict=True))
