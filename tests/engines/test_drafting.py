"""Adaptive draft length."""

from __future__ import annotations

import pytest

from engines.drafting.adaptive import MATCH_PRIOR, DraftLength, step_cost_at

CURVE = [1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4]


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


def test_longer_matches_start_with_longer_drafts() -> None:
    policy = DraftLength(CURVE)
    lengths = [policy.choose(match, 8) for match in range(1, 20)]
    assert lengths == sorted(lengths)
    assert 0 < lengths[0] < lengths[-1] == 8
    assert len(set(lengths[len(MATCH_PRIOR) - 1 :])) == 1


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


def test_what_follows_the_first_rejection_teaches_nothing() -> None:
    short, long = DraftLength(CURVE, (0.6,)), DraftLength(CURVE, (0.6,))
    for accepted in (3, 0, 2, 1):
        short.observe(1, accepted + 1, accepted)
        long.observe(1, 8, accepted)
        assert [short.choose(1, limit) for limit in range(9)] == [long.choose(1, limit) for limit in range(9)]
    assert 0 < short.choose(1, 8) < 8
