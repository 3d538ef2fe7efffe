"""A tree in the target's step: every row against transformers, and the cache after it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from transformers import PreTrainedModel

from engines.bundle import LookaheadSize
from engines.sessions.onnxruntime import OnnxSession

FAMILIES = ["llama", "mistral-window", "qwen2-window", "yarn-rope"]
PARENTS = [0, 0, 1, 1, 2, 3, 6]  # nodes 1 … 7: paths 1-3-6-7, 1-4, 2-5
DEPTH = 4


@torch.no_grad()
def logits_behind(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    return model(torch.tensor([tokens])).logits[0, -1].numpy()


def best_behind(model: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    text = list(tokens)
    for _ in range(count):
        text.append(int(logits_behind(model, text).argmax()))
    return text[len(tokens) :]


def path_to(node: int) -> list[int]:
    path = []
    while node:
        path.insert(0, node)
        node = PARENTS[node - 1]
    return path


def load(family: str, folder: Path) -> tuple[PreTrainedModel, OnnxSession]:
    model = zoo.make_model(family)
    session, _ = zoo.make_session(
        zoo.save(model, folder / "m"),
        folder / "b",
        method="lookahead",
        gamma=5,
        lookahead=LookaheadSize(window=5, ngram=3, guesses=4),
    )
    session.reserve(60)
    return model, session


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_cache(family: str, tmp_path: Path) -> None:
    """One sequence accepts a whole path, one a part, one nothing; lengths differ; then they go on."""
    model, session = load(family, tmp_path)
    rng = np.random.default_rng(5)
    texts = [rng.integers(3, 97, length).tolist() for length in (9, 4, 14)]
    for slot, text in enumerate(texts):
        session.step(zoo.step_inputs(np.array([text[:-1]]), [0], slot=slot))
    drafts = rng.integers(3, 97, (3, len(PARENTS)))
    for row, node in ((0, 7), (1, 4)):  # sequence 2 keeps random tokens
        right = best_behind(model, texts[row], len(path_to(node)))
        drafts[row, np.array(path_to(node)) - 1] = right
    wrong = [t for t in range(3, 97) if t != best_behind(model, texts[2], 1)[0]]
    drafts[2, :2] = wrong[:2]
    outputs = session.step(
        zoo.step_inputs(
            np.array([[t[-1]] for t in texts]),
            [len(t) - 1 for t in texts],
            draft_tokens=drafts,
            draft_parents=np.array([PARENTS] * 3),
            uniforms=np.zeros((3, DEPTH + 1, 3), np.float32),
        ),
        want_logits=True,
    )
    assert outputs.logits is not None and outputs.choice is not None
    for row, text in enumerate(texts):
        for node in range(len(PARENTS) + 1):
            told = [*text, *(int(drafts[row, n - 1]) for n in path_to(node))]
            expected = logits_behind(model, told)
            assert np.abs(outputs.logits[row, node] - expected).max() < 1e-3
            assert outputs.choice[row, node] == expected.argmax()
    assert outputs.accepted.tolist() == [4, 2, 0]
    texts = [
        [*text, *outputs.emitted[row, : outputs.accepted[row] + 1].tolist()] for row, text in enumerate(texts)
    ]
    after = session.step(
        zoo.step_inputs(np.array([[t[-1]] for t in texts]), [len(t) - 1 for t in texts]), want_logits=True
    )
    assert after.logits is not None
    for row, text in enumerate(texts):
        assert np.abs(after.logits[row, 0] - logits_behind(model, text)).max() < 1e-3


def test_a_context_before_the_tree(tmp_path: Path) -> None:
    """Several committed tokens and a tree in one call."""
    model, session = load("llama", tmp_path)
    rng = np.random.default_rng(6)
    text = rng.integers(3, 97, 12).tolist()
    session.step(zoo.step_inputs(np.array([text[:7]]), [0]))
    drafts = rng.integers(3, 97, (1, len(PARENTS)))
    drafts[0, [1, 4]] = best_behind(model, text, 2)
    outputs = session.step(
        zoo.step_inputs(
            np.array([text[7:]]),
            [7],
            draft_tokens=drafts,
            draft_parents=np.array([PARENTS]),
            uniforms=np.zeros((1, DEPTH + 1, 3), np.float32),
        )
    )
    assert outputs.accepted.tolist() == [2]
    text += outputs.emitted[0, :3].tolist()
    after = session.step(zoo.step_inputs(np.array([text[-1:]]), [len(text) - 1]), want_logits=True)
    assert after.logits is not None
    assert np.abs(after.logits[0, 0] - logits_behind(model, text)).max() < 1e-3
