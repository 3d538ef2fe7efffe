"""Verification of trees in onnxruntime: the reference's verdicts, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from test_verification_function import REFUSED, Calls, all_nodes

from engines.trees import MAX_DEPTH
from engines.uniforms import SAMPLE, uniforms
from engines.verification import function, tree_function
from engines.verification.reference import verify_chain
from engines.verification.tree_reference import tree_encoding, verify_tree, verify_typical

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
INPUTS = {
    "target_logits": (FLOAT, ["B", "R", "V"]),
    "draft_tokens": (INT64, ["B", "N"]),
    "parents": (INT64, ["B", "N"]),
    "draft_counts": (INT64, ["B"]),
    "temperature": (FLOAT, ["B"]),
    "top_k": (INT64, ["B"]),
    "top_p": (FLOAT, ["B"]),
    "uniforms": (FLOAT, ["B", "P", 3]),
}
VERDICT = ((INT64, ["B"]), (INT64, ["B", "P"]), (INT64, ["B", "P-1"]), (BOOL, ["B"]), (INT64, ["B", "R"]))
TYPICAL = {"posterior_threshold": 0.09, "posterior_alpha": 0.3}
GENEROUS = {"posterior_threshold": 0.9, "posterior_alpha": 0.05}


def load(profile: Path | None = None) -> onnxruntime.InferenceSession:
    """The encoding, the exact verdict and typical ones of two engines."""
    graph = Calls()
    ancestors, depths = function.tree_encoding(graph, "parents")
    outputs = [(ancestors, BOOL, ["B", "R", "R"]), (depths, INT64, ["B", "R"])]
    for names in (
        function.verify_tree(graph, *INPUTS),
        function.verify_typical(graph, *INPUTS, **TYPICAL),
        function.verify_typical(graph, *INPUTS, **GENEROUS),
    ):
        outputs += [(name, *kind) for name, kind in zip(names, VERDICT, strict=True)]
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "calls",
            [helper.make_tensor_value_info(name, *kind) for name, kind in INPUTS.items()],
            [helper.make_tensor_value_info(*output) for output in outputs],
        ),
        functions=function.functions(),
        opset_imports=[
            helper.make_opsetid("", function.OPSET),
            helper.make_opsetid(function.DOMAIN, function.VERSION),
        ],
        ir_version=11,
    )
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@pytest.fixture(scope="module")
def session():
    return load()


def check(session, case):
    """Every output equals the reference; returns the exact and the typical verdict."""
    exact, typical = verify_tree(**case), verify_typical(**case, **TYPICAL)
    wanted = [*tree_encoding(case["parents"]), *exact, *typical, *verify_typical(**case, **GENEROUS)]
    for got, want in zip(session.run(None, case), wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    return exact, typical


def random_parents(rng, batch, size):
    """Another tree for each sequence: chains, combs, stars and whatever is between."""
    parents = np.zeros((batch, size), np.int64)
    for b in range(batch):
        reach = rng.choice([1, 2, size + 1])
        for node in range(1, size + 1):
            parents[b, node - 1] = rng.integers(max(0, node - reach), node)
    return parents


def make_case(
    rng, batch, size, vocabulary, *, spread=1.0, temperature=(1,), top_k=(0,), top_p=(1,), wise=0.7
):
    """Random logits and trees, ragged counts; `wise` drafts are what the target would choose."""
    parents = random_parents(rng, batch, size)
    depths = tree_encoding(parents)[1]
    levels = int(rng.integers(1, depths.max() + 2)) if rng.random() < 0.3 else int(depths.max()) + 1
    case = {
        "target_logits": (spread * rng.normal(size=(batch, size + 1, vocabulary))).astype(np.float32),
        "draft_tokens": rng.integers(0, vocabulary, (batch, size)),
        "parents": parents,
        "draft_counts": rng.integers(0, size + 1, batch) if rng.random() < 0.5 else np.full(batch, size),
        "temperature": rng.choice(temperature, batch).astype(np.float32),
        "top_k": rng.choice(top_k, batch).astype(np.int64),
        "top_p": rng.choice(top_p, batch).astype(np.float32),
        "uniforms": uniforms(
            rng.integers(0, 2**63, batch).astype(np.uint64),
            np.zeros(batch, np.uint64),
            rng.integers(0, 1000, batch),
            levels,
        ),
    }
    guess(rng, case, wise)
    return case


def guess(rng, case, wise):
    """Draft what the target chooses, for that share of the nodes."""
    choice = verify_tree(**case).choice
    right = np.take_along_axis(choice, case["parents"], 1)
    case["draft_tokens"] = np.where(rng.random(right.shape) < wise, right, case["draft_tokens"])


@pytest.mark.parametrize("seed", range(12))
def test_functions_equal_the_reference(session, seed):
    """100 cases a seed: any batch, tree (none, too), depth cut, V, ties, temperatures, filters, drafts."""
    rng = np.random.default_rng(seed)
    accepted = typical = 0
    for _ in range(100):
        case = make_case(
            rng,
            int(rng.integers(1, 6)),
            int(rng.choice([0, 1, 2, 3, 5, 9, 14])),
            int(rng.choice([1, 2, 3, 7, 100, 257, 513])),
            spread=rng.choice([0.01, 1, 4, 50]),
            temperature=(0, 0, 0.001, 0.5, 1, 2, 1000),
            top_k=(0, 0, 1, 2, 5, 600, 2**31 - 1),
            top_p=(1, 1, 0.999999, 0.9, 0.5, 1e-9),
        )
        if rng.random() < 0.3:  # ties, of the logits and of the filters' thresholds
            case["target_logits"] = np.round(case["target_logits"])
            guess(rng, case, 0.7)
        if rng.random() < 0.3:  # uniforms on the edges between tokens: 0, quarters, the largest
            edges = np.array([0, 0.25, 0.5, 0.75, 1 - 2**-24], np.float32)
            case["uniforms"] = rng.choice(edges, case["uniforms"].shape)
            guess(rng, case, 0.7)
        exact, lossy = check(session, case)
        accepted += int(exact.accepted.sum())
        typical += int((lossy.accepted != exact.accepted).sum())
    assert accepted > 100
    assert typical > 10


def test_a_chain_is_a_tree_without_branches(session):
    rng = np.random.default_rng(20)
    for _ in range(100):
        case = make_case(rng, 4, int(rng.integers(0, 6)), 20, temperature=(0, 0.7, 1), top_k=(0, 3))
        size = case["draft_tokens"].shape[1]
        case["parents"] = np.tile(np.arange(size), (4, 1))
        seeds = rng.integers(0, 99, 4).astype(np.uint64)
        case["uniforms"] = uniforms(seeds, np.zeros(4, np.uint64), np.zeros(4, np.int64), size + 1)
        guess(rng, case, 0.7)
        exact, _ = check(session, case)
        sampling = (case[name] for name in ("temperature", "top_k", "top_p", "uniforms"))
        verdict = verify_chain(
            case["target_logits"], case["draft_tokens"], case["draft_counts"], None, *sampling
        )
        assert (exact.accepted == verdict.accepted).all()
        assert (exact.tokens == verdict.tokens).all()
        column = np.arange(1, size + 1)
        assert (exact.path == np.where(column <= exact.accepted[:, None], column, 0)).all()


@pytest.mark.parametrize("wise", [0, 1])
def test_all_accepted_and_all_rejected(session, wise):
    rng = np.random.default_rng(21)
    for _ in range(30):
        case = make_case(rng, 4, 7, 50, temperature=(0, 1), wise=wise)
        depths = tree_encoding(case["parents"])[1]
        levels = depths.max() + 1
        case["uniforms"] = case["uniforms"][:, :1].repeat(levels, 1)
        case["draft_counts"][:] = 7
        guess(rng, case, wise)
        if not wise:
            right = np.take_along_axis(verify_tree(**case).choice, case["parents"], 1)
            case["draft_tokens"] = (right + 1) % 50
        exact, _ = check(session, case)
        assert (exact.accepted == (depths.max(1) if wise else 0)).all()


def test_a_batch_where_one_accepts_nothing_and_another_everything(session):
    logits = np.eye(9, dtype=np.float32)[np.array([[1, 2, 3, 4]] * 3)]
    case = {
        "target_logits": logits,
        "draft_tokens": np.array([[1, 2, 3], [8, 8, 8], [8, 1, 3]]),
        "parents": np.array([[0, 1, 2], [0, 0, 0], [0, 0, 2]]),
        "draft_counts": np.array([3, 3, 3]),
        "temperature": np.zeros(3, np.float32),
        "top_k": np.zeros(3, np.int64),
        "top_p": np.ones(3, np.float32),
        "uniforms": np.zeros((3, 4, 3), np.float32),
    }
    exact, _ = check(session, case)
    assert exact.accepted.tolist() == [3, 0, 2]
    assert exact.tokens.tolist() == [[1, 2, 3, 4], [1, -1, -1, -1], [1, 3, 4, -1]]
    assert exact.path.tolist() == [[1, 2, 3], [0, 0, 0], [2, 3, 0]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(session, value):
    rng = np.random.default_rng(22)
    for filtered in (False, True):
        for _ in range(20):
            top_k, top_p = ((3,), (0.9,)) if filtered else ((0,), (1,))
            case = make_case(rng, 4, 5, 40, temperature=(0, 1), top_k=top_k, top_p=top_p)
            case["target_logits"][1, rng.integers(6), rng.integers(40)] = value
            for verdict in check(session, case):
                assert verdict.finite.tolist() == [True, False, True, True]
                assert verdict.accepted[1] == 0
                assert (verdict.tokens[1] == -1).all()
                assert (verdict.path[1] == 0).all()


def test_nodes_beyond_the_count_may_hold_anything(session):
    rng = np.random.default_rng(23)
    for _ in range(30):
        case = make_case(rng, 3, 6, 30, temperature=(0, 1))
        beyond = np.arange(6) >= case["draft_counts"][:, None]
        before = verify_tree(**case)
        strange = rng.choice([-1, -100, 30, 10**9], (3, 6))
        case["draft_tokens"] = np.where(beyond, strange, case["draft_tokens"])
        exact, _ = check(session, case)
        assert (exact.tokens == before.tokens).all()


def test_the_deepest_tree(session):
    rng = np.random.default_rng(24)
    case = make_case(rng, 1, MAX_DEPTH, 5, temperature=(1,))
    case["parents"] = np.arange(MAX_DEPTH)[None]
    case["uniforms"] = rng.random((1, MAX_DEPTH + 1, 3)).astype(np.float32)
    guess(rng, case, 1)
    case["draft_counts"][:] = MAX_DEPTH
    exact, _ = check(session, case)
    assert exact.accepted.tolist() == [MAX_DEPTH]


def test_a_real_vocabulary_and_tree(session):
    rng = np.random.default_rng(25)
    check(session, make_case(rng, 1, 8, 49152, spread=3, temperature=(1,)))


# -- what runs -------------------------------------------------------------------------------------


def test_a_greedy_batch_runs_no_sampling(tmp_path):
    session = load(tmp_path / "profile")
    session.run(None, make_case(np.random.default_rng(0), 2, 5, 2000, temperature=(0,), top_k=(5,)))
    events = json.loads(Path(session.end_profiling()).read_text())
    run = {e["args"]["op_name"] for e in events if e.get("cat") == "Node" and "op_name" in e["args"]}
    assert "ArgMax" in run
    assert not run & {"CumSum", "TopK", "Clip", "Div"}


def test_sampling_without_filters_does_not_sort(tmp_path):
    session = load(tmp_path / "profile")
    session.run(None, make_case(np.random.default_rng(0), 2, 5, 2000, temperature=(1,)))
    text = Path(session.end_profiling()).read_text()
    assert "CumSum" in text
    assert "TopK" not in text


def test_every_level_counts(session):
    """A draft that is right for its depth's uniform is wrong under another's: the uniforms are by depth."""
    rng = np.random.default_rng(26)
    case = make_case(rng, 1, 3, 50, spread=0.1, temperature=(1,))
    case["parents"] = np.array([[0, 0, 2]])
    case["draft_counts"][:] = 3
    case["uniforms"] = np.zeros((1, 3, 3), np.float32)
    case["uniforms"][0, :, SAMPLE] = 0.1, 0.5, 0.9
    guess(rng, case, 1)
    assert check(session, case)[0].accepted.tolist() == [2]
    case["uniforms"][0, 1, SAMPLE] = 0.9
    assert check(session, case)[0].accepted.tolist() == [1]


def test_operators_that_tensorrt_takes():
    named = {tree_function.TREE_ENCODING, tree_function.VERIFY_TREE, tree_function.VERIFY_TYPICAL}
    bodies = function.functions()
    assert named <= {body.name for body in bodies}
    for body in bodies:
        for node in all_nodes(body.node):
            assert node.op_type not in REFUSED
