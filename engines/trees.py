"""Trees of draft tokens: from the paths that people publish to parents, depths and masks.

Node 0 is the *root*, the last committed token. A *choice* is a path of ranks: (1, 0) is the best
continuation of the second-best token. Nodes are numbered by depth, then by path, so that parents come
first and a tree cut at any depth is a prefix of its nodes.

The named trees are Medusa's, found by search over calibration data for the model that each is named
after (Cai et al. 2024, section 2.3.3; FasterDecoding/Medusa, medusa/model/medusa_choices.py).
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engines.errors import UsageError

__all__ = [
    "MAX_DEPTH",
    "NAMED_TREES",
    "Tree",
    "TreeError",
    "chain",
    "from_choices",
]

Choice = tuple[int, ...]

MAX_RANK = 64  # candidates of a node
MAX_DEPTH = 32  # levels that the engine's tree encoding sees through


class TreeError(UsageError):
    """A tree cannot be what it is said to be."""

    rule = "tree.invalid"
    remedy_text = "Give each node as the path of ranks from the root, for example [[0], [1], [0, 0]]."


class NotPrefixClosedError(TreeError):
    """A node's parent is not in the tree."""

    rule = "tree.not-prefix-closed"
    remedy_text = "Add the missing parent."


class DuplicateNodeError(TreeError):
    """A node stands twice."""

    rule = "tree.duplicate"
    remedy_text = "Remove one of them."


class TooDeepError(TreeError):
    """The tree has more levels than there are heads or draft steps."""

    rule = "tree.too-deep"
    remedy_text = "Choose a shallower tree."


class TooWideError(TreeError):
    """A node has a rank that no list of candidates reaches."""

    rule = "tree.too-wide"
    remedy_text = "Choose smaller ranks."


class TooLargeError(TreeError):
    """The tree has more nodes than a step verifies."""

    rule = "tree.too-large"
    remedy_text = "Choose a smaller tree."


@dataclass(frozen=True)
class Tree:
    """A tree of N draft tokens.

    Attributes:
        parents: of nodes 1 … N; 0 is the root. Parents come first.
        ranks: of nodes 1 … N among their parent's candidates; 0 is the best.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """N, draft tokens."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[N + 1] of each node; the root's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Levels of draft tokens."""
        return max(self.depths)

    @cached_property
    def level_widths(self) -> tuple[int, ...]:
        """[depth] candidates that are needed of each parent on the level above: highest rank + 1."""
        pairs = list(zip(self.depths[1:], self.ranks, strict=True))
        return tuple(1 + max(r for d, r in pairs if d == level) for level in range(1, self.depth + 1))

    @cached_property
    def ancestors(self) -> npt.NDArray[np.bool_]:
        """bool [N + 1, N + 1]: row n sees itself, its ancestors and the root. The attention mask."""
        seen = np.eye(self.size + 1, dtype=np.bool_)
        for node, parent in enumerate(self.parents, 1):
            seen[node] |= seen[parent]
        return seen

    @property
    def is_chain(self) -> bool:
        """Does each node but the last have one child?"""
        return self.parents == tuple(range(self.size))

    @cached_property
    def skips_ranks(self) -> bool:
        """Has a node a child whose better sibling is not in the tree?"""
        return any(
            sorted(self.ranks[child - 1] for child in self.children(node))
            != list(range(len(self.children(node))))
            for node in range(self.size + 1)
        )

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes below a node, in order."""
        return tuple(n for n, parent in enumerate(self.parents, 1) if parent == node)

    def choice(self, node: int) -> Choice:
        """The path of ranks from the root to a node."""
        path: list[int] = []
        while node:
            path.append(self.ranks[node - 1])
            node = self.parents[node - 1]
        return tuple(reversed(path))


def from_choices(choices: Sequence[Sequence[int]], *, max_depth: int, max_nodes: int) -> Tree:
    """The tree of these paths, given in any order.

    Args:
        max_depth: levels that there are heads or draft steps for; never more than MAX_DEPTH.
        max_nodes: draft tokens that a step verifies at most.

    Raises:
        TreeError: no node, or a rank that is no number from 0 on; its subclasses: a missing parent, a
            node that stands twice, too many levels, nodes or candidates.
    """
    if not _is_sequence(choices):
        raise TreeError(reprlib.repr(choices), place="tree", allowed="a list of paths")
    if not choices:
        raise TreeError("no nodes", place="tree", allowed="at least one path")
    if len(choices) > max_nodes:
        raise TooLargeError(f"{len(choices)} nodes", place="tree", allowed=f"at most {max_nodes}")
    known: set[Choice] = set()
    for choice in choices:
        _check(choice, max_depth)
        path = tuple(choice)
        if path in known:
            raise DuplicateNodeError(f"{list(path)} twice", place="tree")
        known.add(path)
    order = sorted(known, key=lambda path: (len(path), path))
    numbers: dict[Choice, int] = {(): 0} | {path: n for n, path in enumerate(order, 1)}
    for path in order:
        if path[:-1] not in numbers:
            raise NotPrefixClosedError(
                f"{list(path)} without its parent",
                place="tree",
                allowed=f"{list(path[:-1])} in the tree, too",
            )
    return Tree(tuple(numbers[p[:-1]] for p in order), tuple(p[-1] for p in order))


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check(choice: Sequence[int], max_depth: int) -> None:
    """Is this a path? Messages quote little of it: it may be anything."""
    if not _is_sequence(choice):
        raise TreeError(reprlib.repr(choice), place="tree", allowed="a path: a list of ranks")
    if not choice:
        raise TreeError("an empty path", place="tree", allowed="the root is not listed")
    if len(choice) > min(max_depth, MAX_DEPTH):
        found = f"{reprlib.repr(choice)}, {len(choice)} levels"
        raise TooDeepError(found, place="tree", allowed=f"at most {min(max_depth, MAX_DEPTH)} levels")
    for rank in choice:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            found = f"{reprlib.repr(rank)} in {reprlib.repr(choice)}"
            raise TreeError(found, place="tree", allowed="ranks 0, 1, 2, …")
        if rank >= MAX_RANK:
            found = f"rank {rank}" if rank < 2**64 else "a rank of more than 64 bits"
            raise TooWideError(found, place="tree", allowed=f"ranks below {MAX_RANK}")


def chain(gamma: int) -> Tree:
    """γ draft tokens in a row."""
    return Tree(tuple(range(gamma)), (0,) * gamma)


def _tree(text: str) -> tuple[Choice, ...]:
    """Paths whose ranks are single digits, parted by blanks."""
    return tuple(tuple(int(digit) for digit in path) for path in text.split())


# 63 nodes each, 4 levels.
NAMED_TREES: dict[str, tuple[Choice, ...]] = {
    "mc_sim_7b_63": _tree(
        "0 1 2 3 4 5 6 7 8 9"
        " 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90"
        " 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200"
        " 0000 0001"
    ),
    "vicuna_7b_stage1": _tree(
        "0 1 2 3 4 5 6 7 8 9"
        " 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 23 30 31 32 40 41 50 51 60 70 80 90"
        " 000 001 002 003 004 005 006 007 008 010 011 012 020 021 030 040 050 100 101 200"
        " 0000"
    ),
    "vicuna_7b_stage2": _tree(
        "0 1 2 3 4 5 6 7 8 9"
        " 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70"
        " 000 001 002 003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 110 200"
        " 0000 0001 0002 0003 0010 0020 0100"
    ),
    "vicuna_13b_stage1": _tree(
        "0 1 2 3 4 5 6 7 8 9"
        " 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 23 30 31 40 41 50 60 70 80"
        " 000 001 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 110 200"
        " 0000"
    ),
    "zephyr_stage2": _tree(
        "0 1 2 3 4 5 6 7 8 9"
        " 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 20 21 22 23 30 31 40 41 50 60 70"
        " 000 001 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101 110 200"
        " 0000 0001 0010"
    ),
}
