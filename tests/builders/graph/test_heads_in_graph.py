"""Drafts of heads in the fused step against plain torch forwards: chains, fixed and dynamic trees."""

from __future__ import annotations

from pathlib import Path

import heads_zoo
import numpy as np
import pytest
import torch
import zoo

from builders.checkpoints.heads.reader import read_head
from builders.checkpoints.reader import read_checkpoint
from engines.bundle import DynamicTree, EngineFacts, StaticTree
from engines.sessions.base import Pending, StepOutputs
from engines.trees import from_choices

GAMMA = 4
EAGLES = {
    "eagle": lambda m, f: heads_zoo.make_eagle(m, f),
    "eagle, no bias, borrowed embedding": lambda m, f: heads_zoo.make_eagle(
        m, f, fc_bias=False, own_embedding=False
    ),
    "eagle, biases, own lm_head": lambda m, f: heads_zoo.make_eagle(m, f, qkv_bias=True, own_lm_head=True),
    "eagle, first speculators format": lambda m, f: heads_zoo.make_eagle(m, f, spelling="speculators"),
    "eagle3": lambda m, f: heads_zoo.make_eagle3(m, f),
    "eagle3, all borrowed": lambda m, f: heads_zoo.make_eagle3(
        m, f, own_lm_head=False, own_embedding=False, heads=6, kv_heads=3, head_dim=8
    ),
    "eagle3, full vocabulary": lambda m, f: heads_zoo.make_eagle3(m, f, draft_vocab=None),
    "eagle3, narrower, biases": lambda m, f: heads_zoo.make_eagle3(m, f, hidden=36, qkv_bias=True),
    "specforge": lambda m, f: heads_zoo.make_specforge(m, f),
    "specforge, plain": lambda m, f: heads_zoo.make_specforge(m, f, fc_norm=False, norm_output=True),
    "speculators": lambda m, f: heads_zoo.make_speculators(m, f),
    "speculators, joint norm": lambda m, f: heads_zoo.make_speculators(
        m, f, norm_before_residual=False, norm_before_fc=True, norm_output=True
    ),
    "speculators, each norm, qk": lambda m, f: heads_zoo.make_speculators(m, f, fc_norm=True, qk_norm=True),
}
CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 1], [0, 0, 0], [0, 1, 2], [1, 0, 0], [0, 0, 0, 1]]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return heads_zoo.make_deep_model()


@pytest.fixture(scope="module")
def target(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save(model, tmp_path_factory.mktemp("heads") / "target")


def contexts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 97, length).tolist() for length in lengths]


class Drafter:
    """An engine, and what its head has been told: drafts behind any text, features read in pieces."""

    def __init__(
        self, target: Path, head: Path, out: Path, model: torch.nn.Module, **options: object
    ) -> None:
        read = read_head(head, read_checkpoint(target))
        self.taps = getattr(read, "taps", ())
        self.model = model
        self.session, self.facts = zoo.make_session(
            target,
            out,
            method=read.method,
            drafter=head,
            **options,  # type: ignore[arg-type]
        )

    def features(self, tokens: list[int]) -> torch.Tensor:
        return heads_zoo.target_features(self.model, tokens[:-1], self.taps)

    def draft(
        self,
        texts: list[list[int]],
        pieces: int = 1,
        counts: list[int] | None = None,
        threshold: float = 0.0,
    ) -> StepOutputs:
        """One step for texts of different lengths; what they hold is read in `pieces` calls."""
        batch = len(texts)
        self.session.reserve(90, 90)
        for piece in range(1, pieces):  # earlier calls only fill the drafter's cache
            self._step(
                texts,
                [(len(t) - 1) * (piece - 1) // pieces for t in texts],
                [(len(t) - 1) * piece // pieces for t in texts],
                [0] * batch,
            )
        starts = [(len(t) - 1) * (pieces - 1) // pieces for t in texts]
        return self._step(texts, starts, [len(t) - 1 for t in texts], counts or [GAMMA] * batch, threshold)

    def _step(
        self,
        texts: list[list[int]],
        starts: list[int],
        stops: list[int],
        counts: list[int],
        threshold: float = 0.0,
    ) -> StepOutputs:
        width = max(stop - start for start, stop in zip(starts, stops, strict=True))
        tokens = np.zeros((len(texts), width), np.int64)
        features = np.zeros((len(texts), width, self.facts.feature_width), np.float32)
        for row, (text, start, stop) in enumerate(zip(texts, starts, stops, strict=True)):
            tokens[row, : stop - start] = text[start + 1 : stop + 1]
            features[row, : stop - start] = self.features(text)[start:stop]
        pending = Pending(
            tokens=tokens,
            counts=np.array(stops) - np.array(starts),
            lengths=np.array(starts, np.int64),
            features=features if self.facts.draft_cache else self._last(texts),
        )
        last = np.array([[t[-1]] for t in texts], np.int64)
        return self.session.step(
            zoo.step_inputs(
                last,
                [40] * len(texts),  # the target's cache is empty: what it says does not matter here
                draft_counts=np.array(counts, np.int64),
                draft_threshold=np.full(len(texts), threshold, np.float32),
                uniforms=np.zeros((len(texts), self.facts.gamma + 1, self.facts.draws), np.float32),
                pending=pending,
            )
        )

    def _last(self, texts: list[list[int]]) -> np.ndarray:
        return np.stack([self.features(t)[-1:].numpy() for t in texts])


def drafted(outputs: StepOutputs, row: int) -> list[int]:
    assert outputs.drafted is not None
    return outputs.drafted[row, : outputs.verified[row]].tolist()


@pytest.mark.parametrize(("kind", "pieces"), [*((kind, 1) for kind in EAGLES), ("eagle", 3), ("eagle3", 3)])
def test_eagle_chain(kind: str, pieces: int, model: torch.nn.Module, target: Path, tmp_path: Path) -> None:
    """Ragged texts, read at once or in pieces of different lengths: the same drafts as one by one."""
    head = EAGLES[kind](model, tmp_path / "head")
    drafter = Drafter(target, head, tmp_path / "out", model, gamma=GAMMA)
    reference = heads_zoo.EagleReference(head, model)
    texts = contexts(1, (9, 2, 17, 30))
    outputs = drafter.draft(texts, pieces)
    for row, text in enumerate(texts):
        expected, _ = reference.draft(text, drafter.features(text), GAMMA)
        assert drafted(outputs, row) == expected


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "speculators, joint norm"])
def test_eagle_fixed_tree(kind: str, model: torch.nn.Module, target: Path, tmp_path: Path) -> None:
    head = EAGLES[kind](model, tmp_path / "head")
    tree = StaticTree(choices=tuple(map(tuple, CHOICES)))
    drafter = Drafter(target, head, tmp_path / "out", model, gamma=GAMMA, tree=tree)
    reference = heads_zoo.EagleReference(head, model)
    shape = from_choices(CHOICES, max_depth=9, max_nodes=99)
    texts = contexts(2, (5, 21))
    outputs = drafter.draft(texts)
    for row, text in enumerate(texts):
        nodes = [reference.root(text, drafter.features(text))]
        for parent, rank in zip(shape.parents, shape.ranks, strict=True):
            above = nodes[parent]
            nodes.append(reference.child(above, reference.best(above, rank + 1)[-1]))
        expected = [
            reference.best(nodes[parent], rank + 1)[-1]
            for parent, rank in zip(shape.parents, shape.ranks, strict=True)
        ]
        assert drafted(outputs, row) == expected


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "specforge"])
@pytest.mark.parametrize(("top_k", "size"), [(3, 8), (2, 30), (5, 5)])
def test_eagle_dynamic_tree(
    kind: str, top_k: int, size: int, model: torch.nn.Module, target: Path, tmp_path: Path
) -> None:
    head = EAGLES[kind](model, tmp_path / "head")
    tree = DynamicTree(top_k=top_k, nodes=size)
    drafter = Drafter(target, head, tmp_path / "out", model, gamma=3, tree=tree)
    reference = heads_zoo.EagleReference(head, model)
    texts = contexts(3, (6, 14, 3))
    outputs = drafter.draft(texts, pieces=2, counts=[3, 3, 2])
    for row, (text, depth) in enumerate(zip(texts, (3, 3, 2), strict=True)):
        root = reference.root(text, drafter.features(text))
        # The graph's paths are checked by the decoding tests.
        kept = heads_zoo.naive_dynamic_tree(reference, root, depth, top_k, size)
        assert sorted(drafted(outputs, row)) == sorted(path[-1] for path in kept)
        assert outputs.levels[row] == max(len(path) for path in kept)


@pytest.mark.parametrize("own_lm_head", [True, False], ids=["v1", "v2"])
@pytest.mark.parametrize(("layers", "vocab_size"), [(1, 97), (2, 97), (1, 60)])
def test_medusa(
    own_lm_head: bool, layers: int, vocab_size: int, model: torch.nn.Module, target: Path, tmp_path: Path
) -> None:
    """Rows of an lm_head behind the engine's vocabulary are padding, and never drafted."""
    head = heads_zoo.make_medusa(model, tmp_path / "head", heads=4, layers=layers, own_lm_head=own_lm_head)
    reference = heads_zoo.MedusaReference(head, model)
    texts = [[i % vocab_size for i in text] for text in contexts(4, (5, 11, 3))]
    shape = from_choices(CHOICES, max_depth=9, max_nodes=99)
    for name, options in {
        "chain": {},
        "tree": {"tree": StaticTree(choices=tuple(map(tuple, CHOICES)))},
    }.items():
        drafter = Drafter(target, head, tmp_path / name, model, gamma=GAMMA, vocab_size=vocab_size, **options)
        outputs = drafter.draft(texts)
        for row, text in enumerate(texts):
            logits = reference.logits(drafter.features(text)[-1])[:, :vocab_size]
            order = logits.argsort(-1, descending=True)
            if name == "chain":
                assert drafted(outputs, row) == order[:, 0].tolist()
                continue
            expected = [
                int(order[depth - 1, rank]) for depth, rank in zip(shape.depths[1:], shape.ranks, strict=True)
            ]
            assert drafted(outputs, row) == expected


@pytest.mark.parametrize("kind", ["eagle", "eagle, biases, own lm_head", "eagle3, full vocabulary"])
def test_padding_is_never_drafted(kind: str, model: torch.nn.Module, target: Path, tmp_path: Path) -> None:
    head = EAGLES[kind](model, tmp_path / "head")
    drafter = Drafter(target, head, tmp_path / "out", model, gamma=GAMMA, vocab_size=60)
    reference = heads_zoo.EagleReference(head, model)
    texts = [[i % 60 for i in text] for text in contexts(6, (5, 11, 3))]
    outputs = drafter.draft(texts)
    for row, text in enumerate(texts):
        node, expected = reference.root(text, drafter.features(text)), []
        for _ in range(GAMMA):
            expected.append(int(node.logits[:60].argmax()))
            node = reference.child(node, expected[-1])
        assert drafted(outputs, row) == expected


@pytest.mark.parametrize("kind", [*EAGLES, "medusa"])
def test_confidence_is_the_references_probability(
    kind: str, model: torch.nn.Module, target: Path, tmp_path: Path
) -> None:
    """A chain stops where the probability of its path, by the drafter, falls below the threshold.

    That the thresholds are a thousandth apart makes this the comparison of numbers: drafts alone would
    not show a head that is slightly wrong.
    """
    text = contexts(5, (12,))[0]
    if kind == "medusa":
        head = heads_zoo.make_medusa(model, tmp_path / "head", heads=GAMMA)
        drafter = Drafter(target, head, tmp_path / "out", model, gamma=GAMMA)
        logits = heads_zoo.MedusaReference(head, model).logits(drafter.features(text)[-1])
    else:
        head = EAGLES[kind](model, tmp_path / "head")
        drafter = Drafter(target, head, tmp_path / "out", model, gamma=GAMMA)
        _, logits = heads_zoo.EagleReference(head, model).draft(text, drafter.features(text), GAMMA)
    path = torch.softmax(logits.double(), -1).max(-1).values.cumprod(0).tolist()
    for probability in path:
        for threshold in (probability * 1.001, probability * 0.999):
            kept = sum(p >= threshold for p in path)
            assert drafter.draft([text], threshold=threshold).verified.tolist() == [kept]


def test_facts_name_the_shapes(model: torch.nn.Module, target: Path, tmp_path: Path) -> None:
    head = EAGLES["eagle3"](model, tmp_path / "head")
    _, facts = zoo.make_session(target, tmp_path / "out", method="eagle3", drafter=head, gamma=2)
    assert isinstance(facts, EngineFacts)
    assert facts.feature_width == 3 * 48
    assert facts.draft_cache is not None
    assert (facts.draft_cache.layers, facts.draft_cache.kv_heads, facts.draft_cache.head_dim) == (1, 2, 10)
