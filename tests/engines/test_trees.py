"""Trees: what is refused, the numbering, masks against a naive implementation, published trees."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.trees import MAX_RANK, NAMED_TREES, Tree, TreeError, chain, from_choices

LIMITS = {"max_depth": 8, "max_nodes": 64}


@st.composite
def choices(draw, max_nodes=30, max_depth=6, max_rank=5):
    """Prefix-closed paths in any order: each node hangs below one that was there before."""
    known = [()]
    for _ in range(draw(st.integers(1, max_nodes))):
        parent = draw(st.sampled_from([path for path in known if len(path) < max_depth]))
        child = (*parent, draw(st.integers(0, max_rank)))
        if child not in known:
            known.append(child)
    paths = known[1:]
    random.Random(draw(st.integers(0, 2**32))).shuffle(paths)
    return paths


# -- against a naive implementation, on the paths themselves ---------------------------------------


@given(choices())
def test_numbering(paths):
    tree = from_choices(paths, **LIMITS)
    order = [(), *sorted(paths, key=lambda path: (len(path), path))]
    assert [tree.choice(n) for n in range(tree.size + 1)] == order
    assert tree.size == len(paths)
    assert tree.depths == tuple(len(path) for path in order)
    assert tree.depth == max(len(path) for path in paths)
    assert all(parent < node for node, parent in enumerate(tree.parents, 1))
    for node in range(1, tree.size + 1):
        assert order[tree.parents[node - 1]] == order[node][:-1]
        assert node in tree.children(tree.parents[node - 1])


@given(choices())
def test_ancestors_are_prefixes(paths):
    tree = from_choices(paths, **LIMITS)
    order = [tree.choice(n) for n in range(tree.size + 1)]
    naive = np.array([[path[: len(other)] == other for other in order] for path in order])
    assert tree.ancestors.dtype == np.bool_
    assert (tree.ancestors == naive).all()
    mask = tree.ancestors.astype(int)
    assert ((mask @ mask > 0) == naive).all()  # transitive
    assert (mask.sum(1) == 1 + np.array(tree.depths)).all()  # a row sees as much as it is deep


@given(choices())
def test_candidates_needed_of_each_level(paths):
    tree = from_choices(paths, **LIMITS)
    naive = [1 + max(p[-1] for p in paths if len(p) == d) for d in range(1, tree.depth + 1)]
    assert list(tree.level_widths) == naive


@given(choices())
def test_the_order_of_choices_does_not_count(paths):
    assert from_choices([list(path) for path in sorted(paths)], **LIMITS) == from_choices(paths, **LIMITS)


@pytest.mark.parametrize("gamma", range(1, 6))
def test_chain(gamma):
    tree = chain(gamma)
    assert tree == from_choices([[0] * d for d in range(1, gamma + 1)], **LIMITS)
    assert tree.is_chain
    assert (tree.ancestors == np.tri(gamma + 1, dtype=bool)).all()
    assert tree.level_widths == (1,) * gamma


def test_a_tree_without_nodes_is_the_root():
    tree = chain(0)
    assert (tree.size, tree.depth, tree.depths, tree.level_widths) == (0, 0, (0,), ())
    assert tree.ancestors.tolist() == [[True]]


@given(choices())
def test_only_chains_are_chains(paths):
    tree = from_choices(paths, **LIMITS)
    assert tree.is_chain == (tree.depth == tree.size)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "rule", "names"),
    [
        ([], "tree.invalid", "no nodes"),
        ([[0], []], "tree.invalid", "empty path"),
        ([[0], [-1]], "tree.invalid", "-1"),
        ([[0], [1.0]], "tree.invalid", "1.0"),
        ([[0], [True]], "tree.invalid", "True"),
        ([[0], ["1"]], "tree.invalid", "'1'"),
        ([[0], [0, 1], [0]], "tree.duplicate", "[0]"),
        ([[0], [1, 0]], "tree.not-prefix-closed", "[1, 0]"),
        ([[0], [0, 0, 0]], "tree.not-prefix-closed", "[0, 0]"),
        ([[0] * d for d in range(1, 6)], "tree.too-deep", "5 levels"),
        ([[0], [MAX_RANK]], "tree.too-wide", str(MAX_RANK)),
        ([[rank] for rank in range(17)], "tree.too-large", "17"),
        ([0, 1], "tree.invalid", "0"),
        (["0", "00"], "tree.invalid", "'0'"),
        ([[0], None], "tree.invalid", "None"),
        (7, "tree.invalid", "7"),
        (None, "tree.invalid", "None"),
    ],
)
def test_refusals(paths, rule, names):
    with pytest.raises(TreeError) as refusal:
        from_choices(paths, max_depth=4, max_nodes=16)
    assert refusal.value.rule == rule
    assert names in str(refusal.value)
    assert refusal.value.remedy
    assert refusal.value.exit_code == 2


@given(choices(max_nodes=12), st.data())
def test_any_missing_parent_is_seen(paths, data):
    inner = [p for p in paths if any(q[:-1] == p for q in paths)]
    if inner:
        missing = data.draw(st.sampled_from(inner))
        with pytest.raises(TreeError) as refusal:
            from_choices([p for p in paths if p != missing], **LIMITS)
        assert refusal.value.rule == "tree.not-prefix-closed"


def test_messages_of_hostile_trees_are_short():
    for paths in ([[0] * 10**6], [[10**5000]], [[-(10**9)] * 4], [["x"] * 10**6], [["x" * 10**6]]):
        with pytest.raises(TreeError) as refusal:
            from_choices(paths, max_depth=4, max_nodes=16)
        assert len(str(refusal.value)) < 1000


# -- published trees -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "per_level"),
    [
        ("mc_sim_7b_63", [10, 28, 23, 2]),
        ("vicuna_7b_stage1", [10, 32, 20, 1]),
        ("vicuna_7b_stage2", [10, 23, 23, 7]),
        ("vicuna_13b_stage1", [10, 29, 23, 1]),
        ("zephyr_stage2", [10, 27, 23, 3]),
    ],
)
def test_named_trees(name, per_level):
    tree = from_choices(NAMED_TREES[name], max_depth=4, max_nodes=63)
    assert [tree.depths.count(d) for d in range(1, tree.depth + 1)] == per_level


def test_the_children_of_mc_sim():
    tree = from_choices(NAMED_TREES["mc_sim_7b_63"], max_depth=4, max_nodes=63)
    counts = {
        (): 10,
        (0,): 10,
        (1,): 7,
        (2,): 3,
        (3,): 2,
        **{(r,): 1 for r in range(4, 10)},
        (0, 0): 10,
        (0, 1): 3,
        (0, 2): 2,
        (1, 0): 2,
        (2, 0): 1,
        (0, 0, 0): 2,
        **{(0, r): 1 for r in range(3, 8)},
    }
    for node in range(tree.size + 1):
        ranks = [tree.choice(n)[-1] for n in tree.children(node)]
        assert ranks == list(range(counts.get(tree.choice(node), 0)))
    assert tree.level_widths == (10, 10, 10, 2)


def test_trees_compare_by_value():
    assert Tree((0, 0), (0, 1)) == from_choices([[1], [0]], **LIMITS)
    assert Tree((0, 0), (0, 1)) != Tree((0, 1), (0, 0))
