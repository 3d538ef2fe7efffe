"""Trees of draft tokens inside the step: of a fixed shape, and grown by the drafter's confidence.

Sources: Cai et al. 2024 (Medusa), Li et al. 2024 (EAGLE) for fixed trees; Li et al. 2024 (EAGLE-2,
section 4) for dynamic ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from builders.graph.builder import FLOAT, INT64, Branch, GraphBuilder
from builders.graph.decoder import KeyValue
from builders.graph.drafting import Drafting, DraftRules, Drafts, any_of, first_columns, pairs_of
from engines.trees import Tree
from engines.uniforms import DRAFT, DRAWS
from engines.verification.drawn_function import draw_siblings

__all__ = ["dynamic_tree", "static_tree", "tree_drafts"]

PRUNED = -1.0e9  # the score of a node that must not be chosen


def static_tree(run: Drafting, tree: Tree, *, drawn: bool = False) -> Drafts:
    """Draft a tree of fixed shape.

    Args:
        drawn: a node's children are drawn from the drafter's distribution without replacement, where
            the request samples; else they are its most likely continuations.
    """
    g, rules, model = run.g, run.rules, run.model
    levels = [[n for n in range(1, tree.size + 1) if tree.depths[n] == d + 1] for d in range(tree.depth)]
    inner = [[0], *([n for n in level if tree.children(n)] for level in levels[:-1])]
    tokens: list[str] = []
    logits: list[str] = []  # [B, inner, vocabulary], by level
    states = run.first
    for d, level in enumerate(levels):
        width = max(tree.level_widths) if drawn else tree.level_widths[d]
        then, otherwise = Branch(g.subgraph()), Branch(g.subgraph())
        b, e = then.builder, otherwise.builder
        new: list[KeyValue] = []
        with g.scope(f"draft.{d + 1}"):
            reached = states
            if d:
                places = [levels[d - 1].index(n) for n in inner[d]]
                parents = [inner[d - 1].index(tree.parents[n - 1]) for n in inner[d]]
                known = [n for earlier in inner[1 : d + 1] for n in earlier]
                sees = np.array([[[bool(tree.ancestors[n, m]) for m in known] for n in inner[d]]])
                reached, new = run.run_level(
                    b,
                    b.op("Gather", tokens[-1], b.const(places), axis=1),
                    b.op("Gather", states, b.const(parents), axis=1),
                    d - 1,
                    b.const(sees, np.bool_),
                    [tree.depths[m] - 1 for m in known],
                )
            scores = model.scores(b, reached)
            if drawn:
                candidates = _drawn(b, scores, rules, d, width, len(inner[d]))
            else:
                candidates = _best(b, scores, width)[1]  # [B * inner, width]
            flat = b.op("Reshape", candidates, b.op("Concat", run.batch, b.const([-1]), axis=0))
            order = [inner[d].index(tree.parents[n - 1]) * width + tree.ranks[n - 1] for n in level]
            then.give(model.to_target(b, b.op("Gather", flat, b.const(order), axis=1)), INT64)
            then.give(reached, FLOAT)
            otherwise.give(run.empty(e, 0, elem_type=INT64), INT64)
            otherwise.give(run.empty(e, 0, model.config.hidden_size), FLOAT)
            if drawn:
                shape = b.op("Concat", run.batch, b.const([len(inner[d]), rules.vocab_size]), axis=0)
                then.give(b.op("Reshape", model.widen(b, scores), shape), FLOAT)
                otherwise.give(run.empty(e, 0, rules.vocab_size), FLOAT)
            run.give_keys(then, otherwise, new)
            wanted = any_of(g, g.op("Greater", rules.counts, g.const(d)))
            token, states, *rest = g.branch(wanted, then, otherwise, "If")
        tokens.append(token)
        if drawn:
            logits.append(rest.pop(0))
        if d:
            run.calls.append(pairs_of(rest))
    drafts = tree_drafts(g, tree, g.op("Concat", *tokens, axis=1), rules.counts, run.batch)
    if not drawn:
        return drafts
    order = [n for level in inner for n in level]
    return replace(drafts, logits=_by_node(run, tree, drafts, g.op("Concat", *logits, axis=1), order))


def _drawn(b: GraphBuilder, scores: str, rules: DraftRules, level: int, width: int, nodes: int) -> str:
    """`width` tokens [B * nodes, width], drawn without replacement from each row of scores."""
    lanes = [DRAWS * lane + DRAFT for lane in range(width)]
    row = b.op("Gather", rules.uniforms, b.const(level), axis=1)
    u = b.op("Gather", row, b.const(lanes), axis=1)

    def by_node(x: str, *dims: int) -> str:
        """[B, …] → [B * nodes, …]: each sequence's row, once a node."""
        repeated = b.op("Tile", b.op("Unsqueeze", x, b.const([1])), b.const([1, nodes] + [1] * len(dims)))
        return b.op("Reshape", repeated, b.const([-1, *dims]))

    sampling = (by_node(rules.temperature), by_node(rules.top_k), by_node(rules.top_p))
    return draw_siblings(b, scores, *sampling, by_node(u, width), width=width)


def _by_node(run: Drafting, tree: Tree, drafts: Drafts, logits: str, order: list[int]) -> str:
    """What each node's children were drawn from, [B, R, vocabulary]; zeros where it has none.

    Args:
        logits: [B, inner nodes that were run, vocabulary], in `order`.
    """
    g = run.g
    ran = g.op("Shape", logits, start=1, end=2)
    none = g.op("ConstantOfShape", g.op("Concat", run.batch, g.const([1, run.rules.vocab_size]), axis=0))
    place = [order.index(n) if n in order else len(order) for n in range(tree.size + 1)]
    rows = g.op("Add", g.op("Shape", drafts.tokens, start=1, end=2), g.const([1]))
    used = g.op("Slice", g.const(place), g.const([0]), rows, g.const([0]))
    return g.op("Gather", g.op("Concat", logits, none, axis=1), g.op("Min", used, ran), axis=1)


def dynamic_tree(run: Drafting, *, depth: int, top_k: int, size: int) -> Drafts:
    """Expand the `top_k` most likely nodes of every level; keep the `size` most likely of all.

    A node's score is the sum of log-probabilities from the root, so a parent never scores below
    its children, and what is kept is closed under parents.
    """
    g, rules, model, k = run.g, run.rules, run.model, top_k
    pool: list[tuple[str, str, str]] = []  # tokens, scores, parents' pool indices (-1: root), by level
    frontier: list[str] = []  # tokens, scores, pool indices, the parents' states, who sees whom
    for d in range(depth):
        then, otherwise = Branch(g.subgraph()), Branch(g.subgraph())
        b, e = then.builder, otherwise.builder
        new: list[KeyValue] = []
        with g.scope(f"draft.{d + 1}"):
            if d == 0:
                values, best = _best(b, b.op("LogSoftmax", model.scores(b, run.first)), k)
                tokens = model.to_target(b, best)
                parents = b.op("Sub", b.op("Mul", best, b.const(0)), b.const(1))
                order = b.op("Add", parents, b.const(np.arange(1, k + 1)))
                wide = b.op("Concat", run.batch, b.const([k, model.config.hidden_size]), axis=0)
                states = b.op("Expand", run.first, wide)
                eye = b.op("Concat", run.batch, b.const([k, k]), axis=0)
                sees = b.op("Expand", b.const(np.eye(k), np.int64), eye)
                given = [tokens, values, parents, tokens, values, order, states, sees]
            else:
                depths = [e for e in range(d) for _ in range(k)]
                seen = b.op("Greater", frontier[4], b.const(0))
                states, new = run.run_level(b, frontier[0], frontier[3], d - 1, seen, depths)
                given = _expand(run, b, frontier, states, d, k)
            types = [INT64, FLOAT, INT64, INT64, FLOAT, INT64, FLOAT, INT64]
            for value, elem_type in zip(given, types, strict=True):
                then.give(value, elem_type)
                otherwise.give(run.empty(e, 0, elem_type=elem_type), elem_type)
            run.give_keys(then, otherwise, new)
            wanted = any_of(g, g.op("Greater", rules.counts, g.const(d)))
            given = g.branch(wanted, then, otherwise, "If")
        pool.append((given[0], given[1], given[2]))
        frontier = given[3:8]
        if d:
            run.calls.append(pairs_of(given[8:]))
    return _keep_best(run, pool, k, size)


def _expand(run: Drafting, b: GraphBuilder, frontier: list[str], states: str, d: int, k: int) -> list[str]:
    """The k best children of each node of a level, as pool entries, and the next level."""
    model = run.model
    row = b.op("Concat", run.batch, b.const([-1]), axis=0)
    values, best = _best(b, b.op("LogSoftmax", model.scores(b, states)), k)  # [B * k, k]
    grid = b.op("Concat", run.batch, b.const([k, k]), axis=0)
    total = b.op("Add", b.op("Reshape", values, grid), b.op("Unsqueeze", frontier[1], b.const([2])))
    scores = b.op("Reshape", total, row)
    tokens = b.op("Reshape", model.to_target(b, best), row)
    parents = b.op("Reshape", b.op("Expand", b.op("Unsqueeze", frontier[2], b.const([2])), grid), row)
    kept, place = b.multi("TopK", scores, b.const([k]), outputs=2, axis=1)
    first = k + (d - 1) * k * k  # of this level in the pool
    parent = b.op("Unsqueeze", b.op("Div", place, b.const(k)), b.const([2]))
    sees = b.op("GatherND", frontier[4], parent, batch_dims=1)
    own = b.op("Expand", b.const(np.eye(k), np.int64), grid)
    return [
        tokens,
        scores,
        parents,
        b.op("GatherElements", tokens, place, axis=1),
        kept,
        b.op("Add", place, b.const(first)),
        b.op("GatherND", states, parent, batch_dims=1),
        b.op("Concat", sees, own, axis=2),
    ]


def _keep_best(run: Drafting, pool: list[tuple[str, str, str]], k: int, size: int) -> Drafts:
    """The `size` best entries that are deep enough and sure enough, in pool order: parents first."""
    g, rules = run.g, run.rules
    with g.scope("draft.tree"):
        tokens, scores, parents = (g.op("Concat", *column, axis=1) for column in zip(*pool, strict=True))
        count = g.op("Shape", tokens, start=1, end=2)
        depths = np.repeat(np.arange(1, len(pool) + 1), [k] + [k * k] * (len(pool) - 1))
        deep = g.op("Slice", g.const(depths), g.const([0]), count, g.const([0]))
        column = g.op("Unsqueeze", rules.counts, g.const([1]))
        least = g.op("Log", g.op("Max", rules.threshold, g.const(1e-30, np.float32)))
        sure = g.op("GreaterOrEqual", scores, g.op("Unsqueeze", least, g.const([1])))
        usable = g.op("And", sure, g.op("LessOrEqual", deep, column))
        scores = g.op("Where", usable, scores, g.const(PRUNED, np.float32))
        kept = g.op("Min", g.const([size]), count)
        best, chosen = g.multi("TopK", scores, kept, outputs=2, axis=1)
        real = g.op("Greater", best, g.const(PRUNED / 2, np.float32))
        chosen = g.op("Where", real, chosen, count)
        order = g.multi("TopK", chosen, kept, outputs=2, axis=1, largest=0)[0]
        is_node = g.op("Less", order, count)
        counts = g.op("ReduceSum", g.op("Cast", is_node, to=INT64), g.const([1]), keepdims=0)
        place = g.op("Min", order, g.op("Sub", count, g.const([1])))
        parent = g.op("GatherElements", parents, place, axis=1)
        earlier = g.op(
            "Less", g.op("Unsqueeze", order, g.const([1])), g.op("Unsqueeze", parent, g.const([2]))
        )
        number = g.op("ReduceSum", g.op("Cast", earlier, to=INT64), g.const([2]), keepdims=0)
        inner = g.op("And", is_node, g.op("GreaterOrEqual", parent, g.const(0)))
        number = g.op("Where", inner, g.op("Add", number, g.const(1)), g.const(0))
        width = g.op("ReduceMax", counts, keepdims=1)
        return Drafts(
            tokens=first_columns(g, g.op("GatherElements", tokens, place, axis=1), width),
            counts=counts,
            parents=first_columns(g, number, width),
        )


def tree_drafts(g: GraphBuilder, tree: Tree, tokens: str, depths: str, batch: str) -> Drafts:
    """A static tree's tokens i64 [B, N or fewer]; of each sequence the first `depths` [B] levels count."""
    ends = [sum(1 for depth in tree.depths[1:] if depth <= d) for d in range(tree.depth + 1)]
    counts = g.op("Gather", g.const(ends), depths)
    width = g.op("ReduceMax", counts, keepdims=1)
    used = first_columns(g, tokens, width)
    if tree.is_chain:
        return Drafts(tokens=used, counts=counts)
    parents = first_columns(g, g.const([tree.parents]), width)
    return Drafts(used, counts, parents=g.op("Expand", parents, g.op("Concat", batch, width, axis=0)))


def _best(b: GraphBuilder, scores: str, k: int) -> tuple[str, str]:
    """Values and indices of the k largest scores along the last axis."""
    values, indices = b.multi("TopK", scores, b.const([k]), outputs=2, axis=-1)
    return values, indices
