"""The deployment spec: every error names file, line and key, what was found and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.errors import TrtspecError
from pipelines.spec import SpecError, load_spec

GOOD = "name: demo\ntarget: {checkpoint: m}\n"
HEAD = "name: demo\ntarget: {{checkpoint: m}}\ndrafter: {{method: eagle3, checkpoint: h, {}}}\n"


def load(tmp_path: Path, text: str | bytes) -> object:
    file = tmp_path / "spec.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_spec(file)


def test_defaults(tmp_path: Path) -> None:
    spec = load_spec(_write(tmp_path, GOOD))
    assert spec.drafter.method == "none"
    assert spec.drafter.draft_length == 0
    assert spec.verification == "exact"
    assert spec.limits.max_batch_size == 8


def _write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "good.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("example", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=str)
def test_examples_are_valid(example: Path) -> None:
    assert load_spec(example).name == example.stem


@pytest.mark.parametrize(
    ("text", "line", "key", "says"),
    [
        (GOOD + "limit: {}\n", 3, "limit", "Did you mean limits?"),
        (GOOD + "drafter: {metod: ngram}\n", 3, "drafter.metod", "Did you mean method?"),
        (GOOD + "drafter:\n  method: ngram\n  gamma: 0\n", 5, "drafter.gamma", "greater than or equal to 1"),
        (GOOD + "drafter: {method: ngram, gamma: 17}\n", 3, "drafter.gamma", "less than or equal to 16"),
        (GOOD + "drafter: {method: ngram, gamma: two}\n", 3, "drafter.gamma", "'two'"),
        (GOOD + "drafter: {method: ngram, gamma: true}\n", 3, "drafter.gamma", "True"),
        (GOOD + "drafter: {method: ngram, gamma: 4.0}\n", 3, "drafter.gamma", "4.0"),
        (GOOD + "drafter: {method: nonsense}\n", 3, "drafter.method", "'none', 'draft_model'"),
        (GOOD + "drafter: {method: eagle3}\n", 3, "drafter", "method eagle3 needs a checkpoint"),
        (GOOD + "drafter: {method: ngram, checkpoint: m}\n", 3, "drafter", "checkpoint belongs to method"),
        (GOOD + "drafter: {method: ngram, tree: [[0]]}\n", 3, "drafter", "tree belongs to method medusa"),
        (HEAD.format("tree: mc_sim_7b_64"), 3, "drafter.tree", "no tree is named 'mc_sim_7b_64'"),
        (HEAD.format("tree: [[0], [0, 0], [1, 0]]"), 3, "drafter", "tree.not-prefix-closed"),
        (HEAD.format("tree: [[0], [0]]"), 3, "drafter", "tree.duplicate"),
        (HEAD.format("tree: [[0], ['x']]"), 3, "drafter.tree", "'x'"),
        (HEAD.format("tree: {top_k: 4}"), 3, "drafter.tree", "drafter.tree.nodes is missing"),
        (HEAD.format("tree: {top_k: 4, nodes: 9, node: 1}"), 3, "drafter.tree", "unknown key 'node'"),
        (HEAD.format("tree: [[0], [0, 0]], gamma: 3"), 3, "drafter", "a tree of 2 levels"),
        (
            HEAD.format("confidence_threshold: 2"),
            3,
            "drafter.confidence_threshold",
            "less than or equal to 1",
        ),
        (HEAD.format("tree: [[0], [1]], confidence_threshold: 0.5"), 3, "drafter", "not a fixed tree"),
        (GOOD + "drafter: {method: lookahead, lookahead: {ngram: 1}}\n", 3, "lookahead.ngram", "equal to 2"),
        (GOOD + "drafter: {method: lookahead, gamma: 3}\n", 3, "drafter", "gamma belongs to method"),
        (GOOD + "quantization: {scheme: fp8}\n", 3, "quantization.scheme", "not in this version"),
        (GOOD + "verification: typical\n", 1, "", "typical without draft tokens"),
        (
            GOOD + "compile: [{compiler: tensorrt}]\n",
            3,
            "compile.0.compiler",
            "'tensorrt' is not in this version",
        ),
        (GOOD + "compile: []\n", 3, "compile", "exactly one"),
        (GOOD + "drafter: {method: ngram, exit_layer: 3}\n", 3, "drafter", "belongs to method layer_skip"),
        (GOOD + "drafter: {method: none, gamma: 3}\n", 3, "drafter", "gamma belongs to method"),
        (GOOD + "drafter: {method: draft_model}\n", 3, "drafter", "needs a checkpoint"),
        (GOOD + "drafter: {method: layer_skip}\n", 3, "drafter", "needs exit_layer"),
        (GOOD + "limits: {max_seq_len: 1}\n", 3, "limits.max_seq_len", "greater than or equal to 2"),
        (GOOD + "limits: {max_batch_size: -3}\n", 3, "limits.max_batch_size", "-3"),
        ("name: ../x\ntarget: {checkpoint: m}\n", 1, "name", "'../x'"),
        ("target: {checkpoint: m}\n", 1, "name", "missing"),
        ("name: demo\n", 1, "target", "missing"),
        (GOOD + "name: again\n", 3, "name", "stands twice"),
        (GOOD + "limits: {max_seq_len: 5, max_seq_len: 6}\n", 3, "limits.max_seq_len", "stands twice"),
        (GOOD + "drafter: [\n", 4, "", "not YAML"),
        (GOOD + "verification: !!bool maybe\n", 3, "verification", "'maybe'"),
        (GOOD + "verification: !!int ''\n", 3, "verification", "''"),
        (GOOD + "verification: !!timestamp x\n", 3, "verification", "'x'"),
        (GOOD + "drafter: {method: ngram, gamma: yes}\n", 3, "drafter.gamma", "True"),
        (GOOD + "drafter: {method: ngram, gamma: '4'}\n", 3, "drafter.gamma", "'4'"),
        (GOOD + "limits: {max_seq_len: 64.0}\n", 3, "limits.max_seq_len", "64.0"),
        (GOOD + "limits: {max_batch_size: null}\n", 3, "limits.max_batch_size", "None"),
        ("name: 2026-01-02\ntarget: {checkpoint: m}\n", 1, "name", "2026"),
        ("name: no\ntarget: {checkpoint: m}\n", 1, "name", "False"),
        ("name: demo\ntarget: {checkpoint: 5}\n", 2, "target.checkpoint", "5"),
        ("name: demo\ntarget: m\n", 2, "target", "'m'"),
        (GOOD + "drafter: [ngram]\n", 3, "drafter", "['ngram']"),
        (GOOD + "drafter: {method: [ngram]}\n", 3, "drafter.method", "['ngram']"),
        (GOOD + "? [a, b]\n: c\n", 3, "", "unknown key"),
        (GOOD + "<<: {verification: greedy}\n", 3, "<<", "unknown key"),
        (GOOD + "---\nname: second\n", 3, "", "not YAML"),
        (GOOD + "drafter: &d {method: ngram}\nquantization: *d\n", 4, "", "an alias"),
        (GOOD + "drafter:\n" + "".join(" " * i + "-\n" for i in range(1, 40)), 19, "", "levels"),
        (GOOD + "drafter: !!python/object/apply:os.system [ls]\n", 3, "drafter", ""),
    ],
)
def test_errors_name_the_place(tmp_path: Path, text: str, line: int, key: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text)
    error = caught.value
    assert f"spec.yaml:{line}" in error.place
    assert key in str(error)
    assert says in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "text",
    ["", "- a\n", "just text", "a: &x 1\nb: *x\n", b"\xff\xfe", "x: " + "[" * 1_000_000, "name: [\x00]"],
    ids=["empty", "list", "text", "alias", "not utf-8", "deep", "control character"],
)
def test_hostile_files(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(TrtspecError) as caught:
        load(tmp_path, text)
    assert caught.value.exit_code == 2


def test_too_large(tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match="larger"):
        load(tmp_path, GOOD + "#" * (1 << 20))
