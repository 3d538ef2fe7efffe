"""The real demo model, end to end: parity with transformers, and every method exact on real text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from transformers import AutoModelForCausalLM

from engines.bundle import EngineFacts
from engines.decoding import Decoder, Request
from engines.exactness import TOLERANCES, compare_greedy
from engines.sessions.onnxruntime import OnnxSession
from engines.text import TextCodec
from pipelines.build import prompt_set

pytestmark = pytest.mark.slow

CHECKPOINTS = Path(__file__).parents[2] / "build" / "checkpoints"
TARGET = CHECKPOINTS / "smollm2-135m"
DRAFTER = CHECKPOINTS / "smollm2-135m-first-8"
TEXT = "In 2024, 1,234 researchers met in Zürich; def f(x): return x**2  # naïve 🙂 approach, isn't it?"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(TARGET)


@pytest.fixture(scope="module")
def prompts(codec: TextCodec) -> list[list[int]]:
    return [codec.encode_chat([{"role": "user", "content": p["text"]}]) for p in prompt_set()]


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


def load(method: str, out: Path, gamma: int = 4) -> tuple[OnnxSession, EngineFacts]:
    return zoo.make_session(
        TARGET,
        out,
        method=method,
        gamma=gamma,
        exit_layer=15 if method == "layer_skip" else None,
        drafter=DRAFTER if method == "draft_model" else None,
        max_seq_len=512,
    )


def test_logits_equal_transformers(reference: torch.nn.Module, codec: TextCodec, tmp_path: Path) -> None:
    ids = np.array([codec.encode(TEXT * 2)])
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)).logits.numpy()[0]
    half = ids.shape[1] // 2
    session, _ = load("ngram", tmp_path, gamma=64)
    session.reserve(ids.shape[1])
    session.step(zoo.step_inputs(ids[:, :half].copy(), [0]))
    out = session.step(
        zoo.step_inputs(ids[:, half : half + 1].copy(), [half], draft_tokens=ids[:, half + 1 :].copy()),
        want_logits=True,
    )
    assert out.logits is not None
    assert np.abs(out.logits[0] - expected[half:]).max() <= 1e-3


@pytest.mark.parametrize("method", ["ngram", "draft_model", "layer_skip"])
def test_greedy_text_is_the_targets(
    method: str, reference: torch.nn.Module, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Eight prompts decoded together with drafts, against transformers one by one."""
    session, facts = load(method, tmp_path)
    requests = [Request(p, 24) for p in prompts]
    found = Decoder(session, facts).run(requests)
    for request, completion in zip(requests, found, strict=True):
        ids = torch.tensor([request.prompt])
        with torch.no_grad():
            output = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
            )
        expected = [t for t in output[0, ids.shape[1] :].tolist() if t != 2]

        def gap(i: int, request: Request = request, expected: list[int] = expected) -> float:
            logits = np.sort(Decoder(session, facts).next_logits([*request.prompt, *expected[:i]]))
            return float(logits[-1] - logits[-2])

        stopped = [t for t in completion.tokens if t != 2]
        divergence = compare_greedy(expected, stopped, gap, TOLERANCES["F32"])
        assert divergence is None or divergence.allowed, divergence
    drafted = sum(c.acceptance.drafted for c in found)
    assert drafted > 0
    if method == "ngram":
        assert sum(c.acceptance.accepted for c in found) / drafted > 0.3
