"""The suffix automaton against a search through the whole text, and how it grows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engines.drafting import suffix_automaton
from engines.drafting.suffix_automaton import Proposal, SuffixAutomaton

# At most 60 tokens: even a run of one token has no more nested repeats than are kept exact.
TEXTS = st.integers(1, 4).flatmap(lambda symbols: st.lists(st.integers(0, symbols - 1), max_size=60))
PERIODIC = st.builds(
    lambda unit, repeats, tail: (unit * repeats + tail)[:60],
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(1, 20),
    st.lists(st.integers(0, 3), max_size=4),
)


def automaton(tokens: list[int], min_match: int = 1) -> SuffixAutomaton:
    made = SuffixAutomaton(min_match)
    made.extend(tokens)
    return made


def occurrences(tokens: list[int], size: int) -> list[int]:
    """Where the last `size` tokens ended before."""
    return [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]


def searched(tokens: list[int], limit: int, min_match: int = 1) -> Proposal:
    for size in range(len(tokens) - 1, min_match - 1, -1):
        if ends := occurrences(tokens, size):
            text = list(tokens)
            for i in range(limit):
                text.append(text[ends[-1] + i])
            return Proposal(text[len(tokens) :], size)
    return Proposal([], 0)


@given(TEXTS | PERIODIC, st.integers(0, 12), st.integers(1, 4))
def test_equals_a_search_for_the_longest_suffix(tokens: list[int], limit: int, min_match: int) -> None:
    grown = SuffixAutomaton(min_match)
    for i, token in enumerate(tokens):
        grown.extend([token])
        assert grown.propose(limit) == searched(tokens[: i + 1], limit, min_match)


@given(TEXTS, st.integers(0, 60))
def test_extending_in_pieces_changes_nothing(tokens: list[int], cut: int) -> None:
    pieces = automaton(tokens[:cut])
    pieces.propose(3)
    pieces.extend([])
    pieces.extend(tokens[cut:])
    assert pieces.propose(4) == automaton(tokens).propose(4)


def test_longest_match_wins_over_a_more_recent_short_one() -> None:
    assert automaton([1, 2, 3, 9, 9, 3, 7, 1, 2, 3]).propose(2) == Proposal([9, 9], 3)


def test_matches_have_no_longest_length() -> None:
    passage = list(range(100))
    proposal = automaton([*passage, 100, 101, 500, *passage]).propose(2)
    assert proposal == Proposal([100, 101], 100)


def test_most_recent_of_equal_matches_wins() -> None:
    assert automaton([5, 1, 5, 2, 5]).propose(1).tokens == [2]


def test_a_match_that_touches_the_end_repeats_itself() -> None:
    assert automaton([4, 8, 4, 8, 4, 8]).propose(5).tokens == [4, 8, 4, 8, 4]
    assert automaton([7, 7]).propose(3).tokens == [7, 7, 7]


def test_nothing_matches() -> None:
    assert automaton([1, 2, 3]).propose(4) == Proposal([], 0)
    assert automaton([1, 2, 1], min_match=2).propose(4) == Proposal([], 0)
    assert automaton([]).propose(4) == Proposal([], 0)
    assert automaton([1, 1]).propose(0) == Proposal([], 1)


class _Counted(list[int]):
    """Suffix links that count how often one is followed."""

    followed = 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.followed += 1
        return super().__getitem__(index)


LONG = 50_000


def _texts() -> Iterator[tuple[str, list[int]]]:
    draw = random.Random(7)
    yield "few symbols", [draw.randrange(4) for _ in range(LONG)]
    yield "many symbols", [draw.randrange(49152) for _ in range(LONG)]
    yield "one symbol", [7] * LONG
    yield "periodic", [i % 13 for i in range(LONG)]
    rising = [0] * LONG  # 1 0 1 1 0 1 1 1 0 …: runs that grow
    place, run = 0, 1
    while place < LONG:
        rising[place : place + run] = [1] * min(run, LONG - place)
        place, run = place + run + 1, run + 1
    yield "growing runs", rising


@pytest.mark.parametrize(("name", "tokens"), list(_texts()), ids=lambda v: v if isinstance(v, str) else "")
def test_long_texts_cost_linear_memory_and_work(name: str, tokens: list[int]) -> None:
    made = SuffixAutomaton()
    links = made._link = _Counted(made._link)
    work = []
    for half in (tokens[: LONG // 2], tokens[LONG // 2 :]):
        before = links.followed
        made.extend(half)
        work.append(links.followed - before)
    assert len(made._next) <= 2 * LONG
    assert sum(map(len, made._next)) <= 3 * LONG
    # Growth follows at most two links a token, amortised; the rest keeps the latest places.
    assert sum(work) <= LONG * (suffix_automaton.MAX_NESTED + 6)
    assert work[1] <= 1.6 * work[0]


def test_deep_nesting_still_continues_the_longest_match() -> None:
    """Beyond the repeats that are kept exact a place may be old; it is never wrong."""
    draw = random.Random(3)
    tokens = [1] * 150
    made = automaton(tokens)
    for _ in range(100):
        token = 1 if draw.random() < 0.95 else draw.randrange(3)
        made.extend([token])
        tokens.append(token)
        proposal = made.propose(1)
        assert not occurrences(tokens, proposal.match + 1)
        if proposal.match:
            followers = {tokens[end] for end in occurrences(tokens, proposal.match)}
            assert proposal.tokens[0] in followers
