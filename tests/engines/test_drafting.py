"""n-gram proposals and adaptive draft length."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engines.drafting.adaptive import DraftLength, step_cost_at
from engines.drafting.ngram import NgramIndex

CURVE = [1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4]


def index(tokens: list[int], low: int = 1, high: int = 4) -> NgramIndex:
    made = NgramIndex(low, high)
    made.extend(tokens)
    return made


def test_longest_match_wins_over_a_more_recent_short_one() -> None:
    proposal = index([1, 2, 3, 9, 9, 3, 7, 1, 2, 3]).propose(2)
    assert (proposal.tokens, proposal.match) == ([9, 9], 3)


def test_most_recent_of_equal_matches_wins() -> None:
    assert index([5, 1, 5, 2, 5]).propose(1).tokens == [2]


def test_a_match_that_touches_the_end_repeats_itself() -> None:
    assert index([4, 8, 4, 8, 4, 8]).propose(5).tokens == [4, 8, 4, 8, 4]
    assert index([7, 7]).propose(3).tokens == [7, 7, 7]


def test_nothing_matches() -> None:
    assert index([1, 2, 3]).propose(4).match == 0
    assert index([1, 2, 1], low=2).propose(4).tokens == []
    assert index([]).propose(4).tokens == []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6), st.integers(1, 3), st.integers(3, 5))
def test_proposals_continue_an_earlier_occurrence(tokens: list[int], limit: int, low: int, high: int) -> None:
    proposal = index(tokens, low, high).propose(limit)
    if proposal.match == 0:
        for size in range(low, min(high, len(tokens) - 1) + 1):
            suffix = tokens[-size:]
            starts = [i for i in range(len(tokens) - size) if tokens[i : i + size] == suffix]
            assert not starts
        return
    size = proposal.match
    assert len(proposal.tokens) == limit
    place = max(i for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[-size:]) + size
    text = [*tokens, *proposal.tokens]
    assert proposal.tokens == [text[place + i] for i in range(limit)]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 30))
def test_extending_in_pieces_changes_nothing(tokens: list[int], cut: int) -> None:
    pieces = index(tokens[:cut])
    pieces.extend(tokens[cut:])
    assert pieces.propose(4) == index(tokens).propose(4)


def test_draft_grows_with_success_and_stops_without() -> None:
    policy = DraftLength(CURVE, (0.5,))
    start = policy.choose(1, 8)
    for _ in range(30):
        policy.observe(1, 8, 8)
    assert policy.choose(1, 8) == 8 > start
    for _ in range(60):
        policy.observe(1, 8, 0)
    assert policy.choose(1, 8) == 0


def test_match_lengths_are_learned_apart() -> None:
    policy = DraftLength(CURVE, (0.5, 0.5))
    for _ in range(60):
        policy.observe(1, 4, 0)
    assert policy.choose(1, 8) == 0
    assert policy.choose(2, 8) > 0
    assert policy.choose(7, 8) == policy.choose(2, 8)  # longer matches share the last estimate


def test_a_match_length_that_failed_is_tried_again_later() -> None:
    policy = DraftLength([1.0, 1.3, 1.6, 1.9], (0.5,))
    for _ in range(20):
        policy.observe(1, 3, 0)
    assert policy.choose(1, 3) == 0
    for _ in range(100):
        policy.observe(1, 0, 0)
    assert policy.choose(1, 3) > 0


def test_no_match_no_room_no_draft() -> None:
    policy = DraftLength(CURVE, (0.9,))
    assert policy.choose(0, 8) == 0
    assert policy.choose(1, 0) == 0


def test_drafts_shrink_as_the_batch_grows() -> None:
    """Speculation regresses throughput on busy engines: by the curve, it stops by itself."""
    policy = DraftLength([1.0, 1.01, 1.02, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0], (0.6,))
    lengths = [policy.choose(1, 8, batch) for batch in (1, 2, 4, 32)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 0
    assert lengths[-1] == 0


def test_free_steps_draft_all_and_dear_ones_nothing() -> None:
    assert DraftLength([1.0] * 9, (0.3,)).choose(1, 8) == 8
    assert DraftLength([1.0, 2.0, 3.0], (0.9,)).choose(1, 2) == 0


def test_cost_beyond_the_curve_follows_its_slope() -> None:
    assert step_cost_at(CURVE, 1) == 1.0
    assert step_cost_at(CURVE, 9) == pytest.approx(1.4)
    assert step_cost_at(CURVE, 19) == pytest.approx(1.9)
    assert step_cost_at([1.0], 5) == 1.0
