"""Acceptance arithmetic: worked cases, and laws that hold for all counts."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.acceptance import AcceptanceStats, best_gamma, expected_tokens_per_step, predicted_speedup

STEP = st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
STEPS = st.lists(STEP, max_size=40)
ALPHA = st.floats(0, 1)


def stats_of(steps) -> AcceptanceStats:
    stats = AcceptanceStats.empty(0)
    for drafted, accepted in steps:
        stats.record(drafted, accepted)
    return stats


def test_worked_histogram():
    stats = AcceptanceStats.from_histogram([8, 0, 6, 6])
    assert (stats.steps, stats.accepted, stats.drafted, stats.rejections) == (20, 30, 60, 14)
    assert stats.acceptance_rate == 0.5
    assert stats.mean_acceptance_length == 2.5
    assert stats.unconditional == [0.6, 0.6, 0.3]
    assert stats.conditional == [0.6, 1.0, 0.5]
    assert stats.conditional_rate == 30 / 44
    assert stats.histogram == [8, 0, 6, 6]


def test_worked_ragged_steps():
    stats = stats_of([(0, 0), (2, 2), (3, 1), (1, 0), (3, 3)])
    assert stats.steps == 5
    assert stats.drafted_at == [4, 3, 2]
    assert stats.tried_at == [4, 3, 1]
    assert stats.accepted_at == [3, 2, 1]
    assert stats.acceptance_rate == 6 / 9
    assert stats.mean_acceptance_length == 11 / 5
    assert stats.unconditional == [3 / 4, 2 / 3, 1 / 2]
    assert stats.conditional == [3 / 4, 2 / 3, 1.0]
    assert stats.rejections == 2
    assert stats.conditional_rate == 6 / 8
    assert stats.histogram == [2, 1, 1, 1]


def test_nothing_counted():
    stats = AcceptanceStats.empty(2)
    assert math.isnan(stats.acceptance_rate)
    assert math.isnan(stats.mean_acceptance_length)
    assert math.isnan(stats.conditional_rate)
    as_dict = stats.to_dict()
    assert as_dict["acceptance_rate"] is None
    assert as_dict["unconditional"] == [None, None]
    json.dumps(as_dict, allow_nan=False)


def test_plain_steps_emit_one_token_each():
    stats = stats_of([(0, 0)] * 3)
    assert stats.mean_acceptance_length == 1
    assert math.isnan(stats.acceptance_rate)


@pytest.mark.parametrize(("drafted", "accepted"), [(1, 2), (0, 1), (3, -1)])
def test_impossible_steps_are_refused(drafted, accepted):
    with pytest.raises(ValueError, match="accepted"):
        AcceptanceStats.empty(3).record(drafted, accepted)


@given(STEPS)
def test_totals(steps):
    stats = stats_of(steps)
    assert stats.steps == len(steps)
    assert stats.drafted == sum(d for d, _ in steps)
    assert stats.accepted == sum(a for _, a in steps)
    assert stats.rejections == sum(a < d for d, a in steps)
    assert sum(stats.histogram) == len(steps)
    assert stats.histogram == [sum(a == i for _, a in steps) for i in range(len(stats.histogram))]
    assert stats.steps == 0 or stats.mean_acceptance_length * len(steps) == pytest.approx(
        sum(a + 1 for _, a in steps)
    )


@given(STEPS)
def test_rates_against_counting(steps):
    stats = stats_of(steps)
    for i in range(len(stats.drafted_at)):
        drafted = [a for d, a in steps if d > i]
        tried = [a for a in drafted if a >= i]
        if drafted:
            assert stats.unconditional[i] == sum(a > i for a in drafted) / len(drafted)
        if tried:
            assert stats.conditional[i] == sum(a > i for a in tried) / len(tried)


@given(STEPS, STEPS)
def test_merge_is_counting_together(first, second):
    one, two = stats_of(first), stats_of(second)
    before = json.dumps(one.to_dict())
    assert one.merge(two) == stats_of(first + second)
    assert json.dumps(one.to_dict()) == before


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_histogram_round_trip(histogram):
    assert AcceptanceStats.from_histogram(histogram).histogram == histogram


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8))
def test_conditional_multiplies_up_to_unconditional(histogram):
    stats = AcceptanceStats.from_histogram(histogram)
    product = 1.0
    for conditional, unconditional in zip(stats.conditional, stats.unconditional, strict=True):
        if math.isnan(conditional):
            break
        product *= conditional
        assert product == pytest.approx(unconditional)


def test_expected_tokens_by_hand():
    assert expected_tokens_per_step(0.5, 2) == 1.75
    assert expected_tokens_per_step(0.0, 5) == 1
    assert expected_tokens_per_step(1.0, 5) == 6
    assert expected_tokens_per_step(0.8, 0) == 1


@given(st.floats(0, 0.99), st.integers(0, 16))
def test_expected_tokens_closed_form(alpha, gamma):
    assert expected_tokens_per_step(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


@given(ALPHA, st.integers(0, 16))
def test_expected_tokens_bounds(alpha, gamma):
    expected = expected_tokens_per_step(alpha, gamma)
    assert 1 <= expected <= gamma + 1
    assert expected <= expected_tokens_per_step(alpha, gamma + 1)


@pytest.mark.parametrize(("alpha", "gamma"), [(-0.1, 1), (1.1, 1), (math.nan, 1), (0.5, -1)])
def test_expected_tokens_out_of_range(alpha, gamma):
    with pytest.raises(ValueError, match=r"α|γ"):
        expected_tokens_per_step(alpha, gamma)


def test_predicted_speedup_by_hand():
    assert predicted_speedup(0.5, 2, draft_cost=0.125, verify_cost=1.0) == 1.4
    assert predicted_speedup(0.5, 2, draft_cost=0.0) == 1.75
    assert predicted_speedup(0.9, 0, draft_cost=0.3) == 1.0


@given(
    ALPHA,
    st.floats(0.01, 1),
    st.floats(0, 0.5),
    st.integers(0, 12),
)
def test_best_gamma_is_the_best(alpha, draft_cost, slope, limit):
    def cost(gamma: int) -> float:
        return 1 + gamma * (draft_cost + slope)

    best = best_gamma(alpha, cost, limit)
    values = [expected_tokens_per_step(alpha, g) / cost(g) for g in range(limit + 1)]
    assert values[best] == max(values)
    assert max(values) not in values[:best]


def test_best_gamma_extremes():
    assert best_gamma(0.0, lambda g: 1 + 0.1 * g, 8) == 0
    assert best_gamma(1.0, lambda g: 1 + 0.1 * g, 8) == 8
    assert best_gamma(0.7, lambda g: 1.0, 0) == 0
    assert best_gamma(0.0, lambda g: 1.0, 8) == 0  # a tie: the shorter


def test_simulated_chain_recovers_alpha():
    """α in, counts of an ideal chain through, α out."""
    alpha, gamma, steps = 0.7, 4, 10**6
    histogram = [round(steps * alpha**i * (1 - alpha)) for i in range(gamma)]
    histogram.append(steps - sum(histogram))
    stats = AcceptanceStats.from_histogram(histogram)
    assert stats.conditional_rate == pytest.approx(alpha, abs=1e-5)
    assert stats.mean_acceptance_length == pytest.approx(expected_tokens_per_step(alpha, gamma), abs=1e-5)
