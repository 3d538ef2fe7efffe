"""Lookahead with a target made of arithmetic: the text stays the target's, the window is the paper's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from engines.drafting.lookahead import (
    Lookahead,
    LookaheadSizeError,
    TreeProposal,
    lookahead_depth,
    lookahead_size,
)
from engines.errors import UsageError
from engines.trees import MAX_DEPTH

Target = Callable[[Sequence[int]], int]  # the greedy next token behind a text

SIZES = st.tuples(st.integers(1, 6), st.integers(2, 5), st.integers(1, 6))
PROMPTS = st.lists(st.integers(0, 19), min_size=1, max_size=12)


def arithmetic(symbols: int, memory: int, salt: int) -> Target:
    """The next token is a fixed jumble of the last `memory` tokens."""

    def target(text: Sequence[int]) -> int:
        value = salt
        for token in text[-memory:]:
            value = (value * 31 + token * 17 + 7) % 10007
        return value % symbols

    return target


TARGETS = st.builds(arithmetic, st.integers(2, 20), st.integers(1, 3), st.integers(0, 999))


def plain(target: Target, prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(target(text))
    return text[len(prompt) :]


def path(tree: TreeProposal, node: int) -> list[int]:
    """Tokens from below the root down to a node."""
    tokens: list[int] = []
    while node > 0:
        tokens.append(tree.tokens[node - 1])
        node = tree.parents[node - 1]
    return tokens[::-1]


def choices(target: Target, text: Sequence[int], tree: TreeProposal) -> np.ndarray:
    return np.array([target([*text, *path(tree, node)]) for node in range(len(tree.tokens) + 1)], np.int64)


def verified(tree: TreeProposal, choice: np.ndarray) -> list[int]:
    """What the engine's greedy verification emits: follow the choices as far as the tree does."""
    emitted, node = [], 0
    while True:
        token = int(choice[node])
        emitted.append(token)
        below = [i + 1 for i, parent in enumerate(tree.parents) if (parent, tree.tokens[i]) == (node, token)]
        if not below:
            return emitted
        (node,) = below  # siblings differ


def checked(tree: TreeProposal, limit: int) -> TreeProposal:
    assert len(tree.tokens) == len(tree.parents) <= limit
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents, 1))
    siblings = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(siblings)) == len(siblings)
    return tree


def generate(
    target: Target, prompt: list[int], drafter: Lookahead, count: int, limit: int
) -> list[list[int]]:
    """Emitted tokens by step."""
    text, steps = list(prompt), []
    while len(text) < len(prompt) + count:
        tree = checked(drafter.propose(limit), limit)
        choice = choices(target, text, tree)
        emitted = verified(tree, choice)
        drafter.observe(choice, emitted)
        text += emitted
        steps.append(emitted)
    return steps


# -- losslessness and gain ------------------------------------------------------------------------


@settings(deadline=None)
@given(TARGETS, PROMPTS, SIZES, st.integers(0, 99), st.integers(0, 40))
def test_text_is_that_of_plain_decoding(
    target: Target, prompt: list[int], size: tuple[int, int, int], seed: int, limit: int
) -> None:
    steps = generate(target, prompt, Lookahead(prompt, *size, seed=seed), 30, limit)
    emitted = [token for step in steps for token in step]
    assert emitted == plain(target, prompt, len(emitted))


def test_repetitive_text_takes_far_fewer_steps() -> None:
    cycle = [3, 1, 4, 1, 5, 9, 2, 6]
    prompt = [0]

    def target(text: Sequence[int]) -> int:
        return cycle[(len(text) - len(prompt)) % len(cycle)]

    steps = generate(target, prompt, Lookahead(prompt, 4, 4, 4), 200, lookahead_size(4, 4, 4))
    assert len(steps) < 200 / 3
    assert max(map(len, steps)) >= 4  # a whole n-gram behind the last token, and the bonus token


def counting(text: Sequence[int]) -> int:
    """Never repeats within a hundred tokens: only guesses about what is to come can help."""
    return (text[-1] + 1) % 100


def test_grams_of_the_window_are_accepted() -> None:
    drafter = Lookahead([50, 0], 5, 3, 5)
    steps = generate(counting, [50, 0], drafter, 99, lookahead_size(5, 3, 5))
    assert len(steps) < 80  # the columns that began with 50 went ahead of the text


def test_without_its_window_only_old_text_helps() -> None:
    """The counterpart: the same text, with room for the n-grams but never for the window."""
    drafter = Lookahead([50, 0], 5, 3, 5)
    levels = [list(level) for level in drafter._levels]
    assert len(generate(counting, [50, 0], drafter, 99, limit=4)) == 99
    assert drafter._levels == levels


def test_the_seed_changes_the_window_only() -> None:
    prompt = list(range(50))
    first, second = (Lookahead(prompt, 6, 3, 2, seed=seed) for seed in (1, 2))
    assert first._levels != second._levels
    assert first._levels == Lookahead(prompt, 6, 3, 2, seed=1)._levels
    assert first._pool == second._pool


# -- the window, against the paper ----------------------------------------------------------------


def naive_window(
    target: Target, text: list[int], moves: list[int], first_level: list[int], columns: int, ngram: int
) -> tuple[list[list[list[int]]], list[list[tuple[int, ...]]]]:
    """Lookahead as the paper draws it: rows of a table, each token with its distance from the current one.

    A token sees what is drawn before it: of the first row the columns up to its own, of its own column
    the rows above. While rows are missing there are more columns; only the last W stay in the end.
    Returns the rows and the n-grams of each step.
    """
    rows = [list(first_level)]  # without column 0, the current token
    history, grams = [], []
    at = 0
    for moved in moves:
        current = text[: len(text) - sum(moves) + at]
        answers = []
        for column in range(len(rows[0]) + 1):
            seen = {0: current[-1]}
            seen.update({c: rows[0][c - 1] for c in range(1, column + 1)})
            seen.update({column + level: row[column] for level, row in enumerate(rows[1:], 1)})
            assert sorted(seen) == list(range(column + len(rows)))  # distances without a gap
            answers.append(target([*current, *(seen[i] for i in range(1, len(seen)))]))
        found = []
        if len(rows) == ngram - 1:
            for column in range(columns):
                top = current[-1] if column == 0 else rows[0][column - 1]
                found.append((top, *(row[column] for row in rows[1:]), answers[column]))
            rows = [*rows[1:], answers]
            rows[0] = rows[0][1:]
        else:
            rows = [row[1:] for row in rows] + [answers[1:]]
        history.append([list(rows[0]), *(row[-columns:] for row in rows[1:])])
        grams.append(found)
        at += moved
    return history, grams


@settings(deadline=None)
@given(TARGETS, PROMPTS, SIZES)
def test_the_window_evolves_as_in_the_paper(
    target: Target, prompt: list[int], size: tuple[int, int, int]
) -> None:
    columns, ngram, _ = size
    drafter = Lookahead(prompt, *size)
    first_level = list(drafter._levels[0])
    kept: list[tuple[int, ...]] = []
    keep = drafter._keep
    drafter._keep = lambda gram: (kept.append(gram), keep(gram))[1]  # type: ignore[method-assign]
    text, history, grams, moves = list(prompt), [], [], []
    for _ in range(12):
        tree = drafter.propose(lookahead_size(*size))
        choice = choices(target, text, tree)
        emitted = verified(tree, choice)
        kept.clear()
        drafter.observe(choice, emitted)
        text += emitted
        from_text = [tuple(text[i - ngram : i]) for i in range(len(text) - len(emitted) + 1, len(text) + 1)]
        from_text = [gram for gram in from_text if len(gram) == ngram]
        history.append([list(level) for level in drafter._levels])
        grams.append(kept[: len(kept) - len(from_text)])
        assert kept[len(kept) - len(from_text) :] == from_text
        moves.append(len(emitted))
    assert (history, grams) == naive_window(target, text, moves, first_level, columns, ngram)
    assert [len(level) for level in drafter._levels] == [columns - 1] + [columns] * (ngram - 2)


@given(PROMPTS, SIZES)
def test_window_nodes_stand_at_their_distance(prompt: list[int], size: tuple[int, int, int]) -> None:
    """Column w of level l: depth w + l; ancestors: level 0 up to column w, column w up to level l."""
    window, ngram, guesses = size
    drafter = Lookahead([1], window, ngram, guesses)
    fresh = iter(range(100, 1000))  # distinct tokens: nothing merges, every node is one place of the window
    drafter._levels = [[next(fresh) for _ in range(window - 1)]]
    drafter._levels += [[next(fresh) for _ in range(window)] for _ in range(ngram - 2)]
    tree = drafter.propose(lookahead_size(*size))
    assert len(tree.tokens) == window * (ngram - 1) - 1
    level0 = [None, *drafter._levels[0]]
    for w in range(window):
        for depth, level in enumerate([level0, *drafter._levels[1:]]):
            if level[w] is None:
                continue
            node = tree.tokens.index(level[w]) + 1
            above = [*level0[1 : w + 1], *(drafter._levels[i][w] for i in range(1, depth + 1))]
            assert path(tree, node) == above
            assert len(above) == w + depth


# -- the tree and the pool ------------------------------------------------------------------------


def test_guesses_come_latest_first_and_share_prefixes() -> None:
    drafter = Lookahead([9, 1, 2, 8, 9, 1, 3, 8, 9, 4, 5, 8, 9], 1, 3, 3)
    tree = drafter.propose(100)
    assert tree.tokens[:5] == [4, 5, 1, 3, 2]
    assert tree.parents[:5] == [0, 1, 0, 3, 3]


def test_the_pool_keeps_the_latest_per_first_token() -> None:
    text = [token for i in range(40) for token in (7, i + 10, i + 11)]
    drafter = Lookahead(text, 2, 3, 4)
    assert list(drafter._pool[7]) == [(7, i + 10, i + 11) for i in range(36, 40)]
    drafter.extend([7, 46, 47])  # used again: the next newcomer pushes out another
    drafter.extend([7, 99, 98])
    assert list(drafter._pool[7]) == [(7, 48, 49), (7, 49, 50), (7, 46, 47), (7, 99, 98)]


@settings(deadline=None)
@given(TARGETS, PROMPTS, SIZES)
def test_pool_and_tree_are_bounded(target: Target, prompt: list[int], size: tuple[int, int, int]) -> None:
    """The formula's size suffices from the first step on: the window always runs."""
    drafter = Lookahead(prompt, *size)
    generate(target, prompt, drafter, 60, lookahead_size(*size))
    assert len(drafter._levels) == size[1] - 1
    for first, grams in drafter._pool.items():
        assert 1 <= len(grams) <= size[2]
        assert all(len(gram) == size[1] and gram[0] == first for gram in grams)


def test_the_largest_tree_has_the_formulas_size() -> None:
    """Reached when nothing merges: G full n-grams and a full window, all tokens distinct."""
    window, ngram, guesses = 4, 3, 4
    prompt = [token for i in range(guesses) for token in (7, 10 + 2 * i, 11 + 2 * i)] + [7]
    drafter = Lookahead(prompt, window, ngram, guesses)
    drafter._levels = [[100, 101, 102], [103, 104, 105, 106]]
    assert len(drafter.propose(99).tokens) == lookahead_size(window, ngram, guesses) == 15
    assert len(drafter.propose(14).tokens) == guesses * (ngram - 1)  # the window is all or nothing
    assert drafter.propose(3).tokens == [16, 17, 14]  # the latest n-gram, and half of the one before
    assert drafter.propose(0).tokens == []
    assert drafter.propose(99, 1).tokens == [16, 14, 12, 10]  # no room for the window's levels


@settings(deadline=None)
@given(TARGETS, PROMPTS, SIZES, st.integers(0, 9))
def test_no_tree_is_deeper_than_said(
    target: Target, prompt: list[int], size: tuple[int, int, int], levels: int
) -> None:
    drafter, text = Lookahead(prompt, *size), list(prompt)
    for most in (MAX_DEPTH, levels) * 6:
        tree = drafter.propose(lookahead_size(*size), most)
        assert max((len(path(tree, n + 1)) for n in range(len(tree.tokens))), default=0) <= min(
            most, lookahead_depth(*size[:2])
        )
        choice = choices(target, text, tree)
        emitted = verified(tree, choice)
        drafter.observe(choice, emitted)
        text += emitted
    assert text[len(prompt) :] == plain(target, prompt, len(text) - len(prompt))


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "tokens"),
    [((7, 7, 7), 83), ((4, 3, 4), 15), ((1, 2, 1), 1), ((5, 1, 5), 0), ((1, 1, 1), 0), ((10, 2, 3), 12)],
)
def test_size_formula(size: tuple[int, int, int], tokens: int) -> None:
    assert lookahead_size(*size) == tokens


@pytest.mark.parametrize(
    "size",
    [(0, 3, 4), (4, 0, 4), (4, 3, 0), (-1, 3, 4), (10**9, 3, 4), (4, 3, 10**12), (33, 3, 1), (1, 34, 1)],
)
def test_sizes_that_cannot_work_are_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(LookaheadSizeError, match=r"\[lookahead.size\]") as caught:
        Lookahead([1], *size)
    assert isinstance(caught.value, UsageError)
    assert caught.value.allowed


def test_unigrams_draft_nothing() -> None:
    with pytest.raises(LookaheadSizeError, match="2 or more"):
        Lookahead([1], 4, 1, 4)


def test_random_choice_of_the_first_window_comes_from_the_prompt() -> None:
    prompt = random.Random(0).sample(range(1000), 10)
    drafter = Lookahead(prompt, 7, 4, 2)
    assert len(drafter._levels) == 1
    assert len(drafter._levels[0]) == 7 - 1 + 4 - 2
    assert set(drafter._levels[0]) <= set(prompt)
