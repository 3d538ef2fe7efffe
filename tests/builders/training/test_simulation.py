"""Unrolled for all rows at once equals one chain after the other, as an engine drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from published import eagle3_chain, eagle_chain, medusa_drafts

from builders.training.dialogue import Conversation, states_of
from builders.training.drafters import Drafter, Eagle, Eagle3, Medusa, Target, shift
from builders.training.features import FeatureStore
from builders.training.layers import LayerShape
from builders.training.objective import chains, simulate
from builders.training.states import as_bytes

SHAPE = LayerShape(hidden=24, intermediate=20, heads=6, kv_heads=2, head_dim=10, eps=1e-5, rope_theta=50.0)
CONFIG: dict[str, object] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rope_theta": 50.0,
    "rms_norm_eps": 1e-5,
}
VOCAB, START, GAMMA = 31, 5, 4


def drafter_of(method: str) -> Drafter:
    torch.manual_seed(3)
    target = Target(torch.randn(VOCAB, 24), torch.randn(VOCAB, 24), torch.rand(24) + 0.5)
    vocabulary = torch.tensor([0, 2, 3, 5, 7, 8, 11, 12, 13, 17, 19, 20, 23, 28, 30])
    drafter: Drafter
    if method == "medusa":
        drafter = Medusa(target, vocabulary, 4, 2)
    else:
        drafter = (Eagle if method == "eagle" else Eagle3)(target, vocabulary, SHAPE)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return drafter


def published_drafts(drafter: Drafter, ids: list[int], states: torch.Tensor) -> list[int]:
    """Drafts after `ids`, of which the target has not read the last."""
    tensors = {n.removeprefix("heads."): p.detach() for n, p in drafter.named_parameters()}
    target = drafter.target
    hidden, taps = states[: len(ids) - 1, :24], states[: len(ids) - 1, 24:]
    if isinstance(drafter, Medusa):
        return medusa_drafts(tensors, target.lm_head, hidden[-1])
    if isinstance(drafter, Eagle):
        return eagle_chain(tensors, CONFIG, target.embedding, target.lm_head, ids, hidden, GAMMA)
    tensors["d2t"] = drafter.vocabulary - torch.arange(len(drafter.vocabulary))
    return eagle3_chain(tensors, CONFIG, target.embedding, drafter.rows, ids, taps, GAMMA)


def store_of(folder: Path, conversations: list[Conversation]) -> FeatureStore:
    torch.manual_seed(5)
    file = folder / "conversations.jsonl"
    with file.open("w") as out, states_of(file).open("wb") as states:
        for conversation in conversations:
            out.write(conversation.to_json() + "\n")
            states.write(as_bytes(torch.randn(len(conversation.ids), 96).bfloat16()))
    return FeatureStore([file], 24)


def easy_conversations(drafter: Drafter, count: int) -> list[Conversation]:
    """Random ids; `make_easy` then replaces answers so that some drafts are right."""
    rng = np.random.default_rng(1)
    return [
        Conversation(i, f"prompt {i}", tuple(int(x) for x in rng.integers(0, VOCAB, 14 + i)), START, 0.0)
        for i in range(count)
    ]


def make_easy(drafter: Drafter, store: FeatureStore, folder: Path) -> FeatureStore:
    """Answers that say what the drafter drafts, but for every fourth token."""
    made = []
    for i, conversation in enumerate(store.conversations):
        states = store.batch([i], taps=True, device=torch.device("cpu"))
        assert states.taps is not None
        rows = torch.cat([states.hidden, states.taps], -1)[0].float()
        ids = list(conversation.ids[: START + 1])
        while len(ids) < len(conversation.ids):
            ids += [*published_drafts(drafter, ids, rows)[:3], int(conversation.ids[len(ids) - 1])]
        made.append(Conversation(i, conversation.prompt, tuple(ids[: len(conversation.ids)]), START, 0.0))
    return store_of(folder, made)  # the seed is the same: so are the states


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_simulation_equals_drafting_row_by_row(method: str, tmp_path: Path) -> None:
    drafter = drafter_of(method)
    (tmp_path / "easy").mkdir()
    first = store_of(tmp_path, easy_conversations(drafter, 4))
    store = make_easy(drafter, first, tmp_path / "easy")
    steps, accepted = 0, np.zeros(GAMMA + 1, np.int64)
    for i, conversation in enumerate(store.conversations):
        batch = store.batch([i], taps=True, device=torch.device("cpu"))
        assert batch.taps is not None
        rows = torch.cat([batch.hidden, batch.taps], -1)[0].float()
        known = START + 1  # the prompt and the first token, which the target's first step gave
        while known < len(conversation.ids):
            drafts = published_drafts(drafter, list(conversation.ids[:known]), rows)
            truth = conversation.ids[known : known + GAMMA]
            right = 0
            while right < len(truth) and drafts[right] == truth[right]:
                right += 1
            accepted[right] += 1
            steps += 1
            known += right + 1
    found = simulate(drafter, store, range(4), GAMMA, torch.device("cpu"))
    assert (found.steps, found.accepted) == (steps, int((accepted * np.arange(GAMMA + 1)).sum()))
    assert found.accepted > 5  # else nothing was compared
    assert found.per_position == pytest.approx([accepted[i + 1 :].sum() / steps for i in range(GAMMA)])


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_every_chain_reads_its_own_drafts(method: str, tmp_path: Path) -> None:
    """Also behind a wrong draft, what is drafted is what an engine would draft."""
    drafter = drafter_of(method)
    store = store_of(tmp_path, easy_conversations(drafter, 3))
    batch = store.batch([0, 1, 2], taps=True, device=torch.device("cpu"))
    assert batch.taps is not None
    with torch.no_grad():
        drafts, _ = chains(drafter, batch, GAMMA)
    for row, conversation in enumerate(store.conversations):
        states = torch.cat([batch.hidden, batch.taps], -1)[row].float()
        for t in range(START - 1, len(conversation.ids) - 1 - GAMMA):
            wanted = published_drafts(drafter, list(conversation.ids[: t + 2]), states)
            assert [int(drafts[k][row, t]) for k in range(GAMMA)] == wanted


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_training_reads_accepted_drafts(method: str, tmp_path: Path) -> None:
    """Trained and simulated features agree where drafts are right."""
    drafter = drafter_of(method)
    (tmp_path / "easy").mkdir()
    store = make_easy(drafter, store_of(tmp_path, easy_conversations(drafter, 2)), tmp_path / "easy")
    batch = store.batch([0, 1], taps=True, device=torch.device("cpu"))
    with torch.no_grad():
        trained = drafter.features(batch, GAMMA)
        _, right = chains(drafter, batch, GAMMA)
        simulated = drafter.features(batch, GAMMA, lambda k, _: shift(batch.ids, 2 + k))
    for one, other in zip(trained, simulated, strict=True):
        torch.testing.assert_close(one, other)
    assert any(bool(r.any()) for r in right[1:])
