"""Lookahead decoding: the target drafts for itself, with spare rows of its own verify steps.

Fu, Bailis, Stoica and Zhang 2024, "Break the sequential dependency of LLM inference using lookahead
decoding". Every step carries two branches in one token tree. The *lookahead branch* is a window of W
columns and N - 1 levels in which every column guesses the text at its own distance; one step renews it
by one Jacobi iteration, and what its columns read from top to bottom are n-grams that the target itself
produced. They go to a pool. The *verification branch* holds up to G n-grams of the pool that start with
the text's last token.

The window is a tree. Level 0 is a chain: column 0 is the text's last token itself (the tree's root),
column w hangs at column w - 1. On level l ≥ 1, column w hangs at column w of level l - 1. So the node's
depth, w + l, is its distance from the last token, as the paper positions it, and its ancestors are
level 0 up to its own column and the levels above it in that column, which is what the paper's attention
mask shows it. Two tokens with equal ancestors would get equal answers, so the branches are merged into
one prefix tree. The root is not a draft token: the window has W(N - 1) - 1 of them, the n-grams
G(N - 1), together (N - 2) + (W - 1 + G)(N - 1).

Nothing here decides what is emitted: the engine verifies the tree as any other.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engines.errors import UsageError
from engines.trees import MAX_DEPTH

__all__ = ["Lookahead", "LookaheadSizeError", "TreeProposal", "lookahead_depth", "lookahead_size"]

MAX_SIZE = 1024  # draft tokens a step: far beyond what pays, and a bound on memory

Gram = tuple[int, ...]


class LookaheadSizeError(UsageError):
    """The window, the n-grams or the number of guesses have a size that cannot work."""

    rule = "lookahead.size"
    remedy_text = "Choose smaller or larger sizes; window 4, ngram 3, guesses 4 make 15 draft tokens."


def lookahead_depth(window: int, ngram: int) -> int:
    """Levels of the largest tree: N - 1 of the n-grams, W + N - 3 of the window."""
    return max(ngram - 1, window + ngram - 3)


def lookahead_size(window: int, ngram: int, guesses: int) -> int:
    """Draft tokens of the largest tree: (N - 2) + (W - 1 + G)(N - 1), and none for N = 1.

    Raises:
        LookaheadSizeError: a size is below 1, or the tree has more than 1024 draft tokens or 32 levels.
    """
    for name, value in (("window", window), ("ngram", ngram), ("guesses", guesses)):
        if value < 1:
            raise LookaheadSizeError(f"{name} = {value}", place=name, allowed="1 or more")
    size = 0 if ngram == 1 else ngram - 2 + (window - 1 + guesses) * (ngram - 1)
    if size > MAX_SIZE:
        raise LookaheadSizeError(
            f"window {window}, ngram {ngram}, guesses {guesses}: {size} draft tokens",
            place="lookahead",
            allowed=f"{MAX_SIZE} draft tokens at most",
        )
    depth = lookahead_depth(window, ngram)
    if depth > MAX_DEPTH:
        raise LookaheadSizeError(
            f"window {window}, ngram {ngram}: {depth} levels of draft tokens",
            place="lookahead",
            allowed=f"{MAX_DEPTH} levels at most: W + N - 3",
        )
    return size


@dataclass(frozen=True)
class TreeProposal:
    """A tree of draft tokens.

    Attributes:
        tokens: [n] node i + 1 holds tokens[i]; node 0 is the text's last token.
        parents: [n] the node that entry i hangs at, less than i + 1. Siblings differ.
    """

    tokens: list[int]
    parents: list[int]


@dataclass
class _PrefixTree:
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict)

    def child(self, parent: int, token: int) -> int:
        """The node of `token` below `parent`, made if there is none."""
        node = self._nodes.setdefault((parent, token), len(self.tokens) + 1)
        if node > len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node


class Lookahead:
    """One sequence's window and pool.

    The pool also takes every n-gram of the prompt and the output. It keeps the G used last for each
    first token, so it never holds more than G n-grams per distinct token.

    Args:
        prompt: token ids, at least one; the window starts with random tokens of it.
        window: W, columns.
        ngram: N, tokens of an n-gram, the first of which is not drafted; at least 2.
        guesses: G, n-grams verified a step.
        seed: of the window's first tokens. They change the speed, not the text.

    Raises:
        LookaheadSizeError: as for `lookahead_size`, or N = 1, which drafts nothing.
    """

    def __init__(self, prompt: Sequence[int], window: int, ngram: int, guesses: int, seed: int = 0) -> None:
        lookahead_size(window, ngram, guesses)
        if ngram < 2:
            raise LookaheadSizeError(f"ngram = {ngram}", place="ngram", allowed="2 or more: 1 drafts nothing")
        self._window = window
        self._ngram = ngram
        self._guesses = guesses
        self._pool: dict[int, OrderedDict[Gram, None]] = {}
        self._recent: list[int] = []  # the text's last N - 1 tokens
        # Level 0 lacks column 0, which is the text's last token. It starts with a column more for each
        # missing level; every step drops one and puts a level under the W that remain in the end.
        draw = random.Random(seed)
        self._levels = [[draw.choice(prompt) for _ in range(window + ngram - 3)]]
        self._lowest: list[int] | None = None  # nodes of the last level's columns in the last proposal
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens, and their n-grams to the pool."""
        text = [*self._recent, *tokens]
        for start in range(len(text) - self._ngram + 1):
            self._keep(tuple(text[start : start + self._ngram]))
        self._recent = text[-(self._ngram - 1) :]

    def propose(self, limit: int, levels: int = MAX_DEPTH) -> TreeProposal:
        """Both branches as one tree of at most `limit` draft tokens on at most `levels` levels.

        `lookahead_size` and `lookahead_depth` always suffice. With less room the n-grams come first, and
        the window is left out (and keeps its state) unless all of it fits.
        """
        tree = _PrefixTree()
        for gram in reversed(self._pool.get(self._recent[-1], ())):
            node = 0
            for token in gram[1 : 1 + min(max(limit - len(tree.tokens), 0), levels)]:
                node = tree.child(node, token)
        self._lowest = None
        deep = len(self._levels[0]) + len(self._levels) - 1
        if deep <= levels and len(tree.tokens) + sum(len(level) for level in self._levels) <= limit:
            self._lowest = self._add_window(tree)
        return TreeProposal(tree.tokens, tree.parents)

    def observe(self, choice: Sequence[int] | npt.NDArray[np.int64], emitted: Sequence[int]) -> None:
        """Learn from the step that verified the last proposal.

        However many tokens were emitted, the window moves on by one column, as the paper's does: its
        rows are guesses that the next iteration corrects at their new places.

        Args:
            choice: [n + 1] the target's token behind every node; entry 0: behind the root.
            emitted: the step's tokens, at least one.
        """
        if self._lowest is not None:
            self._iterate([int(choice[node]) for node in self._lowest])
            self._lowest = None
        self.extend(emitted)

    def _add_window(self, tree: _PrefixTree) -> list[int]:
        nodes = [0]
        for token in self._levels[0]:
            nodes.append(tree.child(nodes[-1], token))
        nodes = nodes[-self._window :]
        for level in self._levels[1:]:
            nodes = [tree.child(node, token) for node, token in zip(nodes, level, strict=True)]
        return nodes

    def _iterate(self, answers: list[int]) -> None:
        """One Jacobi iteration: `answers` are the target's tokens below the last level's columns."""
        first = [self._recent[-1], *self._levels[0]]
        if len(self._levels) == self._ngram - 1:
            for gram in zip(first, *self._levels[1:], answers, strict=True):
                self._keep(gram)
            # Level l + 1 stood one place further on than level l: it is what level l now continues with.
            below = [*self._levels[1:], answers]
            self._levels = [below[0][1:], *below[1:]]
        else:
            self._levels = [self._levels[0][1:], *self._levels[1:], answers]

    def _keep(self, gram: Gram) -> None:
        grams = self._pool.setdefault(gram[0], OrderedDict())
        grams[gram] = None
        grams.move_to_end(gram)
        if len(grams) > self._guesses:
            grams.popitem(last=False)
