"""Verification of drawn siblings in onnxruntime: the reference's tokens, bit for bit."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from test_verification_function import REFUSED, Calls, all_nodes
from test_verification_tree_function import random_parents

from engines.uniforms import DRAFT, uniforms
from engines.verification import function
from engines.verification.drawn_function import draw_siblings as emit_draw
from engines.verification.drawn_function import drawn_functions
from engines.verification.drawn_function import verify_tree_drawn as emit_verify
from engines.verification.drawn_reference import NO_TOKEN, draw_siblings, verify_tree_drawn
from engines.verification.reference import verify_chain
from engines.verification.tree_reference import tree_encoding

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
SAMPLING = ("temperature", "top_k", "top_p")
INPUTS = {
    "target_logits": (FLOAT, ["B", "R", "V"]),
    "draft_tokens": (INT64, ["B", "N"]),
    "parents": (INT64, ["B", "N"]),
    "draft_counts": (INT64, ["B"]),
    "draft_logits": (FLOAT, ["B", "R", "V"]),
    "temperature": (FLOAT, ["B"]),
    "top_k": (INT64, ["B"]),
    "top_p": (FLOAT, ["B"]),
    "uniforms": (FLOAT, ["B", "P", "3W"]),
}
DRAW_INPUTS = {"logits": (FLOAT, ["B", "V"]), "u": (FLOAT, ["B", "W"])}
SHAPES = ((1, 1), (1, 3), (3, 2), (4, 3), (0, 1))  # depth, width


def load(depth: int, width: int, profile: Path | None = None) -> onnxruntime.InferenceSession:
    graph = Calls()
    names = emit_verify(graph, *INPUTS, depth=depth, width=width)
    drawn = emit_draw(graph, "logits", *SAMPLING, "u", width=width)
    kinds = ((INT64, ["B"]), (INT64, ["B", "P"]), (INT64, ["B", "P-1"]), (BOOL, ["B"]), (INT64, ["B", "W"]))
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "calls",
            [helper.make_tensor_value_info(name, *kind) for name, kind in (INPUTS | DRAW_INPUTS).items()],
            [helper.make_tensor_value_info(n, *kind) for n, kind in zip([*names, drawn], kinds, strict=True)],
        ),
        functions=[*function.functions(), *drawn_functions(depth, width)],
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


session_of = functools.cache(load)


def check(case):
    """The verdict and a draw equal the reference; returns the reference's."""
    depth, width = case["uniforms"].shape[1] - 1, case["uniforms"].shape[2] // 3
    draw = {"logits": case["draft_logits"][:, 0], "u": case["uniforms"][:, 0, DRAFT::3]}
    verdict = verify_tree_drawn(**case)
    wanted = [*verdict, draw_siblings(draw["logits"], *(case[name] for name in SAMPLING), draw["u"])]
    got = session_of(depth, width).run(None, case | draw)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    return verdict


def redraft(case):
    """Draw every node's children from its own row, as a drafter does."""
    width = case["uniforms"].shape[2] // 3
    depths = tree_encoding(case["parents"])[1]
    batch, size = case["parents"].shape
    for b in range(batch):
        filters = [case[name][b : b + 1] for name in SAMPLING]
        for node in range(size + 1):
            children = np.flatnonzero(case["parents"][b] == node)[:width]
            level = min(depths[b, node], case["uniforms"].shape[1] - 1)
            u = case["uniforms"][b : b + 1, level, DRAFT::3]
            drawn = draw_siblings(case["draft_logits"][b, node][None], *filters, u)[0]
            case["draft_tokens"][b, children] = drawn[: len(children)]


def make_case(
    rng, batch, size, vocabulary, shape, *, spread=1.0, noise=1.0, temperature=(1,), top_k=(0,), top_p=(1,)
):
    """Random trees, ragged counts, siblings drawn from a drafter that is more or less like the target."""
    target = (spread * rng.normal(size=(batch, size + 1, vocabulary))).astype(np.float32)
    depth, width = shape
    case = {
        "target_logits": target,
        "draft_tokens": rng.integers(0, vocabulary, (batch, size)),
        "parents": random_parents(rng, batch, size),
        "draft_counts": rng.integers(0, size + 1, batch) if rng.random() < 0.5 else np.full(batch, size),
        "draft_logits": (target + noise * rng.normal(size=target.shape)).astype(np.float32),
        "temperature": rng.choice(temperature, batch).astype(np.float32),
        "top_k": rng.choice(top_k, batch).astype(np.int64),
        "top_p": rng.choice(top_p, batch).astype(np.float32),
        "uniforms": uniforms(
            rng.integers(0, 2**63, batch).astype(np.uint64),
            np.zeros(batch, np.uint64),
            rng.integers(0, 1000, batch),
            depth + 1,
            lanes=width,
        ),
    }
    redraft(case)
    return case


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_functions_equal_the_reference(shape, seed):
    """25 cases a seed and shape: trees that fit the shape or not, ties, temperatures, filters, drafts."""
    rng = np.random.default_rng(seed)
    accepted = rejected = 0
    for _ in range(25):
        case = make_case(
            rng,
            int(rng.integers(1, 5)),
            int(rng.choice([0, 1, 2, 3, 5, 9, 12])),
            int(rng.choice([1, 2, 3, 7, 100, 513])),
            shape,
            spread=rng.choice([0.01, 1, 4, 50]),
            noise=rng.choice([0, 0.1, 1, 5]),
            temperature=(0, 0, 0.001, 0.5, 1, 1, 2, 1000),
            top_k=(0, 0, 1, 2, 5, 600, 2**31 - 1),
            top_p=(1, 1, 0.999999, 0.9, 0.5, 1e-9),
        )
        if rng.random() < 0.3:
            case["target_logits"] = np.round(case["target_logits"])
            case["draft_logits"] = np.round(case["draft_logits"])
            redraft(case)
        if rng.random() < 0.3:  # uniforms on the edges between tokens: 0, quarters, the largest
            edges = np.array([0, 0.25, 0.5, 0.75, 1 - 2**-24], np.float32)
            case["uniforms"] = rng.choice(edges, case["uniforms"].shape)
            redraft(case)
        if rng.random() < 0.2:  # drafts from elsewhere: repeated, outside the vocabulary, improbable
            size = case["draft_tokens"].shape
            case["draft_tokens"] = rng.integers(-1, case["target_logits"].shape[2] + 1, size)
        verdict = check(case)
        accepted += int(verdict.accepted.sum())
        rejected += int((verdict.accepted < case["draft_counts"]).sum())
    if shape[0]:
        assert accepted > 5
        assert rejected > 5


@pytest.mark.parametrize("seed", range(4))
def test_one_child_a_node_is_the_chain(seed):
    """Width 1 equals `verify_chain` with draft logits, token for token, in numpy and in ONNX."""
    rng = np.random.default_rng(100 + seed)
    for _ in range(40):
        case = make_case(
            rng,
            4,
            3,
            int(rng.choice([2, 5, 40])),
            (3, 1),
            noise=rng.choice([0, 0.3, 2]),
            temperature=(0, 0.7, 1),
            top_k=(0, 3),
            top_p=(1, 0.8),
        )
        case["parents"] = np.tile(np.arange(3), (4, 1))
        redraft(case)
        verdict = check(case)
        chain = [case["target_logits"], case["draft_tokens"], case["draft_counts"]]
        sampling = [case[name] for name in SAMPLING]
        wanted = verify_chain(*chain, case["draft_logits"][:, :3], *sampling, case["uniforms"])
        assert (verdict.accepted == wanted.accepted).all()
        assert (verdict.tokens == wanted.tokens).all()
        assert (verdict.finite == wanted.finite).all()


def full_tree(batch):
    """Two levels of three siblings each."""
    return np.tile([0, 0, 0, *(n for n in (1, 2, 3) for _ in range(3))], (batch, 1))


@pytest.mark.parametrize("accepts", [True, False])
def test_all_accepted_and_all_rejected(accepts):
    rng = np.random.default_rng(30)
    for _ in range(20):
        case = make_case(rng, 4, 12, 20, (2, 3), noise=0, temperature=(0, 1))
        case["parents"], case["draft_counts"] = full_tree(4), np.full(4, 12)
        if not accepts:  # the drafter's mass is where the target has none
            case["draft_logits"][:] = 0
            case["draft_logits"][..., :3] = 100
            case["target_logits"][..., :3] = -100
        redraft(case)
        assert (check(case).accepted == (2 if accepts else 0)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["target_logits", "draft_logits"])
def test_logits_that_are_not_finite(where, value):
    rng = np.random.default_rng(31)
    for top_k, top_p in (((0,), (1,)), ((3,), (0.9,))):
        for _ in range(15):
            case = make_case(rng, 4, 6, 40, (3, 2), temperature=(0, 1), top_k=top_k, top_p=top_p)
            case[where][1, rng.integers(1, 7), rng.integers(40)] = value
            verdict = check(case)
            refused = where == "target_logits" or case["temperature"][1] > 0
            assert verdict.finite.tolist() == [True, not refused, True, True]
            if refused:
                assert verdict.accepted[1] == 0
                assert (verdict.tokens[1] == -1).all()
                assert (verdict.path[1] == 0).all()


def test_nodes_beyond_the_count_may_hold_anything():
    rng = np.random.default_rng(32)
    for _ in range(20):
        case = make_case(rng, 3, 6, 30, (3, 2), temperature=(0, 1))
        before = verify_tree_drawn(**case)
        beyond = np.arange(6) >= case["draft_counts"][:, None]
        strange = rng.choice([-1, -100, 30, 10**9], (3, 6))
        case["draft_tokens"] = np.where(beyond, strange, case["draft_tokens"])
        assert (check(case).tokens == before.tokens).all()


def test_fewer_tokens_than_siblings():
    rng = np.random.default_rng(33)
    for heat, top_k in ((0, 0), (1, 0), (1, 2)):
        case = make_case(rng, 2, 3, 2 if not top_k else 9, (1, 3), temperature=(heat,), top_k=(top_k,))
        case["parents"][:] = 0
        case["draft_counts"][:] = 3
        redraft(case)
        assert (case["draft_tokens"][:, 2] == NO_TOKEN).all()
        assert (case["draft_tokens"][:, :2] >= 0).all()
        check(case)


def test_a_real_vocabulary():
    check(make_case(np.random.default_rng(34), 1, 4, 49152, (2, 2), spread=3, temperature=(1,)))


# -- what runs -------------------------------------------------------------------------------------


def operators_run(tmp_path, temperature) -> set[str]:
    session = load(2, 2, profile=tmp_path / "profile")
    case = make_case(np.random.default_rng(0), 2, 6, 2000, (2, 2), temperature=(temperature,))
    session.run(None, case | {"logits": case["draft_logits"][:, 0], "u": np.zeros((2, 2), np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    return {e["args"]["op_name"] for e in events if e.get("cat") == "Node" and "op_name" in e["args"]}


def test_a_greedy_batch_runs_no_sampling(tmp_path):
    run = operators_run(tmp_path, 0)
    assert {"ArgMax", "TopK"} <= run  # the best siblings are ranked
    assert not run & {"Div", "Clip", "GatherND"}


def test_a_sampled_batch_does_not_sort(tmp_path):
    run = operators_run(tmp_path, 1)
    assert "CumSum" in run
    assert "TopK" not in run


def test_operators_that_tensorrt_takes():
    for body in drawn_functions(3, 2):
        for node in all_nodes(body.node):
            assert node.op_type not in REFUSED
