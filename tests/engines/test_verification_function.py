"""The ONNX functions in onnxruntime: the reference's tokens, bit for bit, and no more work than needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from engines.sampling import EXP_COEFFICIENTS
from engines.uniforms import DRAFT, uniforms
from engines.verification import function
from engines.verification.reference import draw_tokens, verify_chain

INPUTS = {
    "target_logits": (TensorProto.FLOAT, ["B", "R", "V"]),
    "draft_tokens": (TensorProto.INT64, ["B", "G"]),
    "draft_counts": (TensorProto.INT64, ["B"]),
    "draft_logits": (TensorProto.FLOAT, ["B", "G", "V"]),
    "temperature": (TensorProto.FLOAT, ["B"]),
    "top_k": (TensorProto.INT64, ["B"]),
    "top_p": (TensorProto.FLOAT, ["B"]),
    "uniforms": (TensorProto.FLOAT, ["B", "R", 3]),
    "logits": (TensorProto.FLOAT, ["B", "V"]),
    "u": (TensorProto.FLOAT, ["B"]),
}
VERDICT = ((TensorProto.INT64, ["B"]), (TensorProto.INT64, ["B", "R"]), (TensorProto.BOOL, ["B"]))

# What TensorRT has no equivalent of.
REFUSED = {
    "Bernoulli",
    "BitwiseXor",
    "Compress",
    "CumProd",
    "Multinomial",
    "NonZero",
    "RandomUniform",
    "Unique",
}


class Calls:
    """Collects nodes, as a graph builder would."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def multi(self, op_type, *inputs, outputs, name="", domain="", **attributes):
        names = [f"{op_type}.{len(self.nodes)}:{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=name, domain=domain, **attributes))
        return names


def model(calls: int) -> onnx.ModelProto:
    """Every function, called `calls` times."""
    graph = Calls()
    outputs = []
    for _ in range(calls):
        for draft_logits in ("", "draft_logits"):
            names = function.verify_chain(
                graph,
                "target_logits",
                "draft_tokens",
                "draft_counts",
                draft_logits,
                "temperature",
                "top_k",
                "top_p",
                "uniforms",
            )
            outputs += [(name, *kind) for name, kind in zip(names, VERDICT, strict=True)]
        token = function.draw_token(graph, "logits", "temperature", "top_k", "top_p", "u")
        outputs.append((token, TensorProto.INT64, ["B"]))
    made = helper.make_model(
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
    onnx.checker.check_model(made)
    return made


def load(calls: int, profile: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    return onnxruntime.InferenceSession(
        model(calls).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@pytest.fixture(scope="module")
def session():
    return load(calls=2)  # twice: inlined bodies must not clash


def expected(case):
    names = ("temperature", "top_k", "top_p")
    filters = [case[name] for name in names]
    chain = [case[name] for name in ("target_logits", "draft_tokens", "draft_counts")]
    return [
        *verify_chain(*chain, None, *filters, case["uniforms"]),
        *verify_chain(*chain, case["draft_logits"], *filters, case["uniforms"]),
        draw_tokens(case["logits"], *filters, case["u"]),
    ]


def check(session, case):
    """Both calls of every function equal the reference; returns the reference's answers."""
    answers = expected(case)
    for got, wanted in zip(session.run(None, case), answers * 2, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    return answers


def make_case(
    rng, batch, gamma, vocabulary, *, spread=1.0, noise=1.0, temperature=(1,), top_k=(0,), top_p=(1,)
):
    """Random logits, drafts drawn from the drafter's distribution, ragged counts."""
    target = (spread * rng.normal(size=(batch, gamma + 1, vocabulary))).astype(np.float32)
    draft_logits = (target[:, :gamma] + noise * rng.normal(size=(batch, gamma, vocabulary))).astype(
        np.float32
    )
    case = {
        "target_logits": target,
        "draft_counts": rng.integers(0, gamma + 1, batch),
        "draft_logits": draft_logits,
        "temperature": rng.choice(temperature, batch).astype(np.float32),
        "top_k": rng.choice(top_k, batch).astype(np.int64),
        "top_p": rng.choice(top_p, batch).astype(np.float32),
        "uniforms": uniforms(
            rng.integers(0, 2**63, batch).astype(np.uint64),
            np.zeros(batch, np.uint64),
            rng.integers(0, 1000, batch),
            gamma + 1,
        ),
    }
    case["logits"] = target[:, 0]
    case["u"] = case["uniforms"][:, 0, DRAFT].copy()
    redraft(case)
    return case


def redraft(case):
    filters = [case[name] for name in ("temperature", "top_k", "top_p")]
    rows = range(case["draft_logits"].shape[1])
    drafts = [draw_tokens(case["draft_logits"][:, i], *filters, case["uniforms"][:, i, DRAFT]) for i in rows]
    batch = len(case["draft_counts"])
    case["draft_tokens"] = np.stack(drafts, 1) if drafts else np.zeros((batch, 0), np.int64)


@pytest.mark.parametrize("seed", range(15))
def test_functions_equal_the_reference(session, seed):
    """100 cases a seed: any batch, γ (0 too), V, spread, ties, temperatures, filters, drafts."""
    rng = np.random.default_rng(seed)
    accepted = rejected = 0
    for _ in range(100):
        case = make_case(
            rng,
            int(rng.integers(1, 6)),
            int(rng.integers(0, 6)),
            int(rng.choice([1, 2, 3, 7, 100, 257, 511, 513, 777])),
            spread=rng.choice([0.01, 1, 4, 50]),
            noise=rng.choice([0, 0.1, 1, 5]),
            temperature=(0, 0, 0.001, 0.5, 1, 2, 1000),
            top_k=(0, 0, 1, 2, 5, 512, 600, 2**31 - 1),
            top_p=(1, 1, 0.999999, 0.9, 0.5, 1e-9),
        )
        if rng.random() < 0.3:  # ties, of the logits and of the filters' thresholds
            case["target_logits"] = np.round(case["target_logits"])
            case["draft_logits"] = np.round(case["draft_logits"])
            redraft(case)
        if rng.random() < 0.3:  # uniforms on the edges between tokens: 0, quarters, the largest
            edges = np.array([0, 0.25, 0.5, 0.75, 1 - 2**-24], np.float32)
            case["uniforms"] = rng.choice(edges, case["uniforms"].shape)
            case["u"] = case["uniforms"][:, 0, DRAFT].copy()
            redraft(case)
        if rng.random() < 0.2:  # drafts from elsewhere: zero probability under either, greedy or not
            shape = case["draft_tokens"].shape
            case["draft_tokens"] = rng.integers(0, case["logits"].shape[1], shape)
        answers = check(session, case)
        accepted += int(answers[3].sum())
        rejected += int((answers[3] < case["draft_counts"]).sum())
    assert accepted > 20
    assert rejected > 20


@pytest.mark.parametrize("noise", [0, 100])
def test_all_accepted_and_all_rejected(session, noise):
    rng = np.random.default_rng(3)
    for _ in range(20):
        case = make_case(rng, 4, 4, 50, noise=noise, temperature=(0, 1))
        if noise:
            case["draft_tokens"] = case["target_logits"][:, :-1].argmin(-1)
            case["draft_logits"] = 100 * np.eye(50, dtype=np.float32)[case["draft_tokens"]]
            case["uniforms"][..., 1] = 0.999
        answers = check(session, case)
        assert (answers[3] == (0 if noise else case["draft_counts"])).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(session, value):
    rng = np.random.default_rng(4)
    for where in ("target_logits", "draft_logits"):
        for filtered in (False, True):
            for _ in range(20):
                top_k, top_p = ((3,), (0.9,)) if filtered else ((0,), (1,))
                case = make_case(rng, 4, 3, 40, temperature=(0, 1), top_k=top_k, top_p=top_p)
                case[where] = case[where].copy()
                case[where][1, rng.integers(3), rng.integers(40)] = value
                answers = check(session, case)
                assert answers[2][[0, 2, 3]].all()
                assert answers[2][1] == (where == "draft_logits")
                refused = where == "target_logits" or case["temperature"][1] > 0
                assert answers[5][1] != refused


def test_the_drafter_draws_inside_the_vocabulary_whatever_it_is_given(session):
    case = make_case(np.random.default_rng(5), 3, 1, 40, temperature=(1,))
    case["logits"] = np.array([np.nan, np.inf, -np.inf], np.float32)[:, None].repeat(40, 1)
    for top_p in (1, 0.5):
        case["top_p"][:] = top_p
        tokens = session.run(None, case)[6]
        assert ((tokens >= 0) & (tokens < 40)).all()


def test_drafts_beyond_the_count_may_be_anything(session):
    rng = np.random.default_rng(6)
    for _ in range(20):
        case = make_case(rng, 3, 4, 30, temperature=(0, 1))
        beyond = np.arange(4) >= case["draft_counts"][:, None]
        case["draft_tokens"] = np.where(
            beyond, rng.choice([-1, -100, 30, 10**9], (3, 4)), case["draft_tokens"]
        )
        check(session, case)


@pytest.mark.parametrize("top_p", [0.3, 0.99, 0.9999])
@pytest.mark.parametrize("top_k", [0, 600, 9000])
def test_filters_that_few_ranked_tokens_do_not_settle(session, top_p, top_k):
    vocabulary = 2 * function.RANKED[-1] + 1
    rng = np.random.default_rng(8)
    for spread in (0.1, 3):
        check(session, make_case(rng, 1, 1, vocabulary, spread=spread, top_k=(top_k,), top_p=(top_p,)))


def test_a_real_vocabulary(session):
    rng = np.random.default_rng(9)
    for _ in range(3):
        check(session, make_case(rng, 1, 4, 49152, spread=3, noise=0.5))


# -- what runs ------------------------------------------------------------------------------------


def operators_run(tmp_path, **filters) -> set[str]:
    session = load(calls=1, profile=tmp_path / "profile")
    session.run(None, make_case(np.random.default_rng(0), 2, 3, 2000, spread=5, **filters))
    events = json.loads(Path(session.end_profiling()).read_text())
    return {e["args"]["op_name"] for e in events if e.get("cat") == "Node" and "op_name" in e["args"]}


def test_a_greedy_batch_runs_no_sampling(tmp_path):
    run = operators_run(tmp_path, temperature=(0,), top_k=(5,), top_p=(0.5,))
    assert "ArgMax" in run
    assert not run & {"CumSum", "TopK", "Clip", "Div", "GatherND"}


def test_sampling_without_filters_does_not_sort(tmp_path):
    run = operators_run(tmp_path, temperature=(1,))
    assert "CumSum" in run
    assert "TopK" not in run


def test_filters_of_greedy_sequences_sort_nothing(session, tmp_path):
    rng = np.random.default_rng(1)
    case = make_case(rng, 2, 2, 100)
    case["temperature"][:] = 0, 1
    case["top_k"][:] = 3, 0
    check(session, case)
    profiled = load(calls=1, profile=tmp_path / "profile")
    profiled.run(None, case)
    assert "TopK" not in Path(profiled.end_profiling()).read_text()


def test_filters_sort(tmp_path):
    assert "TopK" in operators_run(tmp_path, temperature=(1,), top_k=(5,))


# -- the functions themselves ---------------------------------------------------------------------


def all_nodes(nodes):
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from all_nodes(attribute.g.node)


def test_operators_that_tensorrt_takes():
    for body in function.functions():
        for node in all_nodes(body.node):
            assert node.op_type not in REFUSED
            assert not (node.op_type.startswith("Scatter") and node.attribute)
            if node.op_type == "Cast":
                assert node.attribute[0].i in (TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64)


def test_constants_survive_the_text_form():
    body = next(f for f in function.functions() if f.name == "Exponential")
    floats = {np.float32(a.f) for node in body.node for a in node.attribute if a.name == "value_float"}
    assert {np.float32(c) for c in EXP_COEFFICIENTS} <= floats


def test_the_domains_face():
    names = {f.name for f in function.functions()}
    assert {function.VERIFY_CHAIN, function.VERIFY_CHAIN_SAMPLED, function.DRAW_TOKEN} <= names
    assert {f.domain for f in function.functions()} == {function.DOMAIN}
    assert all(re.fullmatch(r"[A-Z][A-Za-z]+", name) for name in names)
