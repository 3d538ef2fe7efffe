"""The sampled output of whole engines follows the target's distribution, drafter good or bad.

A vocabulary of 5 and 3 output tokens give 125 outcomes whose exact probabilities transformers can
enumerate. With N seeds the chi-square statistic exceeds its limit by chance once in 10^6 runs; the
seeds are fixed, so the test does not flicker.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import heads_zoo
import numpy as np
import pytest
import scipy.stats
import torch
import zoo
from transformers import LlamaConfig, LlamaForCausalLM

from engines.bundle import DynamicTree, EngineFacts, LookaheadSize, StaticTree
from engines.decoding import Decoder, Request
from engines.sampling import SamplingParams
from engines.sessions.onnxruntime import OnnxSession

VOCABULARY, LENGTH, SEEDS = 5, 3, 4000
PROMPT = [1, 3, 1, 3]
SHAPE = {**zoo.COMMON, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}


def tiny(seed: int, noise: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model


def filtered(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Softmax after temperature, top-k, top-p: written independently of the engine."""
    scaled = logits.astype(np.float64) / sampling.temperature
    if sampling.top_k:
        scaled[scaled < np.sort(scaled)[-sampling.top_k]] = -np.inf
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


def exact(
    model: LlamaForCausalLM, sampling: SamplingParams, length: int = LENGTH
) -> dict[tuple[int, ...], float]:
    table: dict[tuple[int, ...], float] = {}
    for outcome in itertools.product(range(VOCABULARY), repeat=length):
        ids = torch.tensor([PROMPT + list(outcome)])
        with torch.no_grad():
            logits = model(ids).logits[0].double().numpy()
        rows = [filtered(logits[len(PROMPT) - 1 + i], sampling)[t] for i, t in enumerate(outcome)]
        table[outcome] = float(np.prod(rows))
    return table


def sample(
    session: OnnxSession, facts: EngineFacts, sampling: SamplingParams, gamma: int, length: int = LENGTH
) -> tuple[dict[tuple[int, ...], int], float]:
    decoder = Decoder(session, facts)
    requests = [
        Request(
            PROMPT,
            length,
            sampling=SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, seed=seed),
            stop_tokens=frozenset(),
            gamma=gamma,
        )
        for seed in range(SEEDS)
    ]
    counts: dict[tuple[int, ...], int] = {}
    accepted = drafted = 0
    for completion in decoder.run(requests):
        outcome = tuple(completion.tokens)
        counts[outcome] = counts.get(outcome, 0) + 1
        accepted += completion.acceptance.accepted
        drafted += completion.acceptance.drafted
    return counts, accepted / max(drafted, 1)


def assert_follows(counts: dict[tuple[int, ...], int], table: dict[tuple[int, ...], float]) -> None:
    impossible = [o for o in counts if table[o] == 0]
    assert not impossible
    common = [o for o, p in table.items() if p * SEEDS >= 5]
    observed = [counts.get(o, 0) for o in common]
    expected = [table[o] * SEEDS for o in common]
    observed.append(SEEDS - sum(observed))
    expected.append(SEEDS - sum(expected))
    if expected[-1] < 1e-6 * SEEDS:
        observed, expected = observed[:-1], expected[:-1]
        expected = [e * sum(observed) / sum(expected) for e in expected]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert statistic < scipy.stats.chi2.isf(1e-6, len(observed) - 1)
    distance = sum(abs(counts.get(o, 0) / SEEDS - p) for o, p in table.items()) / 2
    # The expected total variation of N draws over k cells is below sqrt(k / N) / 2.
    assert distance < np.sqrt(len(table) / SEEDS)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(1.0), SamplingParams(0.7, 4, 0.9)], ids=["plain", "filters"]
)
@pytest.mark.parametrize("drafter", ["good", "bad"])
def test_draft_model(sampling: SamplingParams, drafter: str, tmp_path: Path) -> None:
    target = zoo.save(tiny(0), tmp_path / "target")
    draft = tiny(0, noise=0.003) if drafter == "good" else tiny(123)
    session, facts = zoo.make_session(
        target,
        tmp_path / "b",
        method="draft_model",
        gamma=2,
        drafter=zoo.save(draft, tmp_path / "drafter"),
        max_seq_len=16,
        slots=64,
    )
    counts, rate = sample(session, facts, sampling, gamma=2)
    assert rate > 0.6 if drafter == "good" else rate < 0.75
    assert_follows(counts, exact(tiny(0), sampling))


@pytest.mark.parametrize("method", ["layer_skip", "ngram"])
def test_other_methods(method: str, tmp_path: Path) -> None:
    sampling = SamplingParams(0.9, 0, 0.95)
    session, facts = zoo.make_session(
        zoo.save(tiny(0), tmp_path / "target"),
        tmp_path / "b",
        method=method,
        gamma=2,
        exit_layer=1 if method == "layer_skip" else None,
        max_seq_len=16,
        slots=64,
    )
    counts, _ = sample(session, facts, sampling, gamma=2)
    assert_follows(counts, exact(tiny(0), sampling))


DRAWN = StaticTree(choices=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1)), drawn=True)
LIKELY = StaticTree(choices=((0,), (1,), (0, 0), (0, 1), (1, 0)))
HEADS: dict[str, tuple[str, dict[str, object]]] = {
    "eagle": ("eagle", {}),
    "eagle-drawn": ("eagle", {"tree": DRAWN}),
    "eagle3-reduced": ("eagle3", {}),
    "eagle3-drawn": ("eagle3", {"tree": DRAWN}),
    "eagle3-dynamic": ("eagle3", {"tree": DynamicTree(top_k=2, nodes=4), "confidence_threshold": 0.2}),
    "medusa-tree": ("medusa", {"tree": LIKELY}),
    "lookahead": ("lookahead", {"lookahead": LookaheadSize(window=2, ngram=3, guesses=2)}),
}


@pytest.mark.parametrize("mode", HEADS)
def test_heads_and_trees(mode: str, tmp_path: Path) -> None:
    """Random heads, four tokens: paths of two draft tokens are tried, accepted and rejected."""
    sampling, length = SamplingParams(0.9, 4, 0.97), 4
    model = tiny(0)
    method, options = HEADS[mode]
    head = None
    if method == "eagle":
        head = heads_zoo.make_eagle(model, tmp_path / "head")
    elif method == "eagle3":
        head = heads_zoo.make_eagle3(model, tmp_path / "head", draft_vocab=4, taps=(1, 2, 3))
    elif method == "medusa":
        head = heads_zoo.make_medusa(model, tmp_path / "head")
    session, facts = zoo.make_session(
        zoo.save(model, tmp_path / "target"),
        tmp_path / "b",
        method=method,
        gamma=2,
        drafter=head,
        max_seq_len=16,
        slots=64,
        **options,  # type: ignore[arg-type]
    )
    counts, rate = sample(session, facts, sampling, gamma=2, length=length)
    assert 0.02 < rate < 0.9
    assert_follows(counts, exact(model, sampling, length))


def test_typical_acceptance_is_not_exact(tmp_path: Path) -> None:
    """What makes it lossy is visible, and at temperature 0 it is exact."""
    model = tiny(0)
    session, facts = zoo.make_session(
        zoo.save(model, tmp_path / "target"),
        tmp_path / "b",
        method="medusa",
        gamma=2,
        drafter=heads_zoo.make_medusa(model, tmp_path / "head"),
        max_seq_len=16,
        slots=64,
        tree=LIKELY,
        verification="typical",
    )
    assert not facts.lossless
    sampling = SamplingParams(0.9)
    counts, _ = sample(session, facts, sampling, gamma=2, length=4)
    with pytest.raises(AssertionError):
        assert_follows(counts, exact(model, sampling, 4))
    decoder = Decoder(session, facts)
    greedy = [decoder.run([Request(PROMPT, 9, gamma=gamma)])[0].tokens for gamma in (0, 2)]
    assert greedy[0] == greedy[1]


def test_the_test_can_fail(tmp_path: Path) -> None:
    """Another model's samples are told apart."""
    session, facts = zoo.make_session(
        zoo.save(tiny(7), tmp_path / "m"), tmp_path / "b", max_seq_len=16, slots=64
    )
    counts, _ = sample(session, facts, SamplingParams(1.0), gamma=0)
    with pytest.raises(AssertionError):
        assert_follows(counts, exact(tiny(0), SamplingParams(1.0)))
