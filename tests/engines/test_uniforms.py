"""The generator against its published vectors; uniforms as a function of their key alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.uniforms import ACCEPT, DRAFT, SAMPLE, philox, uniforms

U64 = st.integers(0, 2**64 - 1)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


# Philox4x32-10's known answers, as published with Random123.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter, key, expected):
    result = philox(np.array([words(counter)], np.uint64).T, np.array([words(key)], np.uint64).T)
    assert result[:, 0].tolist() == words(expected)


def test_columns_are_independent():
    counter = np.arange(20, dtype=np.uint64).reshape(4, 5)
    key = np.arange(10, dtype=np.uint64).reshape(2, 5)
    together = philox(counter, key)
    for i in range(5):
        assert (philox(counter[:, i : i + 1], key[:, i : i + 1])[:, 0] == together[:, i]).all()


def one(seed: int, sequence: int, position: int, rows: int) -> np.ndarray:
    return uniforms(
        np.array([seed], np.uint64), np.array([sequence], np.uint64), np.array([position], np.int64), rows
    )[0]


def test_layout_of_key_counter_and_words():
    seed, sequence, position = 0x299F31D0A4093822, 0x0370734413198A2E, 0x05A308D3243F6A88
    counter = words("243f6a88 05a308d3 13198a2e 03707344")
    key = words("a4093822 299f31d0")
    expected = philox(np.array([counter], np.uint64).T, np.array([key], np.uint64).T)[:, 0]
    drawn = one(seed, sequence, position, 1)[0]
    assert (DRAFT, ACCEPT, SAMPLE) == (0, 1, 2)
    assert (drawn.astype(np.float64) * 2**24).tolist() == [int(w) >> 8 for w in expected[:3]]


@given(
    st.lists(st.tuples(U64, U64, st.integers(0, 2**40)), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_batch_mates_do_not_matter(sequences, rows):
    seeds, ids, positions = zip(*sequences, strict=True)
    batch = uniforms(
        np.array(seeds, np.uint64), np.array(ids, np.uint64), np.array(positions, np.int64), rows
    )
    assert batch.shape == (len(sequences), rows, 3)
    assert batch.dtype == np.float32
    for i, (seed, sequence, position) in enumerate(sequences):
        assert (batch[i] == one(seed, sequence, position, rows)).all()


@given(U64, U64, st.integers(0, 2**40), st.integers(1, 9), st.integers(0, 9))
def test_steps_of_any_length_see_the_same_numbers(seed, sequence, position, rows, skip):
    whole = one(seed, sequence, position, skip + rows)
    assert (whole[skip:] == one(seed, sequence, position + skip, rows)).all()


@given(st.tuples(U64, U64, st.integers(0, 2**55)), st.integers(1, 5), st.integers(1, 256))
def test_lanes_do_not_depend_on_their_number(key, rows, lanes):
    seed, sequence, position = (np.array([value]) for value in key)
    drawn = uniforms(seed.astype(np.uint64), sequence.astype(np.uint64), position, rows, lanes=lanes)
    assert drawn.shape == (1, rows, 3 * lanes)
    assert (drawn[0, :, :3] == one(*key, rows)).all()
    most = uniforms(seed.astype(np.uint64), sequence.astype(np.uint64), position, rows, lanes=256)
    assert (drawn == most[..., : 3 * lanes]).all()


def test_lanes_are_independent():
    zero = np.zeros(1, np.uint64)
    drawn = uniforms(zero, zero, np.zeros(1, np.int64), 100_000, lanes=3)[0].astype(np.float64)
    assert abs(np.corrcoef(drawn.T) - np.eye(9)).max() < 0.016  # five standard errors of 1/sqrt(1e5)
    assert len(np.unique(drawn[:4, :])) == 36


def test_range_and_moments():
    drawn = one(7, 0, 0, 100_000).astype(np.float64)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # 300,000 draws: the mean's standard error is 5.3e-4, the variance's 1.4e-4; five of each.
    assert abs(drawn.mean() - 1 / 2) < 2.7e-3
    assert abs(drawn.var() - 1 / 12) < 7e-4
    assert abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.016  # five standard errors of 1/sqrt(1e5)


def test_largest_word_stays_below_one():
    assert np.float32((0xFFFFFFFF >> 8) * 2.0**-24) < 1


@pytest.mark.parametrize("other", [(8, 0, 0), (7, 1, 0), (7, 2**32, 0), (7 + 2**32, 0, 0), (7, 0, 2**32)])
def test_every_part_of_the_key_counts(other):
    assert not np.isin(one(7, 0, 0, 4), one(*other, 4)).any()
