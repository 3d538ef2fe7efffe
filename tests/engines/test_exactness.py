"""The margin rule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.exactness import TOLERANCES, Divergence, compare_greedy

TOKENS = st.lists(st.integers(0, 3), max_size=8)


def never(position: int) -> float:
    raise AssertionError(f"the gap at {position} was asked for")


def test_equal_runs_need_no_gap():
    assert compare_greedy([1, 2, 3], [1, 2, 3], never, 1e-3) is None
    assert compare_greedy([], [], never, 1e-3) is None


@pytest.mark.parametrize(("gap", "allowed"), [(0.0, True), (0.0009, True), (0.001, False), (2.0, False)])
def test_a_flip_is_allowed_below_the_tolerance(gap, allowed):
    gaps = {1: gap}
    divergence = compare_greedy([1, 2, 3], [1, 5, 6], gaps.__getitem__, 0.001)
    assert divergence == Divergence(1, 2, 5, gap, allowed)


def test_a_gap_that_is_not_a_number_allows_nothing():
    divergence = compare_greedy([1], [2], lambda position: math.nan, 1.0)
    assert divergence is not None
    assert not divergence.allowed


@pytest.mark.parametrize(
    ("plain", "speculative", "expected"),
    [
        ([1, 2], [1, 2, 3], Divergence(2, None, 3, 0.5, False)),
        ([1, 2, 3], [1, 2], Divergence(2, 3, None, 0.5, False)),
        ([], [4], Divergence(0, None, 4, 0.5, False)),
        ([4], [], Divergence(0, 4, None, 0.5, False)),
    ],
)
def test_a_length_difference_is_a_divergence(plain, speculative, expected):
    assert compare_greedy(plain, speculative, lambda position: 0.5, 0.001) == expected


@given(TOKENS, TOKENS)
def test_first_difference(plain, speculative):
    divergence = compare_greedy(plain, speculative, lambda position: float(position), 0.5)
    if divergence is None:
        assert plain == speculative
    else:
        i = divergence.position
        assert plain[:i] == speculative[:i]
        assert plain[i : i + 1] != speculative[i : i + 1]
        assert divergence.gap == i
        assert divergence.allowed == (i == 0)


def test_tolerances_grow_as_precision_shrinks():
    assert 0 < TOLERANCES["F32"] < TOLERANCES["F16"] < TOLERANCES["BF16"] < 1
