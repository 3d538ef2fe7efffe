"""The real demo model, end to end: parity with transformers, and every method exact on real text."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from builders.checkpoints.heads.convert import convert_head
from engines.decoding import Decoder, Request
from engines.exactness import TOLERANCES, compare_greedy
from engines.sessions.onnxruntime import OnnxSession
from engines.text import TextCodec
from pipelines.build import Build, prompt_set
from pipelines.spec import load_spec
from pipelines.stages import StageCache

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINED = ("ngram", "medusa", "eagle", "eagle3", "draft_model")
CHECKPOINTS = Path(__file__).parents[2] / "build" / "checkpoints"
TARGET = CHECKPOINTS / "smollm2-135m"
TOKENS = 16
STOP = 2  # <|im_end|>
TEXT = "In 2024, 1,234 researchers met in Zürich; def f(x): return x**2  # naïve 🙂 approach, isn't it?"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(TARGET)


@pytest.fixture(scope="module")
def prompts(codec: TextCodec) -> list[list[int]]:
    return [codec.encode_chat([{"role": "user", "content": p["text"]}]) for p in prompt_set()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> StageCache:
    return StageCache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(reference: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy output of TOKENS tokens for each prompt, without the stop token."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
            )
        outputs.append([t for t in output[0, len(prompt) :].tolist() if t != STOP])
    return outputs


def test_logits_equal_transformers(reference: torch.nn.Module, codec: TextCodec, tmp_path: Path) -> None:
    ids = np.array([codec.encode(TEXT * 2)])
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)).logits.numpy()[0]
    half = ids.shape[1] // 2
    session, _ = zoo.make_session(TARGET, tmp_path, method="ngram", gamma=64, max_seq_len=512)
    session.reserve(ids.shape[1])
    session.step(zoo.step_inputs(ids[:, :half].copy(), [0]))
    out = session.step(
        zoo.step_inputs(ids[:, half : half + 1].copy(), [half], draft_tokens=ids[:, half + 1 :].copy()),
        want_logits=True,
    )
    assert out.logits is not None
    assert np.abs(out.logits[0] - expected[half:]).max() <= 1e-3


EXACT = [e for e in sorted(EXAMPLES.glob("*.yaml")) if "plain" not in e.stem and "int8" not in e.stem]


@pytest.mark.parametrize("example", EXACT, ids=[e.stem for e in EXACT])
def test_greedy_text_is_the_targets(
    example: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    cache: StageCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every shipped engine: all prompts decoded together with drafts, against transformers one by one."""
    monkeypatch.chdir(EXAMPLES.parent)
    build = Build(load_spec(example), cache, cache.root / "out")
    facts = build.facts
    session = OnnxSession(build.emit() / facts.graph, facts)
    found = Decoder(session, facts).run([Request(p, TOKENS) for p in prompts])
    for prompt, plain, completion in zip(prompts, expected, found, strict=True):

        def gap(i: int, ids: list[int] = prompt, plain: list[int] = plain) -> float:
            logits = np.sort(Decoder(session, facts).next_logits([*ids, *plain[:i]]))
            return float(logits[-1] - logits[-2])

        tokens = [t for t in completion.tokens if t != STOP]
        divergence = compare_greedy(plain, tokens, gap, TOLERANCES["F32"])
        assert divergence is None or divergence.allowed, divergence
    drafted = sum(c.acceptance.drafted for c in found)
    assert drafted > 0
    accepted = sum(c.acceptance.accepted for c in found)
    steps = sum(c.acceptance.steps for c in found)
    assert accepted / steps > (0.15 if facts.method in TRAINED else 0.02)  # chance: below 0.01


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
def test_a_shuffled_head_drafts_no_better_than_a_random_one(
    method: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    """What the shipped heads' acceptance rests on: destroyed, it is that of chance."""
    trained = tmp_path / "trained"
    convert_head(EXAMPLES / "heads" / f"smollm2-{method}", trained)
    generator = torch.Generator().manual_seed(0)
    (file,) = trained.glob("*.safetensors")
    tensors = load_file(file)
    rates = {}
    for name in ("trained", "shuffled", "random"):
        folder = tmp_path / name
        if name != "trained":
            shutil.copytree(trained, folder)
            changed = {k: _destroyed(v, name, generator) for k, v in tensors.items()}
            save_file(changed, folder / file.name)
        session, facts = zoo.make_session(
            TARGET, tmp_path / f"engine-{name}", method=method, gamma=3, drafter=folder, max_seq_len=512
        )
        found = Decoder(session, facts).run([Request(p, 2 * TOKENS) for p in prompts])
        rates[name] = sum(c.acceptance.accepted for c in found) / sum(c.acceptance.steps for c in found)
    assert rates["trained"] > 0.15
    assert rates["shuffled"] < 0.03
    assert abs(rates["shuffled"] - rates["random"]) < 0.03


def _destroyed(tensor: torch.Tensor, how: str, generator: torch.Generator) -> torch.Tensor:
    """A matrix with its rows shuffled, or random numbers of its own spread; others as they are."""
    if tensor.ndim < 2:
        return tensor
    if how == "shuffled":
        return tensor[torch.randperm(len(tensor), generator=generator)].contiguous()
    return torch.randn(tensor.shape, generator=generator) * tensor.float().std()
