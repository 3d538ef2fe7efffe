"""The fused step: draft, verify, accept and write the caches, in one graph.

One call takes, for every sequence of the batch, the committed tokens that the target has not seen
(`tokens`: the whole prompt at prefill, one token afterwards), drafts a chain or a tree of tokens, runs
the target over all of them, writing the caches in place, and verifies. The host keeps `lengths` and
adds what was accepted; rows of the cache above a sequence's length are garbage that the next step
overwrites. Of a tree only the accepted path stays, moved behind the context.

Inputs (B sequences, C tokens, N draft tokens at most, P - 1 levels of them at most):
    tokens i64 [B, C], token_counts i64 [B], lengths i64 [B]
    draft_counts i64 [B]      where the graph drafts: levels to draft (a chain's tokens), per sequence;
                              else how many of `draft_tokens` are real; above 0 needs token_counts == C
    draft_tokens i64 [B, N]   only where the host proposes (none, ngram, lookahead)
    draft_parents i64 [B, N]  lookahead: the proposed tree
    draft_threshold f32 [B]   where the graph drafts: least probability of a path, see `DraftRules`
    draft.tokens i64 [B, D], draft.counts i64 [B], draft.lengths i64 [B]
                              draft_model, eagle: what the drafter's own cache has not seen
    draft.features f32 [B, D, F]   eagle: the target's features of the positions before these tokens;
                              medusa: of the last position, D = 1
    temperature f32 [B], top_k i64 [B], top_p f32 [B], uniforms f32 [B, P, 3] (or 3 a sibling)
    target.k.L, target.v.L, drafter.k.L, drafter.v.L  [B, kv_heads, S, head_dim]: the caches; the
                              host chooses S, at least the longest length plus this step's tokens
Outputs (R = 1 + the draft tokens that were verified; P' = 1 + their levels):
    accepted i64 [B], emitted i64 [B, P'], finite bool [B], logits f32 [B, R, vocabulary]
    verified i64 [B], drafted i64 [B, R - 1]  where the graph drafts: draft tokens, how many were verified;
                              with trees also levels i64 [B]: how deep they went
    choice i64 [B, R]         lookahead: the target's own token behind every node
    features f32 [B, C + P' - 1, F]   eagle, medusa: of the context and the accepted path
    and every cache under its name with `.out`; with trees also `.step`, see `Cache`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from builders.checkpoints.heads.types import EagleHead, MedusaHeads
from builders.checkpoints.types import Checkpoint, DecoderConfig
from builders.graph.builder import BOOL, FLOAT, INT64, GraphBuilder
from builders.graph.cache import Cache
from builders.graph.decoder import Decoder
from builders.graph.drafting import Drafting, DraftModel, DraftRules, Drafts, PlainDrafter, first_columns
from builders.graph.frame import TreeShape, in_place_frame
from builders.graph.heads import EagleDrafter, feature_width, medusa_drafts
from builders.graph.trees import dynamic_tree, static_tree
from builders.graph.weights import MICROSOFT_DOMAIN, Weights
from engines.bundle import CacheShape, DynamicTree, EngineFacts, StaticTree
from engines.trees import Tree, chain, from_choices
from engines.verification import function as verification
from engines.verification.drawn_function import drawn_functions, verify_tree_drawn

__all__ = ["Drafter", "emit_step", "engine_shapes"]

Drafter = Checkpoint | EagleHead | MedusaHeads


def emit_step(
    target: Checkpoint,
    drafter: Drafter | None,
    facts: EngineFacts,
    *,
    locations: Mapping[Path, str],
    out: Path,
) -> int:
    """Write `out`/step.onnx.

    Args:
        facts: method, γ, tree, vocabulary and so on; wider logits than its vocabulary are cut. They were
            validated with the deployment spec.
        locations: bundle-relative path of every weight file of both checkpoints.

    Returns:
        The number of nodes.
    """
    g = GraphBuilder()
    step = _Step(g, target, drafter, facts, locations)
    step.draft()
    step.verify()
    domains = {verification.DOMAIN: verification.VERSION, MICROSOFT_DOMAIN: 1}
    metadata = {"method": facts.method, "gamma": str(facts.gamma)}
    functions = verification.functions()
    if isinstance(facts.tree, StaticTree) and facts.tree.drawn:
        assert isinstance(step.tree, Tree)
        functions += drawn_functions(step.tree.depth, max(step.tree.level_widths))
    model = g.model("step", functions, domains, metadata)
    onnx.save_model(model, str(out / "step.onnx"))
    return len(model.graph.node)


def engine_shapes(target: Checkpoint, drafter: Drafter | None) -> dict[str, Any]:
    """The fields of `EngineFacts` that follow from the checkpoints' shapes."""
    own_cache = None if drafter is None or isinstance(drafter, MedusaHeads) else drafter.config
    return {
        "target_cache": _cache_shape(target.config),
        "draft_cache": None if own_cache is None else _cache_shape(own_cache),
        "feature_width": feature_width(drafter) if isinstance(drafter, EagleHead | MedusaHeads) else 0,
    }


def _tree(facts: EngineFacts) -> Tree | DynamicTree | None:
    if not isinstance(facts.tree, StaticTree):
        return facts.tree
    return from_choices(facts.tree.choices, max_depth=facts.gamma, max_nodes=facts.draft_tokens)


def _cache_shape(config: DecoderConfig) -> CacheShape:
    return CacheShape(layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim)


class _Step:
    """The parts of a step, in the order in which they run."""

    def __init__(
        self,
        g: GraphBuilder,
        target: Checkpoint,
        drafter: Drafter | None,
        facts: EngineFacts,
        locations: Mapping[Path, str],
    ) -> None:
        vocab_size = facts.vocab_size
        self.g = g
        self.facts = facts
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.tree = _tree(facts)
        self.branches = (
            facts.method == "lookahead"
            or isinstance(self.tree, DynamicTree)
            or (self.tree is not None and not self.tree.is_chain)
            or facts.typical is not None
        )
        self.locations = locations
        self.target = Decoder(target.config, Weights(g, target.tensors, locations, vocab_size, "target"))
        self.tokens = g.input("tokens", INT64, ["B", "C"])
        self.token_counts = g.input("token_counts", INT64, ["B"])
        self.cache = Cache(g, "target", target.config, "lengths", compacted=self.branches)
        self.rules = DraftRules(
            counts=g.input("draft_counts", INT64, ["B"]),
            threshold=g.input("draft_threshold", FLOAT, ["B"]) if facts.drafts_in_graph else "",
            temperature=g.input("temperature", FLOAT, ["B"]),
            top_k=g.input("top_k", INT64, ["B"]),
            top_p=g.input("top_p", FLOAT, ["B"]),
            uniforms=g.input("uniforms", FLOAT, ["B", "P", facts.draws]),
            vocab_size=vocab_size,
        )
        self.batch = g.op("Shape", self.tokens, start=0, end=1)
        self.context = g.op("Squeeze", g.op("Shape", self.tokens, start=1, end=2), g.const([0]))  # C
        # What drafting leaves for the verification:
        self.drafts = Drafts("", "")
        self.hidden = ""  # [B, C + N, hidden]: context and drafts, after `start_layer` layers
        self.start_layer = 0

    # -- drafting -------------------------------------------------------------------------------

    def draft(self) -> None:
        """Fill `drafts` and `hidden`."""
        method = self.facts.method
        if method == "layer_skip":
            self._draft_with_first_layers()
            return
        if method == "medusa":
            self._draft_with_medusa()
        elif method in ("draft_model", "eagle", "eagle3"):
            self._draft_with_own_cache()
        else:
            self._take_drafts()
        tokens = self.g.op("Concat", self.tokens, self.drafts.tokens, axis=1)
        with self.g.scope("target"):
            self.hidden = self.target.unflatten(self.g, self.target.embed(self.g, tokens), tokens)

    def _take_drafts(self) -> None:
        """`none`, `ngram`, `lookahead`: the host proposes."""
        tree = self.facts.method == "lookahead"
        self.drafts = Drafts(
            tokens=self.g.input("draft_tokens", INT64, ["B", "N"]),
            counts=self.rules.counts,
            parents=self.g.input("draft_parents", INT64, ["B", "N"]) if tree else "",
        )

    def _draft_with_first_layers(self) -> None:
        """`layer_skip`: the first layers, the final norm and lm_head draft (Elhoushi et al. 2024).

        The verification goes on from the drafter's hidden states and keys: nothing is computed twice.
        """
        g, exit_layer = self.g, self.facts.exit_layer
        assert exit_layer is not None
        model = PlainDrafter(self.target, range(exit_layer))
        run = Drafting(g, model, self.cache, self.rules, self.batch, "target")
        context = run.read_shared(self.tokens, self.context)
        self.drafts = run.chain(self.facts.gamma)
        run.run_last_draft(self.drafts)
        for layer in range(exit_layer):
            self.cache.write(layer, [call[layer] for call in run.calls])
        width = g.op("Shape", self.drafts.tokens, start=1, end=2)
        states = first_columns(g, g.op("Concat", *run.states, axis=1), width)
        self.hidden = g.op("Concat", context, states, axis=1)
        self.start_layer = exit_layer

    def _draft_with_own_cache(self) -> None:
        """`draft_model`, `eagle`, `eagle3`: what drafts has a cache of its own."""
        g, drafter, tree = self.g, self.drafter, self.tree
        assert drafter is not None and not isinstance(drafter, MedusaHeads)
        tokens = g.input("draft.tokens", INT64, ["B", "D"])
        counts = g.input("draft.counts", INT64, ["B"])
        cache = Cache(g, "drafter", drafter.config, "draft.lengths")
        features, model = "", self._model(drafter)
        if isinstance(drafter, EagleHead):
            features = g.input("draft.features", FLOAT, ["B", "D", feature_width(drafter)])
        run = Drafting(g, model, cache, self.rules, self.batch, "drafter")
        run.read_pending(tokens, counts, features)
        if isinstance(tree, DynamicTree):
            self.drafts = dynamic_tree(run, depth=self.facts.gamma, top_k=tree.top_k, size=tree.nodes)
        elif tree is not None and not tree.is_chain:
            fixed = self.facts.tree
            self.drafts = static_tree(run, tree, drawn=isinstance(fixed, StaticTree) and fixed.drawn)
        else:
            self.drafts = run.chain(self.facts.gamma)

    def _model(self, drafter: Checkpoint | EagleHead) -> DraftModel:
        if isinstance(drafter, EagleHead):
            return EagleDrafter(self.g, drafter, self.target, self.locations, self.vocab_size)
        weights = Weights(self.g, drafter.tensors, self.locations, self.vocab_size, "drafter")
        return PlainDrafter(Decoder(drafter.config, weights), range(drafter.config.num_layers))

    def _draft_with_medusa(self) -> None:
        """`medusa`: heads on the last accepted position's hidden state."""
        heads, tree = self.drafter, self.tree
        assert isinstance(heads, MedusaHeads) and not isinstance(tree, DynamicTree)
        features = self.g.input("draft.features", FLOAT, ["B", "D", feature_width(heads)])
        shape = tree or chain(self.facts.gamma)
        self.drafts = medusa_drafts(
            self.g, heads, self.target, self.locations, features, shape, self.rules, self.batch
        )

    # -- verification ---------------------------------------------------------------------------

    def verify(self) -> None:
        """Run the target over context and drafts, writing its cache, and verify."""
        g, target = self.g, self.target
        drafts = self._as_tree(self.drafts) if self.branches else self.drafts
        drafted = g.op("Squeeze", g.op("Shape", drafts.tokens, start=1, end=2), g.const([0]))
        total = g.op("Add", self.context, drafted)
        shape = None
        if drafts.parents:
            shape = TreeShape(*verification.tree_encoding(g, drafts.parents))
        with g.scope("target"):
            frame = in_place_frame(
                g,
                target.config,
                lengths=self.cache.lengths,
                context=self.context,
                count=total,
                span=self.cache.span,
                tree=shape,
            )
            x = target.flatten(g, self.hidden)
            taps = {}
            for layer in range(self.start_layer, target.config.num_layers):
                taps[layer] = x
                x, _ = target.layer(g, layer, x, frame, self.cache.in_place)
            rows = self._verified_rows(total)
            if self._reads_final_norm:
                x = target.final_norm(g, x)
                logits = target.weights.lm_head(g, g.op("Gather", x, rows, name="verified_rows"))
            else:
                logits = target.head(g, g.op("Gather", x, rows, name="verified_rows"))
        taps[target.config.num_layers] = x
        size = g.op("Concat", self.batch, g.const([-1, self.vocab_size]), axis=0)
        logits = g.output("logits", g.op("Reshape", logits, size), FLOAT, ["B", "R", self.vocab_size])
        path = self._judge(drafts, logits, shape)
        if self.facts.drafts_in_graph:
            g.output("drafted", g.op("Identity", drafts.tokens), INT64, ["B", "N.drafted"])
            g.output("verified", g.op("Identity", drafts.counts), INT64, ["B"])
            if shape is not None:
                g.output("levels", self._levels(shape, drafts.counts), INT64, ["B"])
        if path:
            rows = g.op("Add", path, g.op("Sub", self.context, g.const(1)))
            self.cache.keep_path(rows, g.op("Add", self.cache.lengths, self.context))
        self._hand_out_features(taps, total, path)

    def _as_tree(self, drafts: Drafts) -> Drafts:
        """A chain, written as a tree where the verification wants one."""
        if drafts.parents:
            return drafts
        g = self.g
        shape = g.op("Shape", drafts.tokens)
        count = g.op("Squeeze", g.op("Shape", drafts.tokens, start=1, end=2), g.const([0]))
        parents = g.op("Expand", g.op("Range", g.const(0), count, g.const(1)), shape)
        return Drafts(drafts.tokens, drafts.counts, drafts.logits, parents)

    def _judge(self, drafts: Drafts, logits: str, shape: TreeShape | None) -> str:
        """Verify; returns a tree's accepted path, i64 [B, P' - 1] node numbers, then 0."""
        g, rules = self.g, self.rules
        sampling = (rules.temperature, rules.top_k, rules.top_p)
        if shape is None:
            rows = g.op("Add", g.op("Shape", drafts.tokens, start=1, end=2), g.const([1]))
            used = first_columns(g, rules.uniforms, rows)
            accepted, emitted, finite = verification.verify_chain(
                g, logits, drafts.tokens, drafts.counts, drafts.logits, *sampling, used
            )
            path = ""
        else:
            accepted, emitted, path, finite = self._judge_tree(drafts, logits, shape)
        for name, value, elem_type, dims in (
            ("accepted", accepted, INT64, ["B"]),
            ("emitted", emitted, INT64, ["B", "P.out"]),
            ("finite", finite, BOOL, ["B"]),
        ):
            g.output(name, g.op("Identity", value), elem_type, dims)
        return path

    def _judge_tree(self, drafts: Drafts, logits: str, shape: TreeShape) -> tuple[str, str, str, str]:
        g, rules, facts = self.g, self.rules, self.facts
        tree = (logits, drafts.tokens, drafts.parents, drafts.counts)
        sampling = (rules.temperature, rules.top_k, rules.top_p)
        if drafts.logits and facts.typical is None:
            assert isinstance(self.tree, Tree)
            depth, width = self.tree.depth, max(self.tree.level_widths)
            return verify_tree_drawn(
                g, *tree, drafts.logits, *sampling, rules.uniforms, depth=depth, width=width
            )
        levels = g.op("Add", g.op("ReduceMax", shape.depths, keepdims=0), g.const([1]))
        operands = (*tree, *sampling, first_columns(g, rules.uniforms, levels))
        if facts.typical is None:
            verdict = verification.verify_tree(g, *operands)
        else:
            verdict = verification.verify_typical(g, *operands, **facts.typical.model_dump())
        accepted, emitted, path, finite, choice = verdict
        if facts.method == "lookahead":
            g.output("choice", g.op("Identity", choice), INT64, ["B", "R"])
        return accepted, emitted, path, finite

    def _levels(self, shape: TreeShape, counts: str) -> str:
        """i64 [B]: the deepest level of each sequence's first `counts` nodes."""
        g = self.g
        width = g.op("Squeeze", g.op("Shape", shape.depths, start=1, end=2), g.const([0]))
        node = g.op("Range", g.const(0), width, g.const(1))
        real = g.op("LessOrEqual", node, g.op("Unsqueeze", counts, g.const([1])))
        return g.op("ReduceMax", g.op("Where", real, shape.depths, g.const(0)), g.const([1]), keepdims=0)

    @property
    def _reads_final_norm(self) -> bool:
        """Does the drafter read the state behind the final norm of every position?"""
        return isinstance(self.drafter, MedusaHeads) or (
            isinstance(self.drafter, EagleHead) and not self.drafter.taps
        )

    def _hand_out_features(self, taps: Mapping[int, str], total: str, path: str) -> None:
        """The features of the context and of what may follow it: a chain's drafts, a tree's path."""
        if not isinstance(self.drafter, EagleHead | MedusaHeads):
            return
        g, width = self.g, feature_width(self.drafter)
        depths = self.drafter.taps if isinstance(self.drafter, EagleHead) else ()
        picked = [taps[depth] for depth in depths] or [taps[self.target.config.num_layers]]
        flat = picked[0] if len(picked) == 1 else g.op("Concat", *picked, axis=1)
        shape = g.op("Concat", self.batch, g.const([-1, width]), axis=0)
        features = g.op("Reshape", flat, shape)
        if path:
            last = g.op("Sub", self.context, g.const(1))
            context = g.op("Range", g.const(0), self.context, g.const(1))
            wide = g.op("Concat", self.batch, g.op("Shape", context), axis=0)
            rows = g.op("Concat", g.op("Expand", context, wide), g.op("Add", path, last), axis=1)
            features = g.op("GatherND", features, g.op("Unsqueeze", rows, g.const([2])), batch_dims=1)
        g.output("features", g.op("Identity", features), FLOAT, ["B", "F.rows", width])

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
