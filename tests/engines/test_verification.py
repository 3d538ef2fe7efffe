"""The definition of verification: by hand, by law, and by the distribution that comes out.

The distribution tests generate many sequences with a drafter and compare the joint frequencies of their
first tokens with the target's exact probabilities. With the seeds fixed they are deterministic; for a
random seed a correct verifier would fail each with a probability below 2e-6 (chi-square and total
variation, 1e-6 each). Deliberately broken verifiers fail the same test.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from engines.acceptance import AcceptanceStats
from engines.uniforms import ACCEPT, DRAFT, SAMPLE, uniforms
from engines.verification import reference
from engines.verification.reference import draw_tokens, verify_chain


def i64(*values):
    return np.array(values, np.int64)


def f32(*values):
    return np.array(values, np.float32)


def logits_of(probabilities):
    """[..., V]; probability 0 becomes a logit far below."""
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(np.array(probabilities, np.float64)), -1e3).astype(np.float32)


def one_hot(tokens, vocabulary=5):
    """Logits f32 [B, R, V] whose argmax is the given tokens [B, R]."""
    return np.eye(vocabulary, dtype=np.float32)[np.array(tokens)]


def off(batch):
    """top_k and top_p that filter nothing."""
    return np.zeros(batch, np.int64), np.ones(batch, np.float32)


def us(batch, rows, accept=0.0, sample=0.0):
    u = np.zeros((batch, rows, 3), np.float32)
    u[..., ACCEPT], u[..., SAMPLE] = accept, sample
    return u


# -- greedy, by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "count", "accepted", "tokens"),
    [
        ([1, 2, 3], 3, 3, [1, 2, 3, 4]),  # all, and the bonus token
        ([1, 2, 0], 3, 2, [1, 2, 3, -1]),
        ([1, 0, 3], 3, 1, [1, 2, -1, -1]),  # what follows a rejection does not count
        ([0, 2, 3], 3, 0, [1, -1, -1, -1]),
        ([1, 2, 3], 2, 2, [1, 2, 3, -1]),  # row 2 is the bonus row
        ([1, 2, 3], 0, 0, [1, -1, -1, -1]),  # plain decoding
        ([1, 99, -7], 1, 1, [1, 2, -1, -1]),  # beyond the count anything may stand
    ],
)
@pytest.mark.parametrize("with_draft_logits", [False, True])
def test_greedy(drafts, count, accepted, tokens, with_draft_logits):
    target = one_hot([[1, 2, 3, 4]])
    draft_logits = np.zeros((1, 3, 5), np.float32) if with_draft_logits else None
    u = us(1, 4, accept=0.9, sample=0.9)
    verdict = verify_chain(target, i64(drafts), i64(count), draft_logits, f32(0), *off(1), u)
    assert verdict.accepted.tolist() == [accepted]
    assert verdict.tokens.tolist() == [tokens]
    assert verdict.finite.tolist() == [True]
    assert (verdict.accepted.dtype, verdict.tokens.dtype) == (np.int64, np.int64)


def test_greedy_ties_go_to_the_lowest_token():
    target = np.zeros((1, 2, 5), np.float32)
    verdict = verify_chain(target, i64([0]), i64(1), None, f32(0), *off(1), us(1, 2))
    assert verdict.tokens.tolist() == [[0, 0]]


def test_filters_do_not_touch_greedy():
    target = one_hot([[1, 2]])
    verdict = verify_chain(target, i64([1]), i64(1), None, f32(0), i64(1), f32(0.1), us(1, 2))
    assert verdict.tokens.tolist() == [[1, 2]]


# -- sampled, by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("u", "draft", "accepted", "first"),
    [
        (0.10, 0, 1, 0),
        (0.10, 1, 0, 0),  # the draw is token 0: the correction
        (0.49, 1, 1, 1),
        (0.51, 1, 0, 2),
        (0.99, 2, 1, 2),
    ],
)
def test_point_mass_draft_is_accepted_if_it_is_the_draw(u, draft, accepted, first):
    target = np.tile(logits_of([0.25, 0.25, 0.5]), (1, 2, 1))
    verdict = verify_chain(target, i64([draft]), i64(1), None, f32(1), *off(1), us(1, 2, sample=u))
    assert verdict.accepted.tolist() == [accepted]
    assert verdict.tokens[0, 0] == first
    assert verdict.tokens[0, 1] == (-1 if not accepted else first)


P, Q = [0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.0, 0.25]


@pytest.mark.parametrize(
    ("draft", "u", "accepted", "sample", "token"),
    [
        (0, 0.999, 1, 0.0, 0),  # p > q: always accepted
        (1, 0.499, 1, 0.0, 1),  # p / q = 1/2
        (1, 0.501, 0, 0.0, 0),  # the residual is 1/2 each on tokens 0 and 2
        (1, 0.501, 0, 0.499, 0),
        (1, 0.501, 0, 0.501, 2),
        (3, 0.0, 0, 0.0, 0),  # p = 0: never accepted, not even at u = 0
        (2, 0.999, 1, 0.0, 2),  # q = 0: cannot be drawn; accepted if it comes nevertheless
    ],
)
def test_drafts_from_a_distribution(draft, u, accepted, sample, token):
    target = np.stack([logits_of(P), logits_of([0, 0, 0, 1])])[None]
    u_rows = us(1, 2, accept=u, sample=sample)
    verdict = verify_chain(target, i64([draft]), i64(1), logits_of([[Q]]), f32(1), *off(1), u_rows)
    assert verdict.accepted.tolist() == [accepted]
    assert verdict.tokens.tolist() == [[token, 3 if accepted else -1]]


def test_residual_of_equal_distributions_falls_back_to_the_target():
    weights = np.array([3, 1], np.int64)
    assert reference._residual(weights, weights) is weights


def test_filters_apply_to_target_and_drafter_alike():
    # Top-1 of both is token 0: p = q = point mass, the draft is accepted whatever u is.
    target = np.tile(logits_of([0.4, 0.35, 0.25]), (1, 2, 1))
    draft_logits = np.tile(logits_of([0.9, 0.05, 0.05]), (1, 1, 1))
    u = us(1, 2, accept=0.999, sample=0.999)
    verdict = verify_chain(target, i64([0]), i64(1), draft_logits, f32(1), i64(1), f32(1), u)
    assert verdict.tokens.tolist() == [[0, 0]]
    unfiltered = verify_chain(target, i64([0]), i64(1), draft_logits, f32(1), *off(1), u)
    assert unfiltered.accepted.tolist() == [0]


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 1.0, 2.0]), st.booleans())
def test_a_perfect_drafter_is_always_accepted(seed, temperature, filtered):
    rng = np.random.default_rng(seed)
    batch, gamma, vocabulary = 4, 3, 9
    target = (3 * rng.normal(size=(batch, gamma + 1, vocabulary))).astype(np.float32)
    heat = np.full(batch, temperature, np.float32)
    top_k, top_p = (np.full(batch, 4), np.full(batch, 0.9, np.float32)) if filtered else off(batch)
    u = rng.random((batch, gamma + 1, 3), np.float32)
    drafts = [draw_tokens(target[:, i], heat, top_k, top_p, u[:, i, DRAFT]) for i in range(gamma)]
    counts = rng.integers(0, gamma + 1, batch)
    verdict = verify_chain(target, np.stack(drafts, 1), counts, target[:, :gamma], heat, top_k, top_p, u)
    assert (verdict.accepted == counts).all()


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_sequences_do_not_depend_on_batch_mates(seed, with_draft_logits):
    rng = np.random.default_rng(seed)
    batch, gamma, vocabulary = 5, 3, 6
    target = rng.normal(size=(batch, gamma + 1, vocabulary)).astype(np.float32)
    if rng.random() < 0.3:
        target[rng.integers(batch), 0, 0] = np.inf
    draft_logits = rng.normal(size=(batch, gamma, vocabulary)).astype(np.float32)
    arrays = [
        target,
        rng.integers(0, vocabulary, (batch, gamma)),
        rng.integers(0, gamma + 1, batch),
        draft_logits if with_draft_logits else None,
        rng.choice([0, 0.7, 1], batch).astype(np.float32),
        rng.choice([0, 2], batch),
        rng.choice([1, 0.6], batch).astype(np.float32),
        rng.random((batch, gamma + 1, 3), np.float32),
    ]
    together = verify_chain(*arrays)
    for b in range(batch):
        alone = verify_chain(*(a if a is None else a[b : b + 1] for a in arrays))
        for whole, single in zip(together, alone, strict=True):
            assert (whole[b] == single[0]).all()


# -- logits that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", ["target", "last target row", "drafter"])
def test_not_finite(value, temperature, where):
    target = one_hot([[1, 2, 3], [1, 2, 3]])
    draft_logits = np.zeros((2, 2, 5), np.float32)
    place = draft_logits if where == "drafter" else target
    place[0, -1 if where == "last target row" else 0, 2] = value
    heat = f32(temperature, temperature)
    verdict = verify_chain(target, i64([1, 2], [1, 2]), i64(1, 2), draft_logits, heat, *off(2), us(2, 3))
    # The drafter's logits matter only where they are sampled from.
    refused = where != "drafter" or temperature > 0
    assert verdict.finite.tolist() == [not refused, True]
    assert (verdict.accepted[0], (verdict.tokens[0] == -1).all()) == ((0, True) if refused else (1, False))
    assert verdict.tokens[1, 0] >= 0


def test_the_drafter_draws_inside_the_vocabulary_whatever_it_is_given():
    logits = np.full((2, 5), math.nan, np.float32)
    tokens = draw_tokens(logits, f32(1, 0), *off(2), f32(0.5, 0.5))
    assert ((tokens >= 0) & (tokens < 5)).all()


# -- the distribution of what comes out -----------------------------------------------------------

VOCABULARY, GAMMA, LENGTH, SEQUENCES, SEED = 7, 3, 3, 40_000, 20240229
FAILURE = 1e-6  # probability that one check fails a correct verifier

rng = np.random.default_rng(5)
TARGET = (1.5 * rng.normal(size=(VOCABULARY, VOCABULARY, VOCABULARY))).astype(np.float32)
DRAFTERS = {  # logits of the next token by the two before it, like TARGET
    "good": TARGET + (0.3 * rng.normal(size=TARGET.shape)).astype(np.float32),
    "bad": (-2 * TARGET + rng.normal(size=TARGET.shape)).astype(np.float32),
}


def generate(drafter, *, temperature=1.0, top_k=0, top_p=1.0, point_mass=False, verify=verify_chain):
    """`SEQUENCES` sequences, grown by verify steps of ragged draft lengths past LENGTH tokens.

    Returns:
        The first LENGTH tokens of each, and what was accepted.
    """
    batch = SEQUENCES
    rows = np.arange(batch)
    ragged = np.random.default_rng(1)
    tokens = np.zeros((batch, 2 + LENGTH + GAMMA + 1), np.int64)  # two tokens of context, both 0
    lengths = np.full(batch, 2)
    heat = np.full(batch, temperature, np.float32)
    filters = np.full(batch, top_k), np.full(batch, top_p, np.float32)
    stats = AcceptanceStats.empty(GAMMA)
    while (lengths < 2 + LENGTH).any():
        active = lengths < 2 + LENGTH
        counts = ragged.integers(0, GAMMA + 1, batch)
        u = uniforms(np.full(batch, SEED, np.uint64), rows.astype(np.uint64), lengths, GAMMA + 1)
        before = [tokens[rows, lengths - 2], tokens[rows, lengths - 1]]
        drafts, draft_logits, target_logits = [], [], []
        for i in range(GAMMA):
            draft_logits.append(drafter[before[-2], before[-1]])
            target_logits.append(TARGET[before[-2], before[-1]])
            heat_of_drafts = np.zeros_like(heat) if point_mass else heat
            drafts.append(draw_tokens(draft_logits[-1], heat_of_drafts, *filters, u[:, i, DRAFT]))
            before.append(drafts[-1])
        target_logits.append(TARGET[before[-2], before[-1]])
        verdict = verify(
            np.stack(target_logits, 1),
            np.stack(drafts, 1),
            counts,
            None if point_mass else np.stack(draft_logits, 1),
            heat,
            *filters,
            u,
        )
        for i in range(GAMMA + 1):
            emits = active & (i <= verdict.accepted)
            tokens[rows[emits], lengths[emits] + i] = verdict.tokens[emits, i]
        pairs = np.stack([counts[active], verdict.accepted[active]], 1)
        for (drafted, accepted), steps in zip(*np.unique(pairs, axis=0, return_counts=True), strict=True):
            stats.record(int(drafted), int(accepted), int(steps))
        lengths = np.where(active, lengths + verdict.accepted + 1, lengths)
    return tokens[:, 2 : 2 + LENGTH], stats


def exact_distribution(temperature=1.0, top_k=0, top_p=1.0):
    """P of every sequence of LENGTH tokens, in double precision, sharing no code with the verifier."""
    table = np.exp(TARGET.astype(np.float64) / temperature)
    if top_k:
        table[table < np.sort(table, -1)[..., -top_k, None]] = 0
    table /= table.sum(-1, keepdims=True)
    if top_p < 1:
        heavier = (table[..., None, :] * (table[..., None, :] > table[..., :, None])).sum(-1)
        table[heavier >= top_p] = 0
        table /= table.sum(-1, keepdims=True)
    joint = np.zeros((VOCABULARY,) * LENGTH)
    for path in itertools.product(range(VOCABULARY), repeat=LENGTH):
        context = (0, 0, *path)
        joint[path] = math.prod(table[context[i], context[i + 1], token] for i, token in enumerate(path))
    return joint.ravel()


def objections(tokens, expected):
    """Why the sequences are not drawn from `expected`: empty for a correct verifier, but for FAILURE."""
    n = len(tokens)
    cells = np.ravel_multi_index(tuple(tokens.T), (VOCABULARY,) * LENGTH)
    counts = np.bincount(cells, minlength=len(expected))
    found = []
    if counts[expected == 0].any():
        found.append("impossible sequences")
    # Pearson's test, the rarest cells pooled so that each expects at least ten.
    rare = expected * n < 10
    pooled = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    observed, share = (a[pooled[1] > 0] for a in pooled)
    statistic = ((observed - n * share) ** 2 / (n * share)).sum()
    if statistic > chi2.isf(FAILURE, len(share) - 1):
        found.append(f"chi-square {statistic:.0f} at {len(share) - 1} degrees of freedom")
    # Total variation: its mean is at most the sum below; McDiarmid's inequality bounds the excess.
    variation = abs(counts / n - expected).sum() / 2
    mean = np.sqrt(expected * (1 - expected) / n).sum() / 2
    if variation > mean + math.sqrt(math.log(1 / FAILURE) / (2 * n)):
        found.append(f"total variation {variation:.3f}")
    return found


@pytest.mark.parametrize(
    ("quality", "filters"),
    [
        ("good", {}),
        ("bad", {}),
        ("bad", {"temperature": 0.6}),
        ("good", {"top_k": 3, "top_p": 0.8, "temperature": 1.5}),
        ("bad", {"top_k": 3}),
    ],
)
def test_the_chain_has_the_targets_distribution(quality, filters):
    tokens, stats = generate(DRAFTERS[quality], **filters)
    assert objections(tokens, exact_distribution(**filters)) == []
    if quality == "good":
        assert stats.conditional_rate > 0.8
    else:
        assert stats.conditional_rate < 0.35


@pytest.mark.parametrize("quality", ["good", "bad"])
def test_point_mass_drafts_change_nothing_at_all(quality):
    tokens, stats = generate(DRAFTERS[quality], point_mass=True)
    assert objections(tokens, exact_distribution()) == []
    assert stats.accepted > 0
    # The same as plain sampling with the same seed, token for token.
    context = np.zeros((SEQUENCES, 2), np.int64)
    ones, (top_k, top_p) = np.ones(SEQUENCES, np.float32), off(SEQUENCES)
    for position in range(LENGTH):
        u = uniforms(
            np.full(SEQUENCES, SEED, np.uint64),
            np.arange(SEQUENCES, dtype=np.uint64),
            np.full(SEQUENCES, 2 + position),
            1,
        )
        plain = draw_tokens(TARGET[context[:, 0], context[:, 1]], ones, top_k, top_p, u[:, 0, SAMPLE])
        assert (tokens[:, position] == plain).all()
        context = np.stack([context[:, 1], plain], 1)


# -- broken verifiers must fail -------------------------------------------------------------------


def accept_by_the_target_alone(monkeypatch):
    turns = itertools.cycle("qp")
    right = reference._probability
    monkeypatch.setattr(
        reference,
        "_probability",
        lambda w, x: np.ones(x.shape, np.float32) if next(turns) == "q" else right(w, x),
    )


def drafter_not_normalised(monkeypatch):
    turns = itertools.cycle("qp")
    right = reference._probability
    monkeypatch.setattr(
        reference,
        "_probability",
        lambda w, x: right(w, x) * (w.sum(-1) / np.float32(2**30) if next(turns) == "q" else 1),
    )


def correction_from_the_whole_target(monkeypatch):
    monkeypatch.setattr(reference, "_residual", lambda p, q: p)


def residual_of_weights_instead_of_probabilities(monkeypatch):
    monkeypatch.setattr(reference, "_residual", lambda p, q: np.maximum(p - q, 0) if (p > q).any() else p)


def one_uniform_for_two_purposes(monkeypatch):
    monkeypatch.setattr(reference, "SAMPLE", ACCEPT)


def everything_accepted(monkeypatch):
    right = reference._first_rejected
    monkeypatch.setattr(
        reference, "_first_rejected", lambda passed, counts: right(np.ones_like(passed), counts)
    )


@pytest.mark.parametrize(
    "break_it",
    [
        accept_by_the_target_alone,
        drafter_not_normalised,
        correction_from_the_whole_target,
        residual_of_weights_instead_of_probabilities,
        one_uniform_for_two_purposes,
        everything_accepted,
    ],
)
def test_broken_verifiers_are_caught(break_it, monkeypatch):
    break_it(monkeypatch)
    tokens, _ = generate(DRAFTERS["bad"])
    assert objections(tokens, exact_distribution())


def test_a_drafter_that_misreports_its_distribution_is_caught():
    def verify(target, drafts, counts, draft_logits, *rest):
        return verify_chain(target, drafts, counts, draft_logits / 2, *rest)

    tokens, _ = generate(DRAFTERS["bad"], verify=verify)
    assert objections(tokens, exact_distribution())
