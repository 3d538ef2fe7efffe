"""Logits of the emitted graph equal transformers', for every family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from transformers import Qwen2ForCausalLM

TOLERANCE = 1e-3


def reference_logits(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.float().numpy()


def close(ours: np.ndarray, reference: np.ndarray) -> bool:
    return float(np.abs(ours - reference).max()) <= TOLERANCE


@pytest.mark.parametrize("family", sorted(zoo.FAMILIES))
def test_every_row_of_a_chain_equals_transformers(family: str, tmp_path: Path) -> None:
    model = zoo.make_model(family)
    session, _ = zoo.make_session(zoo.save(model, tmp_path / "m"), tmp_path / "b", gamma=40)
    session.reserve(41)
    ids = np.random.default_rng(1).integers(3, 97, (2, 40))
    out = session.step(
        zoo.step_inputs(ids[:, :1].copy(), [0, 0], draft_tokens=ids[:, 1:].copy()), want_logits=True
    )
    assert out.logits is not None
    assert close(out.logits, reference_logits(model, ids))


@pytest.mark.parametrize("family", sorted(zoo.FAMILIES))
def test_ragged_batch_with_past(family: str, tmp_path: Path) -> None:
    """Prompts of several lengths, padded together, then a verify step over the filled cache."""
    model = zoo.make_model(family)
    session, _ = zoo.make_session(zoo.save(model, tmp_path / "m"), tmp_path / "b", gamma=8)
    session.reserve(60)
    rng = np.random.default_rng(2)
    lengths = [3, 17, 9]
    ids = rng.integers(3, 97, (3, 30))
    prompts = np.zeros((3, 17), np.int64)
    for row, length in enumerate(lengths):
        prompts[row, :length] = ids[row, :length]
    first = session.step(
        zoo.step_inputs(prompts, [0, 0, 0], token_counts=np.array(lengths, np.int64)), want_logits=True
    )
    verify_rows = np.stack([ids[r, n : n + 6] for r, n in enumerate(lengths)])
    second = session.step(
        zoo.step_inputs(verify_rows[:, :1].copy(), lengths, draft_tokens=verify_rows[:, 1:].copy()),
        want_logits=True,
    )
    assert first.logits is not None
    assert second.logits is not None
    for row, length in enumerate(lengths):
        reference = reference_logits(model, ids[row : row + 1, : length + 6])[0]
        assert close(first.logits[row, 0], reference[length - 1])
        assert close(second.logits[row], reference[length:])


def test_rejected_rows_leave_no_trace(tmp_path: Path) -> None:
    """After wrong drafts, the next step reads the same cache as if they had never been tried."""
    model = zoo.make_model("llama")
    session, _ = zoo.make_session(zoo.save(model, tmp_path / "m"), tmp_path / "b", gamma=4)
    session.reserve(40)
    ids = np.random.default_rng(3).integers(3, 97, (1, 12))
    session.step(zoo.step_inputs(ids[:, :10].copy(), [0]))
    session.step(zoo.step_inputs(ids[:, 10:11].copy(), [10], draft_tokens=np.array([[5, 6, 7, 8]])))
    out = session.step(zoo.step_inputs(ids[:, 11:12].copy(), [11]), want_logits=True)
    assert out.logits is not None
    assert close(out.logits[0, 0], reference_logits(model, ids)[0, 11])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_compute_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = zoo.save(zoo.make_model("qwen2"), tmp_path / "m", dtype)
    # Loaded anew: the saved model's rotary frequencies were rounded to 16 bits with its weights.
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    session, _ = zoo.make_session(folder, tmp_path / "b", gamma=20)
    session.reserve(30)
    ids = np.random.default_rng(4).integers(3, 97, (1, 20))
    out = session.step(
        zoo.step_inputs(ids[:, :1].copy(), [0], draft_tokens=ids[:, 1:].copy()), want_logits=True
    )
    assert out.logits is not None
    assert close(out.logits, reference_logits(model, ids))


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = zoo.make_model("qwen3")
    model.save_pretrained(tmp_path / "m", max_shard_size="40KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    session, _ = zoo.make_session(tmp_path / "m", tmp_path / "b")
    ids = np.random.default_rng(7).integers(3, 97, (1, 9))
    out = session.step(zoo.step_inputs(ids, [0]), want_logits=True)
    assert out.logits is not None
    assert close(out.logits[0, 0], reference_logits(model, ids)[0, -1])


def test_padded_vocabulary_rows_are_cut(tmp_path: Path) -> None:
    model = zoo.make_model("llama-tied")
    folder = zoo.save(model, tmp_path / "m")
    session, _ = zoo.make_session(folder, tmp_path / "b", vocab_size=90)
    session.reserve(10)
    ids = np.random.default_rng(5).integers(3, 90, (1, 6))
    out = session.step(zoo.step_inputs(ids, [0]), want_logits=True)
    assert out.logits is not None
    assert out.logits.shape == (1, 1, 90)
    assert close(out.logits[0, 0], reference_logits(model, ids)[0, -1, :90])


def test_growing_and_shrinking_the_cache_keeps_it(tmp_path: Path) -> None:
    model = zoo.make_model("llama")
    folder = zoo.save(model, tmp_path / "m")
    session, _ = zoo.make_session(folder, tmp_path / "b", max_seq_len=600)
    ids = np.random.default_rng(6).integers(3, 97, (1, 20))
    session.reserve(400)
    session.step(zoo.step_inputs(ids[:, :12].copy(), [0]))
    session.reserve(20)
    session.step(zoo.step_inputs(ids[:, 12:19].copy(), [12]))
    session.reserve(599)
    out = session.step(zoo.step_inputs(ids[:, 19:].copy(), [19]), want_logits=True)
    assert out.logits is not None
    assert close(out.logits[0, 0], reference_logits(model, ids)[0, -1])
