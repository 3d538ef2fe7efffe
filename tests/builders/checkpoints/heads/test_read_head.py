"""Heads as people publish them: what the tensors prove, what config.json adds, what is shared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from heads_zoo import (
    edit_head,
    make_eagle,
    make_eagle3,
    make_medusa,
    make_specforge,
    make_speculators,
    store_fp8,
)
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from builders.checkpoints.heads.reader import is_head, read_head
from builders.checkpoints.heads.types import EagleHead, MedusaHeads
from builders.checkpoints.types import Checkpoint


def eagle(folder: Path, target: Checkpoint) -> EagleHead:
    head = read_head(folder, target)
    assert isinstance(head, EagleHead)
    return head


def medusa(folder: Path, target: Checkpoint) -> MedusaHeads:
    head = read_head(folder, target)
    assert isinstance(head, MedusaHeads)
    return head


def values(head: EagleHead | MedusaHeads, name: str) -> np.ndarray:
    tensor = head.tensors[name]
    count = int(np.prod(tensor.shape))
    return np.fromfile(tensor.file, np.float32, count, offset=tensor.offset).reshape(tensor.shape)


# -- Medusa -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "layers"), [(True, 1), (False, 1), (True, 2), (False, 3)])
def test_medusa(
    own: bool, layers: int, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_medusa(target_model, tmp_path, heads=4, layers=layers, own_lm_head=own)
    heads = medusa(folder, target)
    assert (heads.method, heads.format) == ("medusa", "medusa")
    assert (heads.num_heads, heads.num_layers, heads.hidden_size) == (4, layers, 48)
    assert (heads.own_lm_head, heads.vocab_size) == (own, 97 if own else None)
    assert heads.warnings == ()
    assert heads.files == (folder / "medusa_lm_head.safetensors",)
    published = load_file(heads.files[0])
    assert heads.num_parameters == sum(t.numel() for t in published.values())
    last = layers - 1
    np.testing.assert_array_equal(
        values(heads, f"heads.3.{last}.linear.bias"), published[f"3.{last}.linear.bias"]
    )
    if own:
        np.testing.assert_array_equal(
            values(heads, "heads.2.lm_head.weight"), published[f"2.{layers}.weight"]
        )
    assert len(heads.tensors) == len(published)


def test_medusa_counts_tensors_and_reports_a_config_that_says_otherwise(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_medusa(target_model, tmp_path, heads=3)
    edit_head(folder, medusa_num_heads=5, medusa_num_layers=2, version="2")
    heads = medusa(folder, target)
    assert (heads.num_heads, heads.num_layers, heads.own_lm_head) == (3, 1, True)
    assert heads.warnings == (
        "config.json says medusa_num_heads = 5; the tensors prove 3",
        "config.json says medusa_num_layers = 2; the tensors prove 1",
        "config.json says version = '2', without an lm_head a head; the tensors have one",
    )


def test_medusa_without_a_config_and_with_a_prefix(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_medusa(target_model, tmp_path)

    def prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"medusa_head.{name}"] = tensors.pop(name)

    edit_head(folder, prefix)
    (folder / "config.json").unlink()
    assert medusa(folder, target).num_heads == 3
    assert medusa(folder / "medusa_lm_head.safetensors", target).num_heads == 3


# -- EAGLE-1/2 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["eagle", "speculators"])
@pytest.mark.parametrize(
    ("fc_bias", "qkv_bias", "embedding", "lm_head"),
    [(True, False, True, False), (False, True, False, False), (False, False, True, True)],
)
def test_eagle1(
    spelling: str,
    fc_bias: bool,
    qkv_bias: bool,
    embedding: bool,
    lm_head: bool,
    tmp_path: Path,
    target_model: PreTrainedModel,
    target: Checkpoint,
) -> None:
    folder = make_eagle(
        target_model,
        tmp_path,
        fc_bias=fc_bias,
        qkv_bias=qkv_bias,
        own_embedding=embedding,
        own_lm_head=lm_head,
        spelling=spelling,
    )
    head = eagle(folder, target)
    assert (head.method, head.format) == ("eagle", spelling)
    c = head.config
    assert (c.family, c.num_layers, c.hidden_size, c.intermediate_size) == ("llama", 1, 48, 60)
    assert (c.num_heads, c.num_kv_heads, c.head_dim) == (4, 2, 10)
    assert (c.vocab_size, c.rms_norm_eps, c.rope.theta) == (97, 1e-5, 5000.0)
    assert (c.qkv_bias, c.qk_norm, c.o_bias, c.mlp_bias) == (qkv_bias, False, False, False)
    assert (head.target_hidden_size, head.taps, head.draft_to_target) == (48, (), None)
    assert (head.fc_norm, head.head_norm) == ("none", "none")
    assert not head.norm_before_residual
    assert (head.own_embedding, head.own_lm_head) == (embedding, lm_head)
    assert ("fc.bias" in head.tensors) == fc_bias
    shared = [name for name, own in (("embed_tokens", embedding), ("lm_head", lm_head)) if not own]
    assert head.warnings == tuple(f"no {name}.weight: the target's serves" for name in shared)
    published = load_file(folder / "model.safetensors")
    fc, layer = ("fc", "layers.0") if spelling == "eagle" else ("fusion_fc", "transformer")
    np.testing.assert_array_equal(values(head, "fc.weight"), published[f"{fc}.weight"])
    np.testing.assert_array_equal(
        values(head, "model.layers.0.self_attn.k_proj.weight"), published[f"{layer}.self_attn.k_proj.weight"]
    )


def test_eagle1_of_a_qwen2_with_a_model_prefix_and_a_wrong_config(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_eagle(target_model, tmp_path, qkv_bias=True)

    def prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)

    edit_head(folder, prefix, model_type="qwen2", num_hidden_layers=40, bias=False, sliding_window=4096)
    head = eagle(folder, target)
    assert head.config.qkv_bias
    assert set(head.warnings) == {
        "config.json says num_hidden_layers = 40; the tensors prove 1",
        "config.json says bias = False; the tensors prove True",
        "sliding_window = 4096 is not used: EAGLE's layer sees all",
        "no lm_head.weight: the target's serves",
    }


# -- EAGLE-3 ----------------------------------------------------------------------------------------


def test_eagle3_of_its_authors(tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint) -> None:
    folder = make_eagle3(target_model, tmp_path)
    head = eagle(folder, target)
    assert (head.method, head.format) == ("eagle3", "eagle3")
    assert head.taps == (2, 3, 4)  # of 7 layers: 2, L // 2, L - 3
    assert (head.config.vocab_size, head.config.hidden_size, head.target_hidden_size) == (41, 48, 48)
    assert (head.fc_norm, head.head_norm) == ("none", "logits")
    assert not head.norm_before_residual
    published = load_file(folder / "model.safetensors")
    assert head.draft_to_target is not None and head.draft_to_target.dtype == np.int64
    np.testing.assert_array_equal(head.draft_to_target, np.flatnonzero(published["t2d"]))
    assert head.warnings == ()
    for ours, theirs in (
        ("model.layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "midlayer.self_attn.q_proj.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
    ):
        np.testing.assert_array_equal(values(head, ours), published[theirs])
    assert not {"d2t", "t2d"} & head.tensors.keys()


@pytest.mark.parametrize(("depth", "taps"), [(7, (2, 3, 4)), (12, (2, 6, 9)), (32, (2, 16, 29))])
def test_default_taps(
    depth: int, taps: tuple[int, ...], tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    from dataclasses import replace

    deep = replace(target, config=replace(target.config, num_layers=depth))
    assert eagle(make_eagle3(target_model, tmp_path), deep).taps == taps


def test_eagle3_of_another_width(tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint) -> None:
    head = eagle(make_eagle3(target_model, tmp_path, hidden=36, heads=3, kv_heads=1, head_dim=14), target)
    assert (head.config.hidden_size, head.target_hidden_size) == (36, 48)
    assert (head.config.num_heads, head.config.num_kv_heads, head.config.head_dim) == (3, 1, 14)
    assert head.tensors["fc.weight"].shape == (36, 144)
    assert head.tensors["model.embed_tokens.weight"].shape == (97, 36)


@pytest.mark.parametrize("draft_vocab", [None, 41])
def test_eagle3_takes_what_it_lacks_from_the_target(
    draft_vocab: int | None, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_eagle3(
        target_model, tmp_path, draft_vocab=draft_vocab, own_lm_head=False, own_embedding=False
    )
    head = eagle(folder, target)
    assert (head.own_embedding, head.own_lm_head) == (False, False)
    assert head.config.vocab_size == (draft_vocab or 97)
    assert (head.draft_to_target is None) == (draft_vocab is None)
    assert head.warnings == (
        "no embed_tokens.weight: the target's serves",
        "no lm_head.weight: the target's serves",
    )


def test_a_map_of_the_full_vocabulary_onto_itself_is_none(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    assert eagle(make_eagle3(target_model, tmp_path, draft_vocab=97), target).draft_to_target is None


def test_a_permuted_full_vocabulary_keeps_its_map(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    order = torch.arange(97).flip(0)
    folder = make_eagle3(target_model, tmp_path, draft_vocab=97)
    edit_head(folder, lambda t: t.update(d2t=order - torch.arange(97)))
    np.testing.assert_array_equal(eagle(folder, target).draft_to_target, order)


def test_a_map_of_zeros_is_reported(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_eagle3(target_model, tmp_path)

    def zeros(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["t2d"]
        tensors["d2t"] = torch.zeros(41, dtype=torch.int64)

    first, second = eagle(edit_head(folder, zeros), target).warnings
    assert first == "d2t without t2d: nothing confirms the map"
    assert second.startswith("d2t holds only zeros")


def test_community_heads_that_claim_to_be_a_llama_of_40_layers(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_eagle3(target_model, tmp_path)
    edit_head(folder, architectures=["LlamaForCausalLM"], num_hidden_layers=40, draft_vocab_size=97)
    head = eagle(folder, target)
    assert (head.method, head.config.num_layers) == ("eagle3", 1)
    assert head.warnings == (
        "config.json says num_hidden_layers = 40; the tensors prove 1",
        "config.json says draft_vocab_size = 97; the tensors prove 41",
    )


def test_tensors_win_over_a_config_of_another_kind(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = edit_head(make_eagle3(target_model, tmp_path), architectures=["DFlashDraftModel"])
    head = eagle(folder, target)
    assert head.method == "eagle3"
    assert head.warnings == ("config.json says that it is DFlash; the tensors prove an EAGLE head",)


def test_a_shorter_context_than_the_targets_is_reported(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = edit_head(make_eagle3(target_model, tmp_path), max_position_embeddings=128)
    (warning,) = eagle(folder, target).warnings
    assert "128 positions" in warning and "256" in warning


# -- SpecForge and speculators ----------------------------------------------------------------------


@pytest.mark.parametrize(("fc_norm", "norm_output"), [(True, False), (False, True), (True, True)])
def test_specforge(
    fc_norm: bool, norm_output: bool, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_specforge(target_model, tmp_path, taps=(1, 3, 7), fc_norm=fc_norm, norm_output=norm_output)
    listed = json.loads((folder / "config.json").read_text())["eagle_config"]
    assert listed["eagle_aux_hidden_state_layer_ids"] == [0, 2, 6]  # published: the layers' outputs
    head = eagle(folder, target)
    assert (head.method, head.format, head.taps) == ("eagle3", "specforge", (1, 3, 7))
    assert head.fc_norm == ("each" if fc_norm else "none")
    assert head.head_norm == ("logits" if norm_output else "none")
    assert not head.norm_before_residual
    assert head.warnings == ()
    assert ("fc_norm.2.weight" in head.tensors) == fc_norm


def test_specforge_without_the_norm_that_it_does_not_use(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_specforge(target_model, tmp_path, norm_output=False)
    edit_head(folder, lambda tensors: tensors.pop("norm.weight"))
    head = eagle(folder, target)
    assert head.head_norm == "none" and "model.norm.weight" not in head.tensors


@pytest.mark.parametrize(
    ("before_residual", "joint", "each", "recurs", "qk_norm"),
    [
        (True, False, False, False, False),
        (False, True, False, True, True),
        (True, False, True, False, True),
        (False, False, False, True, False),
    ],
)
def test_speculators(
    before_residual: bool,
    joint: bool,
    each: bool,
    recurs: bool,
    qk_norm: bool,
    tmp_path: Path,
    target_model: PreTrainedModel,
    target: Checkpoint,
) -> None:
    folder = make_speculators(
        target_model,
        tmp_path,
        taps=(0, 2, 5, 6),
        norm_before_residual=before_residual,
        norm_before_fc=joint,
        fc_norm=each,
        norm_output=recurs,
        qk_norm=qk_norm,
    )
    head = eagle(folder, target)
    assert (head.method, head.format) == ("eagle3", "speculators")
    assert head.taps == (0, 2, 5, 6)  # as published: the layers' inputs
    assert head.norm_before_residual == before_residual
    assert head.fc_norm == ("joint" if joint else "each" if each else "none")
    assert head.head_norm == ("recurrent" if recurs else "logits")
    assert (head.config.qk_norm, head.config.family) == (qk_norm, "qwen3" if qk_norm else "llama")
    assert head.config.rope.theta == 5000.0  # from transformer_layer_config
    assert head.warnings == ()


def test_speculators_defaults(tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint) -> None:
    folder = make_speculators(target_model, tmp_path)
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    absent = dict.fromkeys((*switches, "eagle_aux_hidden_state_layer_ids"))

    def training_only(tensors: dict[str, torch.Tensor]) -> None:
        tensors["verifier_lm_head.weight"] = torch.ones(97, 48)
        tensors["verifier_norm.weight"] = torch.ones(48)

    head = eagle(edit_head(folder, training_only, **absent), target)
    assert (head.taps, head.norm_before_residual) == ((2, 3, 4), False)
    assert (head.fc_norm, head.head_norm) == ("none", "logits")
    assert not any("verifier" in name for name in head.tensors)


def test_norm_tensors_win_over_switches(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_speculators(target_model, tmp_path, norm_before_fc=True)
    head = eagle(edit_head(folder, norm_before_fc=False, fc_norm=True), target)
    assert head.fc_norm == "joint"
    assert head.warnings == (
        "config.json says norm_before_fc = False; the tensors prove True",
        "config.json says fc_norm = True; the tensors prove False",
    )


# -- all --------------------------------------------------------------------------------------------


def test_a_vocabulary_that_is_padded_differently_is_reported(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    from dataclasses import replace

    from builders.checkpoints.types import TokenizerFacts

    tokens = {f"t{i}": i for i in range(90)}
    facts = TokenizerFacts(None, tokens, {}, (), None, 90)
    folder = make_eagle(target_model, tmp_path)
    edit_head(folder, lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"][:92]}))
    head = eagle(folder, replace(target, tokenizer=facts))
    assert "embed_tokens.weight has 92 rows and the target 97: only padding differs" in head.warnings


def test_the_fingerprint_follows_config_and_headers(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_eagle3(target_model, tmp_path)
    first = read_head(folder, target).fingerprint
    assert first == read_head(folder, target).fingerprint and len(first) == 64
    second = read_head(edit_head(folder, note="edited"), target).fingerprint
    third = read_head(edit_head(folder, lambda t: t.pop("embed_tokens.weight")), target).fingerprint
    assert len({first, second, third}) == 3


def test_shards_and_half_precision(tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint) -> None:
    folder = make_eagle3(target_model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}
    names = sorted(halves)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({n: halves[n] for n in part}, folder / shard)
    index = {"weight_map": {n: shard for shard, part in shards.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    head = eagle(folder, target)
    assert head.config.dtype == "F16" and len(head.files) == 2


def test_is_head(tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint) -> None:
    assert is_head(make_medusa(target_model, tmp_path / "m"))
    assert is_head(make_eagle(target_model, tmp_path / "e"))
    assert is_head(make_eagle(target_model, tmp_path / "old", spelling="speculators"))
    assert is_head(make_eagle3(target_model, tmp_path / "e3"))
    assert is_head(store_fp8(make_speculators(target_model, tmp_path / "s")))
    assert not is_head(target.path)
    assert not is_head(tmp_path / "nowhere")
    assert not is_head(target.path / "config.json")
