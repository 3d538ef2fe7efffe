"""Sampling parameters, the exponential, filters and draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engines.errors import UsageError
from engines.sampling import EXP_FLOOR, SamplingParams, SamplingRangeError, draw, exponential, row_weights

SCALE = 2**30


def weights_of(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The integer weights of one row."""
    return row_weights(
        np.array(logits, np.float32)[None, None],
        np.array([temperature], np.float32),
        np.array([top_k], np.int64),
        np.array([top_p], np.float32),
    )[0, 0]


def kept(logits, **filters):
    return np.flatnonzero(weights_of(logits, **filters)).tolist()


def logits_for(*probabilities):
    return [math.log(p) for p in probabilities]


# -- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.001},
        {"temperature": 1000.0, "top_k": 2**31 - 1, "top_p": 1e-9, "seed": 2**64 - 1},
    ],
)
def test_parameters_in_range(values):
    params = SamplingParams(**values)
    assert all(getattr(params, name) == value for name, value in values.items())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-4),
        ("temperature", 1001.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_parameters_out_of_range(name, value):
    with pytest.raises(SamplingRangeError) as caught:
        SamplingParams(**{name: value})
    error = caught.value
    assert isinstance(error, UsageError)
    assert error.rule == "sampling.out-of-range"
    assert error.place == name
    assert str(value) in error.found
    assert error.allowed
    assert error.remedy


# -- the exponential ------------------------------------------------------------------------------


def test_exponential_accuracy_and_monotony():
    x = np.linspace(EXP_FLOOR, 0, 1_000_001).astype(np.float32)
    e = exponential(x)
    assert e.dtype == np.float32
    assert np.abs(e / np.exp(x.astype(np.float64)) - 1).max() < 8e-6
    assert (np.diff(e) >= 0).all()
    assert e[-1] == 1


def test_exponential_far_below_weighs_nothing():
    x = np.array([-np.inf, -1e30, EXP_FLOOR, -20.0], np.float32)
    e = exponential(x)
    assert e[0] == e[1] == e[2]
    assert (e * 2.0**30).astype(np.int64).tolist() == [0, 0, 0, 2]


# -- weights and filters --------------------------------------------------------------------------


def test_weights_are_softmax_numerators():
    logits = [1.0, 3.0, 2.0, -40.0]
    weights = weights_of(logits)
    assert weights.dtype == np.int64
    assert weights[1] == SCALE
    assert weights[3] == 0
    assert weights[:3] == pytest.approx(SCALE * np.exp(np.array(logits[:3]) - 3), rel=1e-5)


def test_temperature_divides():
    assert weights_of([0.0, 2.0], temperature=2.0).tolist() == weights_of([0.0, 1.0]).tolist()
    assert weights_of([0.0, 2.0], temperature=0.001).tolist() == [0, SCALE]
    assert weights_of([0.0, 2.0], temperature=0.0).tolist() == weights_of([0.0, 2.0]).tolist()


def test_extreme_logits_do_not_warn():
    assert weights_of([1e30, -1e30], temperature=0.001).tolist() == [SCALE, 0]


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [
        (0, [0, 1, 2, 3, 4]),
        (1, [1]),
        (2, [1, 2, 4]),  # tokens 2 and 4 tie for the second place
        (3, [1, 2, 4]),
        (4, [0, 1, 2, 4]),
        (5, [0, 1, 2, 3, 4]),
        (6, [0, 1, 2, 3, 4]),
        (10**9, [0, 1, 2, 3, 4]),
    ],
)
def test_top_k(top_k, expected):
    assert kept([1.0, 3.0, 2.0, 0.0, 2.0], top_k=top_k) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1.0, [0, 1, 2, 3]),
        (1e-30, [2]),  # the most likely token always stays
        (0.49, [2]),
        (0.51, [1, 2]),
        (0.74, [1, 2]),
        (0.76, [0, 1, 2, 3]),  # 0 and 3 tie: both stay
        (0.999, [0, 1, 2, 3]),
    ],
)
def test_top_p(top_p, expected):
    assert kept(logits_for(0.125, 0.25, 0.5, 0.125), top_p=top_p) == expected


def test_top_p_one_is_off_even_where_the_tail_is_lost_in_rounding():
    logits = [0.0, *[-20.5] * 3]  # the tail weighs 1 each: f32(2^30 + 1) is f32(2^30)
    assert kept(logits, top_p=1.0) == [0, 1, 2, 3]
    assert kept(logits, top_p=np.nextafter(np.float32(1), np.float32(0))) == [0]


def test_top_p_applies_to_what_top_k_kept():
    logits = logits_for(0.4, 0.3, 0.2, 0.1)
    assert kept(logits, top_p=0.65) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.65) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.55) == [0]  # 0.4 of 0.7 is 0.57


def test_sequences_of_a_batch_have_their_own_filters():
    logits = np.tile(np.array(logits_for(0.4, 0.3, 0.2, 0.1), np.float32), (3, 2, 1))
    weights = row_weights(
        logits, np.ones(3, np.float32), np.array([0, 1, 0]), np.array([1, 1, 0.5], np.float32)
    )
    assert [(row > 0).sum() for row in weights[:, 0]] == [4, 1, 2]
    assert (weights[:, 0] == weights[:, 1]).all()


@given(
    hnp.arrays(np.float32, st.integers(1, 30), elements=st.integers(-8, 8).map(lambda i: i / 2)),
    st.integers(0, 32),
    st.integers(1, 64).map(lambda i: i / 64),
)
def test_filters_against_the_textbook(logits, top_k, top_p):
    """Sorting by probability in double precision; top-p cuts that lie within rounding are left out."""
    probabilities = np.exp(logits.astype(np.float64))
    expected = np.ones(len(logits), bool)
    if top_k:
        expected &= probabilities >= np.sort(probabilities)[::-1][min(top_k, len(logits)) - 1]
    nucleus = np.where(expected, probabilities, 0) / probabilities[expected].sum()
    if top_p < 1:
        heavier = np.array([nucleus[nucleus > p].sum() for p in nucleus])
        if (abs(heavier - top_p) < 1e-4).any():
            return
        # Of equals, the first that fits keeps the others.
        expected &= heavier < top_p
    assert kept(logits, top_k=top_k, top_p=top_p) == np.flatnonzero(expected).tolist()


# -- drawing --------------------------------------------------------------------------------------


def test_draw_by_hand():
    weights = np.array([0, 4, 0, 8, 4, 0], np.int64)  # a quarter, a half, a quarter
    u = np.array([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1 - 2**-24], np.float32)
    assert draw(np.tile(weights, (7, 1)), u).tolist() == [1, 1, 3, 3, 3, 4, 4]


def test_draw_stays_inside_where_rounding_reaches_the_sum():
    weights = np.array([2**24 + 1, 1, 0], np.int64)
    largest = np.float32(1 - 2**-24)
    assert draw(weights, largest) == 0
    assert draw(np.array([0, 2**40 + 1, 0], np.int64), largest) == 1
    huge = np.full(49152, SCALE, np.int64)
    assert draw(huge, largest) == 49151


@given(
    hnp.arrays(np.int64, st.integers(1, 20), elements=st.sampled_from([0, 1, 5, SCALE])),
    st.integers(0, 2**24 - 1),
)
def test_drawn_tokens_have_weight(weights, k):
    if weights.any():
        assert weights[draw(weights, np.float32(k / 2**24))] > 0


def test_draw_frequencies():
    weights = np.array([1, 2, 0, 5], np.int64) * SCALE
    u = (np.arange(8000) / 8000).astype(np.float32)
    tokens = draw(np.tile(weights, (8000, 1)), u)
    assert np.bincount(tokens, minlength=4).tolist() == [1000, 2000, 0, 5000]
