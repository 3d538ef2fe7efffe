"""Trees of draft tokens inside the step: of a fixed shape, and grown by the drafter's confidence.

Sources: Cai et al. 2024 (Medusa), Li et al. 2024 (EAGLE) for fixed trees; Li et al. 2024 (EAGLE-2,
section 4) for dynamic ones.
"""

from __future__ import annotations

import numpy as np

from builders.graph.builder import FLOAT, INT64, Branch, GraphBuilder
from builders.graph.decoder import KeyValue
from builders.graph.drafting import Drafting, Drafts, any_of, first_columns, pairs_of
from engines.trees import Tree

__all__ = ["dynamic_tree", "static_tree", "tree_drafts"]

PRUNED = -1.0e9  # the score of a node that must not be chosen


def static_tree(run: Drafting, tree: Tree) -> Drafts:
    """Draft a tree of fixed shape: each node's children are its most likely continuations."""
    g, rules, model = run.g, run.rules, run.model
    levels = [[n for n in range(1, tree.size + 1) if tree.depths[n] == d + 1] for d in range(tree.depth)]
    tokens: list[str] = []
    states, ran = run.first, [[0]]  # the nodes whose states there are, by level
    for d, level in enumerate(levels):
        inner = [n for n in levels[d - 1] if tree.children(n)] if d else [0]
        then, otherwise = Branch(g.subgraph()), Branch(g.subgraph())
        b, e = then.builder, otherwise.builder
        new: list[KeyValue] = []
        with g.scope(f"draft.{d + 1}"):
            if d:
                places = [levels[d - 1].index(n) for n in inner]
                parents = [ran[-1].index(tree.parents[n - 1]) for n in inner]
                known = [n for earlier in [*ran[1:], inner] for n in earlier]
                sees = np.array([[[bool(tree.ancestors[n, m]) for m in known] for n in inner]])
                depths = [tree.depths[m] - 1 for m in known]
                states_d, new = run.run_level(
                    b,
                    b.op("Gather", tokens[-1], b.const(places), axis=1),
                    b.op("Gather", states, b.const(parents), axis=1),
                    d - 1,
                    b.const(sees, np.bool_),
                    depths,
                )
            else:
                states_d = run.first
            scores = model.scores(b, states_d)
            best = _best(b, scores, tree.level_widths[d])[1]  # [B * inner, K]
            flat = b.op("Reshape", best, b.op("Concat", run.batch, b.const([-1]), axis=0))
            order = [
                inner.index(tree.parents[n - 1]) * tree.level_widths[d] + tree.ranks[n - 1] for n in level
            ]
            chosen = b.op("Gather", flat, b.const(order), axis=1)
            then.give(model.to_target(b, chosen), INT64)
            then.give(states_d, FLOAT)
            otherwise.give(run.empty(e, 0, elem_type=INT64), INT64)
            otherwise.give(run.empty(e, 0, model.config.hidden_size), FLOAT)
            run.give_keys(then, otherwise, new)
            wanted = any_of(g, g.op("Greater", rules.counts, g.const(d)))
            token, states, *flat_keys = g.branch(wanted, then, otherwise, "If")
        tokens.append(token)
        if d:
            ran.append(inner)
            run.calls.append(pairs_of(flat_keys))
    return tree_drafts(g, tree, g.op("Concat", *tokens, axis=1), rules.counts, run.batch)


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
