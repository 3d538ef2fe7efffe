"""Where a call's tokens stand: rotary angles and attention masks.

A call of the layers sees its past in one of two ways:

* *in place*: new keys and values are scattered into the cache behind each sequence's length, and
  attention reads the cache itself. No byte of the cache is copied. The target verifies this way.
* *appended*: attention reads the cache followed by the keys and values of this step's calls. The
  drafter's unrolled steps work this way, since they may branch, and nothing of them is kept.

Either way nothing is rolled back: rows above a sequence's length are garbage that the next step
overwrites, and a tree of draft tokens differs from a chain by its mask and positions only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from builders.checkpoints.types import DecoderConfig
from builders.graph.builder import FLOAT, INT64, GraphBuilder
from builders.graph.rope import inverse_frequencies

__all__ = ["Frame", "TreeShape", "appended_frame", "in_place_frame", "lower_triangle"]

Ages = Callable[[], str]  # emits how far back each key lies; only sliding windows ask

MASKED = -1.0e9  # far below any attention score, yet finite: a padded row stays free of NaN


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


@dataclass(frozen=True)
class TreeShape:
    """How the last tokens of a call branch; row 0 is the tree's root, the last token of the context.

    Attributes:
        ancestors: bool [batch, nodes + 1, nodes + 1]: which row sees which.
        depths: i64 [batch, nodes + 1].
    """

    ancestors: str
    depths: str


def in_place_frame(
    g: GraphBuilder,
    config: DecoderConfig,
    *,
    lengths: str,
    context: str,
    count: str,
    span: str,
    tree: TreeShape | None = None,
) -> Frame:
    """The frame of `count` tokens a sequence, written into the cache before it is read.

    Args:
        lengths: i64 [batch]: positions in the cache before this step.
        context: i64 scalar: the first tokens, which follow one another.
        count: i64 scalar: all tokens.
        span: i64 scalar: positions that the cache holds at most; the mask has as many columns.
        tree: how the tokens behind the context branch; None: they follow one another, too.
    """
    with g.scope("frame"):
        column = g.op("Unsqueeze", lengths, g.const([1]))
        cached = g.op("Range", g.const(0), span, g.const(1))
        rows = g.op("Range", g.const(0), count, g.const(1))
        if tree is None:
            positions = g.op("Add", column, rows)
            queries = g.op("Unsqueeze", positions, g.const([2]))
            seen = g.op("LessOrEqual", cached, queries)
            return _frame(g, config, positions, seen, lambda: g.op("Sub", queries, cached))
        root = g.op("Sub", context, g.const(1))
        depths, sees = _behind_context(g, tree, root, rows)
        positions = g.op("Add", column, depths)
        # Column j of the mask is the step's token j - length, if that is one of the step's.
        index = g.op("Unsqueeze", g.op("Sub", cached, column), g.const([1]))  # [B, 1, S]
        last = g.op("Sub", count, g.const(1))
        inside = g.op("Min", g.op("Max", index, g.const(0)), last)
        wide = g.op("Concat", g.op("Shape", positions), g.op("Shape", cached), axis=0)
        theirs = g.op("GatherElements", sees, g.op("Expand", inside, wide), axis=2)
        now = g.op("And", g.op("LessOrEqual", index, last), g.op("Greater", theirs, g.const(0)))
        seen = g.op("Or", g.op("Less", index, g.const(0)), now)

        def ages() -> str:
            flat = g.op("Squeeze", inside, g.const([1]))
            placed = g.op("Add", column, g.op("GatherElements", depths, flat, axis=1))
            keys = g.op("Where", g.op("Less", g.op("Sub", cached, column), g.const(0)), cached, placed)
            queries = g.op("Unsqueeze", positions, g.const([2]))
            return g.op("Sub", queries, g.op("Unsqueeze", keys, g.const([1])))

        return _frame(g, config, positions, seen, ages)


def _behind_context(g: GraphBuilder, tree: TreeShape, root: str, rows: str) -> tuple[str, str]:
    """A tree's shape with the context before its root: depths i64 [B, T], who sees whom i64 [B, T, T]."""
    pads = g.op("Unsqueeze", root, g.const([0]))
    nothing, none = g.const([0]), g.const(0)
    before = g.op("Concat", nothing, pads, pads, nothing, nothing, nothing, axis=0)
    sees = g.op("Pad", g.op("Cast", tree.ancestors, to=INT64), before, none)
    column = g.op("Unsqueeze", rows, g.const([1]))
    earlier = g.op("And", g.op("LessOrEqual", rows, column), g.op("Less", rows, root))
    sees = g.op("Max", sees, g.op("Cast", earlier, to=INT64))
    short = g.op("Concat", nothing, pads, nothing, nothing, axis=0)
    depths = g.op("Pad", tree.depths, short, none)
    return g.op("Add", depths, g.op("Min", rows, root)), sees


def appended_frame(
    g: GraphBuilder,
    config: DecoderConfig,
    *,
    filled: str,
    positions: str,
    span: str,
    sees: str,
    new_positions: str,
) -> Frame:
    """The frame of tokens whose call attends to the cache and, behind it, to the step's new keys.

    Args:
        filled: i64 [batch]: positions of the cache that count.
        positions: i64 [batch, tokens]: of the queries.
        span: i64 scalar: positions that the cache holds at most.
        sees: bool, broadcasts to [batch, tokens, new keys].
        new_positions: i64 [batch, new keys].
    """
    with g.scope("frame"):
        queries = g.op("Unsqueeze", positions, g.const([2]))
        keys = g.op("Unsqueeze", new_positions, g.const([1]))
        cached = g.op("Range", g.const(0), span, g.const(1))
        shape = g.op("Shape", positions)
        wide = g.op("Concat", shape, g.op("Unsqueeze", span, g.const([0])), axis=0)
        past = g.op("Expand", g.op("Less", cached, g.op("Unsqueeze", filled, g.const([1, 2]))), wide)
        new_wide = g.op("Concat", shape, g.op("Shape", new_positions, start=1, end=2), axis=0)
        seen = g.op("Concat", past, g.op("Expand", sees, new_wide), axis=2)

        def ages() -> str:
            return g.op("Concat", g.op("Sub", queries, cached), g.op("Sub", queries, keys), axis=2)

        return _frame(g, config, positions, seen, ages)


def lower_triangle(g: GraphBuilder, count: str) -> str:
    """bool [1, count, count]: each token sees itself and those before it; `count` is an i64 scalar."""
    rows = g.op("Range", g.const(0), count, g.const(1))
    return g.op("LessOrEqual", rows, g.op("Unsqueeze", rows, g.const([0, 2])))


def _frame(g: GraphBuilder, config: DecoderConfig, positions: str, seen: str, ages: Ages) -> Frame:
    """Masks from what a token may see and, for sliding windows, from how far back it lies."""
    masks = {}
    if len(config.sliding_layers) < config.num_layers:
        masks[False] = _additive(g, seen)
    if config.sliding_layers:
        near = g.op("Less", ages(), g.const(config.sliding_window or 0))
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
