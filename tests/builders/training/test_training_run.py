"""Runs from end to end on a tiny target: what is learnt, repeated, resumed, refused, written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from published import eagle3_chain, eagle_chain, medusa_drafts
from safetensors import safe_open
from tiny_target import STOP, VOCAB, save_tiny_target, write_text
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from builders.checkpoints.heads.reader import read_head
from builders.checkpoints.heads.types import EagleHead
from builders.training import loop
from builders.training import run as run_module
from builders.training.corpus import GenerationPlan
from builders.training.loop import Progress, TrainPlan, train
from builders.training.run import (
    BusyError,
    DivergedError,
    NoDeviceError,
    OtherSettingsError,
    OutputTakenError,
    Sizes,
    TargetTooSmallError,
    TrainingRun,
    UnfinishedRunError,
)
from builders.training.text import TrainingTextError

METHODS = ("medusa", "eagle", "eagle3", "draft_model")
PLAN = TrainPlan(seed=4, steps=10, batch_tokens=256, learning_rate=1e-2, precision="fp32")
SIZES = Sizes(layers=2, draft_vocab=20, intermediate=24)
EXCLUDED = ("what is 7?",)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "GenerationPlan", partial(GenerationPlan, max_answer=24))


def make(method: str, target: Path, text: Path, place: Path, **changes: object) -> TrainingRun:
    base = TrainingRun(
        method=method,
        target=target,
        out=place / method,
        work=place / "work",
        plan=PLAN,
        sizes=SIZES,
        text=text,
        device="cpu",
        excluded=EXCLUDED,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def silent(_: object) -> None:
    pass


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@pytest.mark.parametrize("method", METHODS)
def test_training_lowers_the_loss(method: str, target: Path, tmp_path: Path) -> None:
    text = tmp_path / "prompts.jsonl"
    text.write_text("".join(json.dumps({"prompt": f"what is {i}?"}) + "\n" for i in range(60)))
    # With one step, the loss is measured after hardly anything was learnt: the warm-up has just begun.
    plan = replace(PLAN, steps=1, learning_rate=1e-6)
    before = make(method, target, text, tmp_path / "a", plan=plan).run(silent, silent)
    after = make(method, target, text, tmp_path / "b", plan=replace(PLAN, steps=30)).run(silent, silent)
    assert after.loss < before.loss - 0.01


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_the_same_seed_gives_the_same_weights(method: str, target: Path, text: Path, tmp_path: Path) -> None:
    for place in ("a", "b"):
        make(method, target, text, tmp_path / place, store="fp32").run(silent, silent)
    one, other = tensors_of(tmp_path / "a" / method), tensors_of(tmp_path / "b" / method)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_seed_gives_other_weights(target: Path, text: Path, tmp_path: Path) -> None:
    make("eagle", target, text, tmp_path / "a").run(silent, silent)
    make("eagle", target, text, tmp_path / "b", plan=replace(PLAN, seed=5)).run(silent, silent)
    one, other = tensors_of(tmp_path / "a/eagle"), tensors_of(tmp_path / "b/eagle")
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_a_stopped_run_goes_on_to_the_same_bits(
    method: str, target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(method, target, text, tmp_path / "whole", store="fp32").run(silent, silent)

    def stopping(*arguments: object, **named: object) -> object:
        return train(*arguments, **named, save_seconds=0, stop_after=7)  # type: ignore[arg-type]

    stopped = make(method, target, text, tmp_path / "parts", store="fp32")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_module, "train", stopping)
        stopped.run(silent, silent)
    assert not stopped.out.exists()
    with pytest.raises(UnfinishedRunError):
        stopped.run(silent, silent)
    trained = replace(stopped, resume=True).run(silent, silent)
    assert trained.steps == PLAN.steps
    whole, parts = tensors_of(tmp_path / "whole" / method), tensors_of(tmp_path / "parts" / method)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    with pytest.raises(OtherSettingsError, match="plan"):
        replace(stopped, resume=True, out=tmp_path / "x", plan=replace(PLAN, learning_rate=0.5)).run(
            silent, silent
        )
    other_text = write_text(tmp_path / "text.jsonl", 50)
    with pytest.raises(OtherSettingsError, match="data"):
        replace(stopped, resume=True, out=tmp_path / "x", text=other_text).run(silent, silent)


def test_the_clock_ends_a_run_and_progress_is_shown(
    target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_SHOW_SECONDS", 0.05)
    plan = replace(PLAN, steps=None, minutes=0.02)
    shown: list[Progress] = []
    trained = make("medusa", target, text, tmp_path, plan=plan).run(silent, shown.append)
    assert trained.minutes >= 0.02
    assert len(shown) >= 3
    assert [p.step for p in shown] == sorted({p.step for p in shown})
    for progress in shown:
        assert progress.share > 0
        assert progress.loss > 0
        assert progress.seconds_left == pytest.approx(max(0, 1.2 * (1 - progress.share)), abs=0.3)
    measured = [p.held_out for p in shown if p.held_out is not None]
    assert measured
    assert all(loss > 0 and acceptance.steps > 0 for loss, acceptance in measured)
    assert trained.steps > 0


@pytest.mark.parametrize("store", ["fp8", "fp16"])
@pytest.mark.parametrize("method", METHODS)
def test_others_read_what_was_written(
    method: str, store: str, target: Path, text: Path, tmp_path: Path
) -> None:
    """Drafts of the stored file, read by published names alone, are those that were measured."""
    run = make(method, target, text, tmp_path, store=store)
    trained = run.run(silent, silent)
    tensors, config = tensors_of(run.out), json.loads((run.out / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    assert isinstance(model, LlamaForCausalLM)
    embedding = model.model.embed_tokens.weight.detach()
    for name in [n for n in tensors if n.endswith("_scale")]:
        scale, weight = tensors.pop(name), tensors[name.removesuffix("_scale")]
        assert (weight.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert scale.shape == (weight.shape[0], 1)
        tensors[name.removesuffix("_scale")] = weight.float() * scale
    floating = {t.dtype for t in tensors.values() if t.dtype.is_floating_point}
    expected = {"fp8": {torch.float32, torch.float16}, "fp16": {torch.float16}, "fp32": {torch.float32}}
    assert floating <= expected[store]
    vocabulary_sized = {n for n in tensors if "embed_tokens" in n or "lm_head" in n}
    assert bool(vocabulary_sized) == (store != "fp8" and method != "medusa")

    if method == "draft_model":
        if store == "fp8":  # the embedding is the target's
            small = LlamaForCausalLM(LlamaConfig.from_pretrained(run.out)).eval()
            given = {n: t.float() for n, t in tensors.items()} | {"model.embed_tokens.weight": embedding}
            assert not set(small.load_state_dict(given, strict=False).missing_keys) - {"lm_head.weight"}
        else:
            small = LlamaForCausalLM.from_pretrained(run.out, dtype=torch.float32).eval()
        assert torch.allclose(small.model.embed_tokens.weight, embedding, atol=1e-3)
    accepted = steps = 0
    store_read, _ = run._data(
        model, run_module.read_checkpoint(target), run_module.GenerationPlan(PLAN.seed), silent
    )
    for i, conversation in enumerate(store_read.conversations):
        if not run_module.held_out(conversation):
            continue
        batch = store_read.batch([i], taps=True, device=torch.device("cpu"))
        assert batch.taps is not None
        hidden, taps = batch.hidden[0].float(), batch.taps[0].float()
        known = conversation.start + 1
        while known < len(conversation.ids):
            ids = list(conversation.ids[:known])
            if method == "medusa":
                drafts = medusa_drafts(tensors, embedding, hidden[known - 2])
            elif method == "eagle":
                drafts = eagle_chain(tensors, config, embedding, embedding, ids, hidden[: known - 1], 4)
            elif method == "eagle3":
                rows = embedding[torch.arange(20) + tensors["d2t"]]
                drafts = eagle3_chain(tensors, config, embedding, rows, ids, taps[: known - 1], 4)
            else:
                with torch.no_grad():
                    for _ in range(4):
                        ids.append(int(small(torch.tensor([ids])).logits[0, -1].argmax()))
                drafts = ids[known:]
            right = 0
            truth = conversation.ids[known : known + 4]
            while right < min(len(truth), len(drafts)) and drafts[right] == truth[right]:
                right += 1
            accepted, steps, known = accepted + right, steps + 1, known + right + 1
    # fp16 embeddings can turn a near tie; the rest is the same arithmetic.
    assert trained.acceptance.steps == pytest.approx(steps, abs=2)
    assert trained.acceptance.accepted == pytest.approx(accepted, abs=2)


def test_what_is_held_out_is_answered_by_the_target(target: Path, text: Path, tmp_path: Path) -> None:
    """Acceptance is of the target's words; the text's are for training."""
    run = make("medusa", target, text, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    plan = run_module.GenerationPlan(max_answer=9)
    store, benchmark = run._data(model, run_module.read_checkpoint(target), plan, silent)
    answers = {r["prompt"]: r["answer"] for r in map(json.loads, text.read_text().splitlines())}
    sides = {True: 0, False: 0}
    real = run_module.real_tokens(run_module.read_checkpoint(target))
    for c in store.conversations:
        sides[run_module.held_out(c)] += 1
        if not run_module.held_out(c):
            assert c.temperature is None
            assert len(c.ids) - c.start == len(answers[c.prompt]) + 1  # a token a character
            assert c.ids[-1] == STOP
            continue
        assert c.temperature == 0
        known = list(c.opening)
        for _ in range(9):
            with torch.no_grad():
                known.append(int(model(torch.tensor([known])).logits[0, -1, :real].argmax()))
            if known[-1] == STOP:
                break
        assert list(c.ids) == known
    assert sides[True] > 0
    assert [c.prompt for c in benchmark.conversations] == list(EXCLUDED)
    assert not set(EXCLUDED) & {c.prompt for c in store.conversations}


def test_a_reduced_vocabulary_holds_no_padding(target: Path, text: Path, tmp_path: Path) -> None:
    """The tiny target's lm_head has more rows than its tokenizer tokens."""
    run = make("eagle3", target, text, tmp_path, sizes=replace(SIZES, draft_vocab=VOCAB))
    run.run(silent, silent)
    checkpoint = run_module.read_checkpoint(target)
    real = run_module.real_tokens(checkpoint)
    assert real < VOCAB
    head = read_head(run.out, checkpoint)
    assert isinstance(head, EagleHead)
    assert head.config.vocab_size == real


def test_depth_of_training(target: Path, text: Path, tmp_path: Path) -> None:
    """Chains grow as the run goes on; Medusa trains all heads, a draft model has one step."""
    depths = {}
    for method in METHODS:
        run = make(method, target, text, tmp_path)
        model = AutoModelForCausalLM.from_pretrained(target).eval()
        checkpoint = run_module.read_checkpoint(target)
        store, _ = run._data(model, checkpoint, run_module.GenerationPlan(), silent)
        drafter = run._drafter(model, checkpoint, store, [0, 1], torch.device("cpu"))
        depths[method] = [drafter.depth(4, share) for share in (0.0, 0.3, 0.9)]
    assert depths == {
        "medusa": [4, 4, 4],
        "eagle": [1, 2, 4],
        "eagle3": [1, 2, 4],
        "draft_model": [1, 1, 1],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_training_on_a_gpu(method: str, target: Path, tmp_path: Path) -> None:
    run = make(method, target, tmp_path, tmp_path, text=None, generate=60, device="cuda")
    assert run.run(silent, silent).steps == PLAN.steps


def test_published_keys(target: Path, text: Path, tmp_path: Path) -> None:
    configs = {}
    for method in METHODS:
        run = make(method, target, text, tmp_path)
        run.run(silent, silent)
        configs[method] = json.loads((run.out / "config.json").read_text())
    assert (configs["medusa"]["medusa_num_heads"], configs["medusa"]["medusa_num_layers"]) == (4, 2)
    assert configs["medusa"]["version"] == "2"
    assert configs["eagle"]["bias"] is True
    assert configs["eagle3"]["draft_vocab_size"] == 20
    assert configs["draft_model"]["num_hidden_layers"] == 2
    eagle3 = tensors_of(tmp_path / "eagle3")
    assert (eagle3["d2t"].dtype, eagle3["t2d"].dtype) == (torch.int64, torch.bool)
    ids = torch.arange(20) + eagle3["d2t"]
    assert torch.equal(eagle3["t2d"].nonzero()[:, 0], ids)
    assert not any("input_layernorm" in n or n == "norm.weight" for n in tensors_of(tmp_path / "eagle"))


def test_provenance(target: Path, text: Path, tmp_path: Path) -> None:
    run = make("medusa", target, text, tmp_path, command=("trtspec", "train-head"))
    trained = run.run(silent, silent)
    found = json.loads((run.out / "provenance.json").read_text())
    assert found["command"] == ["trtspec", "train-head"]
    assert found["training"]["steps"] == 10
    assert found["data"]["conversations"]["training"] + found["data"]["conversations"]["held_out"] == 59
    measured = found["acceptance"]["held_out_prompts"]["greedy_mean_acceptance_length"]
    assert measured == pytest.approx(trained.acceptance.mean_length, abs=1e-4)
    assert found["acceptance"]["benchmark_prompts"]["verify_steps"] > 0


def test_one_run_a_method_and_work_folder(target: Path, text: Path, tmp_path: Path) -> None:
    run = make("medusa", target, text, tmp_path)

    def another(_: object) -> None:
        with pytest.raises(BusyError):
            replace(run, out=tmp_path / "other").run(silent, silent)
        asked.append(True)

    asked: list[bool] = []
    run.run(another, silent)
    assert asked


def test_bad_text_leaves_no_trace(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("")
    run = make("medusa", target, file, tmp_path)
    with pytest.raises(TrainingTextError):
        run.run(silent, silent)
    write_text(file)
    assert make("medusa", target, file, tmp_path).run(silent, silent).steps == PLAN.steps


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_a_target_with_few_layers(method: str, text: Path, tmp_path: Path) -> None:
    shallow = save_tiny_target(tmp_path / "shallow", layers=2)
    with pytest.raises(TargetTooSmallError, match="2 layers"):
        make(method, shallow, text, tmp_path, sizes=replace(SIZES, layers=3)).run(silent, silent)
    assert not (tmp_path / "work").exists()


def test_a_target_that_is_not_finite(target: Path, text: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(target, tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(broken)
    run = make("eagle", broken, text, tmp_path)
    with pytest.raises(DivergedError):
        run.run(silent, silent)
    assert not run.out.exists()


def test_what_is_refused(target: Path, text: Path, tmp_path: Path) -> None:
    taken = make("medusa", target, text, tmp_path)
    taken.out.mkdir(parents=True)
    with pytest.raises(OutputTakenError):
        taken.run(silent, silent)
    few = write_text(tmp_path / "few.jsonl", 1)
    with pytest.raises(TrainingTextError, match="held out"):
        make("medusa", target, few, tmp_path / "few").run(silent, silent)
    if not torch.cuda.is_available():
        with pytest.raises(NoDeviceError):
            make("medusa", target, text, tmp_path / "gpu", device="cuda").run(silent, silent)
