"""The definition of verification on trees: by hand, against a walk through the tree, and by distribution.

The distribution tests are those of `test_verification`: sequences are grown by verify steps, and the joint
frequencies of their first three tokens are compared with the target's exact probabilities. A correct
verifier would fail each with a probability below 2e-6; deliberately broken ones fail.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from test_verification import DRAFTERS, LENGTH, TARGET, exact_distribution, f32, i64, objections, off

from engines.sampling import draw, row_weights
from engines.trees import chain, from_choices
from engines.uniforms import ACCEPT, DRAFT, DRAWS, SAMPLE, uniforms
from engines.verification import drawn_reference
from engines.verification.drawn_reference import NO_TOKEN, draw_siblings, verify_tree_drawn
from engines.verification.reference import draw_tokens
from engines.verification.tree_reference import tree_encoding, verify_tree, verify_typical

TYPICAL = {"posterior_threshold": 0.09, "posterior_alpha": 0.3}


def one_hot(*tokens, vocabulary=9):
    """Logits f32 [1, R, V] whose argmax is the given token in each row."""
    return np.eye(vocabulary, dtype=np.float32)[None, list(tokens)]


def greedy(logits, drafts, parents, count=None, levels=None):
    levels = len(drafts) + 1 if levels is None else levels
    count = len(drafts) if count is None else count
    arrays = i64(drafts).reshape(1, -1), i64(parents).reshape(1, -1), i64(count)
    return verify_tree(logits, *arrays, f32(0), *off(1), np.zeros((1, levels, 3), np.float32))


# -- by hand ---------------------------------------------------------------------------------------

#        root → 1 → (3, 4); 2 → 5; the target says 1, 2, 3, 4, 5, 6 behind nodes 0 … 5
PARENTS = [0, 0, 1, 1, 2]
SAYS = (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("drafts", "count", "levels", "path", "tokens"),
    [
        ([1, 8, 8, 2, 3], 5, 6, [1, 4], [1, 2, 5]),  # the second child
        ([8, 1, 2, 2, 3], 5, 6, [2, 5], [1, 3, 6]),
        ([8, 1, 2, 2, 8], 5, 6, [2], [1, 3]),
        ([8, 8, 2, 2, 3], 5, 6, [], [1]),  # children of rejected nodes do not count
        ([1, 8, 8, 2, 3], 3, 6, [1], [1, 2]),  # node 4 does not exist
        ([1, 8, 8, 2, 3], 5, 2, [1], [1, 2]),  # deeper than there are uniforms
        ([1, 8, 8, 2, 3], 5, 1, [], [1]),
        ([1, 8, 8, 2, 3], 0, 6, [], [1]),
        ([1, 8, 2, 2, 8], 5, 6, [1, 3], [1, 2, 4]),  # siblings alike: the first
        ([1, 1, 8, 8, 3], 5, 6, [2, 5], [1, 3, 6]),  # unless the other leads further
    ],
)
def test_greedy(drafts, count, levels, path, tokens):
    verdict = greedy(one_hot(*SAYS), drafts, PARENTS, count, levels)
    assert verdict.accepted.tolist() == [len(path)]
    assert verdict.path.tolist() == [path + [0] * (levels - 1 - len(path))]
    assert verdict.tokens.tolist() == [tokens + [-1] * (levels - len(tokens))]
    assert verdict.finite.tolist() == [True]
    assert verdict.choice.tolist() == [list(SAYS)]


def test_no_drafts():
    verdict = greedy(one_hot(7), [], [])
    assert (verdict.tokens.tolist(), verdict.path.shape) == ([[7]], (1, 0))


def test_the_encoding_is_the_trees():
    for tree in (chain(3), from_choices([[0], [1], [1, 0], [0, 0], [0, 1]], max_depth=2, max_nodes=5)):
        seen, depths = tree_encoding(i64(*tree.parents)[None])
        assert (seen[0] == tree.ancestors).all()
        assert depths[0].tolist() == list(tree.depths)


# -- a walk through the tree, token by token -------------------------------------------------------


def random_case(rng, batch=3, vocabulary=5):
    """Siblings differ, trees differ, counts are ragged."""
    size = int(rng.integers(0, 9))
    parents = np.array([[rng.integers(0, n) for n in range(1, size + 1)] for _ in range(batch)], np.int64)
    parents = parents.reshape(batch, size)
    drafts = np.zeros((batch, size), np.int64)
    for b in range(batch):
        for node in range(size + 1):
            children = np.flatnonzero(parents[b] == node)
            # More children than tokens: what is left over cannot be accepted.
            tokens = np.append(rng.permutation(vocabulary), np.full(size, vocabulary))
            drafts[b, children] = tokens[: len(children)]
    levels = int(tree_encoding(parents)[1].max()) + 1
    return {
        "target_logits": (2 * rng.normal(size=(batch, size + 1, vocabulary))).astype(np.float32),
        "draft_tokens": drafts,
        "parents": parents,
        "draft_counts": rng.integers(0, size + 1, batch),
        "temperature": rng.choice([0, 0.7, 1], batch).astype(np.float32),
        "top_k": rng.choice([0, 2], batch),
        "top_p": rng.choice([1, 0.6], batch).astype(np.float32),
        "uniforms": rng.random((batch, levels, 3), np.float32),
    }


@given(st.integers(0, 2**32 - 1))
def test_what_is_emitted_is_what_plain_sampling_emits(seed):
    case = random_case(np.random.default_rng(seed))
    verdict = verify_tree(**case)
    for b, count in enumerate(case["draft_counts"]):
        node, path, tokens = 0, [], []
        filters = [case[name][b : b + 1] for name in ("temperature", "top_k", "top_p")]
        while True:
            u = case["uniforms"][b : b + 1, len(path), SAMPLE]
            tokens.append(int(draw_tokens(case["target_logits"][b : b + 1, node], *filters, u)[0]))
            fitting = [
                n
                for n in range(1, count + 1)
                if case["parents"][b, n - 1] == node and case["draft_tokens"][b, n - 1] == tokens[-1]
            ]
            if not fitting:
                break
            (node,) = fitting
            path.append(node)
        assert verdict.accepted[b] == len(path)
        assert verdict.path[b].tolist() == path + [0] * (verdict.path.shape[1] - len(path))
        assert verdict.tokens[b].tolist() == tokens + [-1] * (verdict.tokens.shape[1] - len(tokens))


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_sequences_do_not_depend_on_batch_mates(seed, typical):
    rng = np.random.default_rng(seed)
    case = random_case(rng, batch=4)
    if rng.random() < 0.3:
        case["target_logits"][rng.integers(4), 0, 0] = np.nan

    def verify(arrays):
        return verify_typical(**arrays, **TYPICAL) if typical else verify_tree(**arrays)

    together = verify(case)
    for b in range(4):
        alone = verify({name: array[b : b + 1] for name, array in case.items()})
        for whole, single in zip(together, alone, strict=True):
            assert (whole[b] == single[0]).all()


# -- typical acceptance ----------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.sampled_from([(0.09, 0.3), (0.9, 0.9), (0.5, 0.05), (0.01, 1.0)]))
def test_typical_acceptance_follows_the_published_rule(seed, parameters):
    """p(x) > min(ε, α exp(-H)), here in double precision; the deepest path wins, then the lowest node."""
    epsilon, alpha = parameters
    case = random_case(np.random.default_rng(seed))
    case["draft_tokens"] = case["draft_tokens"].clip(0, 4)
    verdict = verify_typical(**case, posterior_threshold=epsilon, posterior_alpha=alpha)
    weights = row_weights(*(case[name] for name in ("target_logits", "temperature", "top_k", "top_p")))
    p = weights / weights.sum(-1, keepdims=True)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
    cut = np.minimum(epsilon, alpha * np.exp(-entropy))
    choice = verify_tree(**case).choice
    for b, count in enumerate(case["draft_counts"]):
        paths = {0: []}
        for node in range(1, count + 1):
            parent, token = case["parents"][b, node - 1], case["draft_tokens"][b, node - 1]
            if case["temperature"][b] > 0:
                if abs(p[b, parent, token] / cut[b, parent] - 1) < 1e-4:
                    return  # on the edge
                fits = p[b, parent, token] > cut[b, parent]
            else:
                fits = token == choice[b, parent]
            if fits and parent in paths:
                paths[node] = [*paths[parent], node]
        best = max(paths, key=lambda node: (len(paths[node]), -node))
        tokens = [case["draft_tokens"][b, node - 1] for node in paths[best]] + [choice[b, best]]
        assert verdict.accepted[b] == len(paths[best])
        assert verdict.tokens[b].tolist() == tokens + [-1] * (verdict.tokens.shape[1] - len(tokens))


def test_typical_acceptance_by_hand():
    # Four tokens of 1/4 each: exp(-H) = 1/4, α exp(-H) = 0.075. And 0.97 + 0.03: the threshold counts.
    flat, sharp = np.log([0.25] * 4), np.log([0.97, 0.03, 1e-9, 1e-9])
    for row, epsilon, token, accepted in (
        (flat, 0.09, 3, 1),
        (flat, 0.9, 3, 1),
        (sharp, 0.09, 1, 0),
        (sharp, 0.02, 1, 1),
        (sharp, 0.02, 2, 0),
    ):
        logits = np.stack([row, flat])[None].astype(np.float32)
        arrays = i64([token]), i64([0]), i64(1), f32(1), *off(1), np.full((1, 2, 3), 0.6, np.float32)
        verdict = verify_typical(logits, *arrays, posterior_threshold=epsilon, posterior_alpha=0.3)
        assert verdict.accepted.tolist() == [accepted]
        assert verdict.tokens.tolist() == ([[token, 2]] if accepted else [[0, -1]])


# -- drawn siblings, by hand -----------------------------------------------------------------------


def logits_of(*rows):
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(np.array(rows, np.float64)), -1e3).astype(np.float32)[None]


def lanes(accept, sample=0.0):
    """uniforms f32 [1, 2, 3 W]: the children's ACCEPT uniforms at the root, and SAMPLE ones."""
    u = np.zeros((1, 2, DRAWS * len(accept)), np.float32)
    u[0, 0, ACCEPT::DRAWS] = accept
    u[..., SAMPLE] = sample
    return u


P, Q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.3, 0.0]


@pytest.mark.parametrize(
    ("drafts", "accept", "sample", "path", "first"),
    [
        ([1, 2], [0.49, 0.9], 0.0, [1], 1),  # p / q = 1/2
        # Rejected: p becomes (3, 0, 0, 1) / 4, q (1/4, 0, 3/4, 0). Token 2 has no probability left,
        ([1, 2], [0.51, 0.0], 0.60, [], 0),  # p becomes (1/2, 0, 0, 1/4) / (3/4) = (2/3, 0, 0, 1/3)
        ([1, 2], [0.51, 0.0], 0.67, [], 3),
        ([1, 0], [0.51, 0.99], 0.0, [2], 0),  # 3/4 over 1/4
        ([1], [0.51], 0.74, [], 0),
        ([1], [0.51], 0.76, [], 3),
        ([1, NO_TOKEN], [0.51, 0.0], 0.74, [], 0),  # passed over: p stays (3, 0, 0, 1) / 4
        ([1, NO_TOKEN], [0.51, 0.0], 0.76, [], 3),
        ([0, 1], [0.999, 0.0], 0.0, [1], 0),
    ],
)
def test_siblings_in_order(drafts, accept, sample, path, first):
    rows = [P] * (len(drafts) + 1)
    arrays = i64(drafts), np.zeros((1, len(drafts)), np.int64), i64(len(drafts)), logits_of(*[Q] * len(rows))
    verdict = verify_tree_drawn(logits_of(*rows), *arrays, f32(1), *off(1), lanes(accept, sample))
    assert verdict.path.tolist() == [path or [0]]
    assert verdict.tokens[0, 0] == first
    assert (verdict.tokens[0, 1] == -1) == (not path)


def test_children_beyond_the_lanes_are_not_tried():
    arrays = i64([1, 0]), i64([0, 0]), i64(2), logits_of(Q, Q, Q)
    verdict = verify_tree_drawn(logits_of(P, P, P), *arrays, f32(1), *off(1), lanes([0.51]))
    assert verdict.accepted.tolist() == [0]


def test_draws_differ_and_follow_the_drafter():
    """Ordered pairs come with q(x) q(y) / (1 - q(x)); Pearson's test, 1e-6 error probability."""
    n, q = 40_000, np.array([0.5, 0.25, 0.15, 0.1])
    u = np.random.default_rng(2).random((n, 2), np.float32)
    logits = np.tile(np.log(q).astype(np.float32), (n, 1))
    tokens = draw_siblings(logits, np.ones(n, np.float32), *off(n), u)
    expected = q[:, None] * q / (1 - q[:, None]) * (1 - np.eye(4))
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple(tokens.T), 1)
    assert (np.diag(counts) == 0).all()
    used = expected > 0
    statistic = ((counts[used] - n * expected[used]) ** 2 / (n * expected[used])).sum()
    assert statistic < chi2.isf(1e-6, used.sum() - 1)


@given(st.integers(0, 2**32 - 1))
def test_one_draw_is_the_chains(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(5, 6)).astype(np.float32)
    filters = (
        rng.choice([0, 0.7, 1], 5).astype(np.float32),
        rng.choice([0, 2], 5),
        rng.choice([1, 0.6], 5).astype(np.float32),
    )
    u = rng.random((5, 1), np.float32)
    assert (draw_siblings(logits, *filters, u)[:, 0] == draw_tokens(logits, *filters, u[:, 0])).all()


def test_draws_at_temperature_0_are_the_best_in_order():
    logits = f32([1, 3, 2, 3, 0], [0, 0, 0, 0, 0])
    tokens = draw_siblings(logits, f32(0, 0), *off(2), np.zeros((2, 6), np.float32))
    assert tokens.tolist() == [[1, 3, 2, 0, 4, NO_TOKEN], [0, 1, 2, 3, 4, NO_TOKEN]]


def test_draws_end_where_no_weight_is_left():
    logits = np.zeros((1, 5), np.float32)
    tokens = draw_siblings(logits - i64(0, 1, 2, 3, 4), f32(1), i64(2), f32(1), np.zeros((1, 4), np.float32))
    assert tokens.tolist() == [[0, 1, NO_TOKEN, NO_TOKEN]]


# -- the distribution of what comes out ------------------------------------------------------------

SHAPE = from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [2, 0]], max_depth=2, max_nodes=8)
SEQUENCES, SEED, WIDTH = 12_000, 7, 3
NOISE = np.random.default_rng(6).normal(size=TARGET.shape).astype(np.float32)
MODELS = DRAFTERS | {"fair": TARGET + np.float32(1.5) * NOISE}


def grow(drafter, verify, *, drawn, replacement=False, temperature=1.0, top_k=0, top_p=1.0):
    """`SEQUENCES` sequences past LENGTH tokens by trees of ragged sizes; returns them and the share accepted.

    Args:
        drawn: siblings are drawn; else they are the drafter's best.
        replacement: draw them with replacement, which verification does not expect.
    """
    rows = np.arange(SEQUENCES)
    ragged = np.random.default_rng(1)
    tokens = np.zeros((SEQUENCES, 2 + LENGTH + SHAPE.depth + 1), np.int64)  # two tokens of context, both 0
    lengths, accepted, drafted = np.full(SEQUENCES, 2), 0, 0
    filters = np.full(SEQUENCES, top_k), np.full(SEQUENCES, top_p, np.float32)
    heat = np.full(SEQUENCES, temperature, np.float32)
    parents = np.tile(SHAPE.parents, (SEQUENCES, 1))
    while (lengths < 2 + LENGTH).any():
        active = lengths < 2 + LENGTH
        counts = ragged.integers(0, SHAPE.size + 1, SEQUENCES)
        seeds = np.full(SEQUENCES, SEED, np.uint64)
        u = uniforms(seeds, rows.astype(np.uint64), lengths, SHAPE.depth + 1, lanes=WIDTH)
        before = np.zeros((SEQUENCES, SHAPE.size + 1, 2), np.int64)  # the two tokens behind each node
        before[:, 0] = np.stack([tokens[rows, lengths - 2], tokens[rows, lengths - 1]], 1)
        for node in range(SHAPE.size + 1):
            children = SHAPE.children(node)
            q = drafter[before[:, node, 0], before[:, node, 1]]
            u_draft = u[:, SHAPE.depths[node], DRAFT::DRAWS]
            drawn_tokens = draw_siblings(q, heat if drawn else 0 * heat, *filters, u_draft)
            for w, child in enumerate(children):
                if replacement:
                    drawn_tokens[:, w] = draw_tokens(q, heat, *filters, u_draft[:, w])
                before[:, child] = np.stack([before[:, node, 1], drawn_tokens[:, w]], 1)
        target_logits = TARGET[before[..., 0], before[..., 1]]
        trees = (target_logits, before[:, 1:, 1].copy(), parents, counts)
        if drawn:
            trees = (*trees, drafter[before[..., 0], before[..., 1]])
        verdict = verify(*trees, heat, *filters, u if drawn else u[..., :DRAWS].copy())
        for i in range(SHAPE.depth + 1):
            emits = active & (i <= verdict.accepted)
            tokens[rows[emits], lengths[emits] + i] = verdict.tokens[emits, i]
        accepted += verdict.accepted[active].sum()
        drafted += np.take(SHAPE.depths, counts[active]).sum()
        lengths = np.where(active, lengths + verdict.accepted + 1, lengths)
    return tokens[:, 2 : 2 + LENGTH], accepted / drafted


@pytest.mark.parametrize(
    ("quality", "filters"),
    [("good", {}), ("fair", {}), ("bad", {}), ("fair", {"top_k": 4, "top_p": 0.9, "temperature": 1.5})],
)
@pytest.mark.parametrize("drawn", [False, True])
def test_trees_have_the_targets_distribution(quality, filters, drawn):
    verify = verify_tree_drawn if drawn else verify_tree
    tokens, rate = grow(MODELS[quality], verify, drawn=drawn, **filters)
    assert objections(tokens, exact_distribution(**filters)) == []
    assert rate > {"good": 0.5, "fair": 0.2, "bad": 0.02}[quality]


def test_trees_change_nothing_at_all():
    """Point masses: the same tokens as plain sampling with the same seed."""
    tokens, _ = grow(MODELS["good"], verify_tree, drawn=False)
    context = np.zeros((SEQUENCES, 2), np.int64)
    seeds, rows = np.full(SEQUENCES, SEED, np.uint64), np.arange(SEQUENCES, dtype=np.uint64)
    for position in range(LENGTH):
        u = uniforms(seeds, rows, np.full(SEQUENCES, 2 + position), 1)[:, 0, SAMPLE]
        logits = TARGET[context[:, 0], context[:, 1]]
        plain = draw_tokens(logits, np.ones(SEQUENCES, np.float32), *off(SEQUENCES), u)
        assert (tokens[:, position] == plain).all()
        context = np.stack([context[:, 1], plain], 1)


# -- broken verifiers must fail --------------------------------------------------------------------


def correction_from_the_whole_target(*arrays):
    """Siblings are rejected, but stay in the distribution of the correction."""
    verdict = verify_tree(*arrays)
    logits, heat, top_k, top_p, u = arrays[0], *arrays[4:]
    rows = np.arange(len(logits))
    node = np.append(np.zeros((len(rows), 1), np.int64), verdict.path, 1)[rows, verdict.accepted]
    weights = row_weights(logits[rows, node][:, None], heat, top_k, top_p)[:, 0]
    verdict.tokens[rows, verdict.accepted] = draw(weights, u[rows, verdict.accepted, ACCEPT])
    return verdict


def one_uniform_for_all_levels(*arrays):
    return verify_tree(*arrays[:-1], arrays[-1][:, :1].repeat(SHAPE.depth + 1, 1))


def typical_acceptance(*arrays):
    return verify_typical(*arrays, **TYPICAL)


@pytest.mark.parametrize(
    "broken", [correction_from_the_whole_target, one_uniform_for_all_levels, typical_acceptance]
)
def test_broken_verification_of_point_masses_is_found_out(broken):
    tokens, _ = grow(MODELS["good"], broken, drawn=False)
    assert objections(tokens, exact_distribution()) != []


def one_uniform_for_all_siblings(*arrays):
    u = arrays[-1].copy()
    u[..., ACCEPT::DRAWS] = u[..., ACCEPT, None]
    return verify_tree_drawn(*arrays[:-1], u)


def siblings_in_another_order(*arrays):
    """The same tree with the first two children of the root exchanged."""
    order = np.array([1, 0, 2, 5, 6, 3, 4, 7]) + 1
    rows = np.append(0, order)
    target, drafts, parents, counts, draft_logits = arrays[:5]
    return verify_tree_drawn(
        target[:, rows],
        drafts[:, order - 1],
        parents,
        np.full_like(counts, SHAPE.size),
        draft_logits[:, rows],
        *arrays[5:],
    )


@pytest.mark.parametrize(
    "patch",
    [
        lambda p, q: p,  # the target is not reduced by what was rejected
        lambda p, q: np.maximum(p - q, 0) if (p > q).any() else p,  # weights instead of probabilities
    ],
)
def test_a_wrong_residual_is_found_out(monkeypatch, patch):
    monkeypatch.setattr(drawn_reference, "_residual", patch)
    tokens, _ = grow(MODELS["fair"], verify_tree_drawn, drawn=True)
    assert objections(tokens, exact_distribution()) != []


@pytest.mark.parametrize("broken", [one_uniform_for_all_siblings, siblings_in_another_order])
def test_broken_verification_of_drawn_siblings_is_found_out(broken):
    tokens, _ = grow(MODELS["fair"], broken, drawn=True)
    assert objections(tokens, exact_distribution()) != []


def test_siblings_drawn_with_replacement_are_found_out():
    tokens, _ = grow(MODELS["fair"], verify_tree_drawn, drawn=True, replacement=True)
    assert objections(tokens, exact_distribution()) != []


def test_the_target_without_the_rejected_siblings_is_found_out(monkeypatch):
    """Right for point masses, wrong for draws: p loses the rejected token instead of q."""

    def without_the_token(p, q):
        left = p.copy()
        left[(q / q.sum()).argmax()] = 0
        return left if left.any() else p

    monkeypatch.setattr(drawn_reference, "_residual", without_the_token)
    tokens, _ = grow(MODELS["fair"], verify_tree_drawn, drawn=True)
    assert objections(tokens, exact_distribution()) != []
