"""Architectures are proved from tensors; claims that contradict them are warned of or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoints import MakeFolder, edit_config, write_tokenizer
from safetensors.numpy import load_file, save_file

from builders.checkpoints.architecture import (
    ArchitectureError,
    ContradictionError,
    MissingTensorError,
    QuantizedError,
    UnknownTensorError,
)
from builders.checkpoints.claims import ConfigError, UnsupportedRopeError
from builders.checkpoints.describe import describe
from builders.checkpoints.files import BadJsonError, MissingFileError
from builders.checkpoints.reader import GgufInputError, read_checkpoint
from builders.checkpoints.types import DecoderConfig, Rope

PROVED = DecoderConfig(
    family="llama",
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope=Rope(10000.0),
    max_position=64,
    tie_embeddings=False,
)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


def changed(**changes: Any) -> DecoderConfig:
    return DecoderConfig(**{**vars(PROVED), **changes})


def edit_tensors(folder: Path, drop: str = "", **add: np.ndarray) -> None:
    """Drops the tensor `drop` and adds those of `add`, whose names have `__` for a dot."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if drop:
        del tensors[drop]
    tensors |= {name.replace("__", "."): array for name, array in add.items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, PROVED),
        ("llama", {"tie_word_embeddings": True}, changed(tie_embeddings=True)),
        ("llama", {"attention_bias": True}, changed(qkv_bias=True, o_bias=True)),
        ("llama", {"mlp_bias": True}, changed(mlp_bias=True)),
        ("llama", {"head_dim": 16}, changed(head_dim=16)),
        ("llama", {"dtype": "bfloat16"}, changed(dtype="BF16")),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}},
         changed(rope=Rope(5.0, "linear", 2.0))),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
         changed(rope=Rope(5e5, "llama3", 8.0, 1.0, 4.0, 16))),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0, "beta_fast": 16.0, **YARN}},
         changed(rope=Rope(5.0, "yarn", 4.0, original_max_position=16, beta_fast=16.0))),
        ("mistral", {"sliding_window": None}, changed(family="mistral")),
        ("mistral", {"sliding_window": 16},
         changed(family="mistral", sliding_window=16, sliding_layers=(0, 1, 2))),
        ("qwen2", {}, changed(family="qwen2", qkv_bias=True)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
         changed(family="qwen2", qkv_bias=True, sliding_window=16, sliding_layers=(1, 2))),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
         changed(family="qwen2", qkv_bias=True)),
        ("qwen3", {"head_dim": 16}, changed(family="qwen3", qk_norm=True, head_dim=16)),
        ("qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 16,
                   "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
         changed(family="qwen3", qk_norm=True, head_dim=16, sliding_window=16, sliding_layers=(0, 2))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_families(
    make_folder: MakeFolder, family: str, changes: dict[str, Any], expected: DecoderConfig, shard: str
) -> None:
    folder = make_folder(family, shard=shard, **changes)
    assert (folder / "model.safetensors.index.json").exists() == (shard == "20KB")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config == expected
    assert checkpoint.warnings == ()
    assert len(checkpoint.files) > 2 or shard == "1GB"


def test_max_window_layers_without_layer_types(make_folder: MakeFolder) -> None:
    """As transformers 4 wrote it."""
    folder = make_folder("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=2)
    edit_config(folder, layer_types=None)
    assert read_checkpoint(folder).config.sliding_layers == (2,)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, Rope(5e5)),
        ({"type": "linear", "factor": 2}, Rope(5e5, "linear", 2.0)),
        ({"rope_type": "llama3", **LLAMA3}, Rope(5e5, "llama3", 8.0, 1.0, 4.0, 16)),
        ({"type": "yarn", **YARN}, Rope(5e5, "yarn", 4.0, original_max_position=16)),
        ({"type": "yarn", "original_max_position_embeddings": 16},
         Rope(5e5, "yarn", 4.0, original_max_position=16)),
        ({"type": "yarn", "factor": 4.0}, Rope(5e5, "yarn", 4.0, original_max_position=64)),
        ({"type": "yarn", **YARN, "attention_factor": 1.5},
         Rope(5e5, "yarn", 4.0, original_max_position=16, attention_factor=1.5)),
        ({"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
         Rope(5e5, "yarn", 4.0, original_max_position=16, attention_factor=1.0)),
    ],
)  # fmt: skip
def test_keys_of_transformers_4(make_folder: MakeFolder, scaling: Any, expected: Rope) -> None:
    folder = make_folder("llama")
    edit_config(
        folder, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling, dtype=None, torch_dtype="float32"
    )
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config.rope == expected
    assert checkpoint.warnings == ()


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope'"),
        ({"rope_type": "mrope"}, "'mrope'"),
        ({"rope_type": ["default"]}, "default"),
        ({"rope_type": "yarn", "truncate": False, **YARN}, "truncat"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_attention": {"rope_type": "default"}}, "layer type"),
    ],
)
def test_rope_that_is_not_supported(make_folder: MakeFolder, parameters: Any, key: str) -> None:
    folder = make_folder("llama")
    edit_config(folder, rope_parameters=parameters)
    with pytest.raises(UnsupportedRopeError, match=key):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value", "proved"),
    [
        ("num_hidden_layers", 2, 3),
        ("vocab_size", 256, 300),
        ("hidden_size", 64, 32),
        ("intermediate_size", 1, 48),
        ("num_key_value_heads", 4, 2),
        ("tie_word_embeddings", True, False),
        ("attention_bias", True, False),
        ("mlp_bias", True, False),
        ("dtype", "bfloat16", "float32"),
    ],
)
def test_headers_win(make_folder: MakeFolder, key: str, value: Any, proved: Any) -> None:
    folder = make_folder("llama")
    edit_config(folder, **{key: value}, head_dim=8)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config == PROVED
    assert checkpoint.warnings == (f"config.json says {key} = {value!r}; the tensors prove {proved!r}",)


def test_norms_of_q_and_k_prove_head_dim_and_heads(make_folder: MakeFolder) -> None:
    folder = make_folder("qwen3", head_dim=16)
    edit_config(folder, head_dim=8, num_attention_heads=8)
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.config.head_dim, checkpoint.config.num_heads) == (16, 4)
    assert len(checkpoint.warnings) == 2


def test_an_untied_claim_without_lm_head(make_folder: MakeFolder) -> None:
    folder = make_folder("llama")
    edit_tensors(folder, drop="lm_head.weight")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config.tie_embeddings
    assert "tie_word_embeddings" in checkpoint.warnings[0]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"num_attention_heads": 8}, "q_proj"),
        ({"head_dim": 16}, "q_proj"),
        ({"head_dim": 5}, "q_proj"),
    ],
)
def test_headers_cannot_decide(make_folder: MakeFolder, changes: dict[str, Any], place: str) -> None:
    folder = make_folder("llama")
    edit_config(folder, **changes)
    with pytest.raises(ContradictionError, match=place):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"head_dim": None, "num_attention_heads": 5}, "num_attention_heads"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_parameters": {**LLAMA3, "rope_type": "llama3", "low_freq_factor": 9}}, "high_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_configs_that_are_wrong(make_folder: MakeFolder, changes: dict[str, Any], key: str) -> None:
    folder = make_folder("llama")
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=key) as error:
        read_checkpoint(folder)
    assert "config.json" in error.value.place


def test_windows_that_are_wrong(make_folder: MakeFolder) -> None:
    mixed = ["sliding_attention", "full_attention", "full_attention"]
    folder = make_folder("mistral", sliding_window=16)
    edit_config(folder, layer_types=mixed)
    with pytest.raises(ConfigError, match="all alike"):
        read_checkpoint(folder)
    folder = make_folder("qwen2", name="qwen2")
    edit_config(folder, layer_types=mixed)
    with pytest.raises(ConfigError, match="use_sliding_window"):
        read_checkpoint(folder)
    edit_config(folder, use_sliding_window=True)
    with pytest.raises(ConfigError, match="sliding_window"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("family", "claimed", "what"),
    [
        ("llama", "qwen3", "without norms of queries and keys"),
        ("qwen3", "llama", "with norms of queries and keys"),
        ("llama", "qwen2", "without biases of q, k and v"),
        ("qwen2", "mistral", "with biases of q, k and v"),
    ],
)
def test_family_contradicts_tensors(make_folder: MakeFolder, family: str, claimed: str, what: str) -> None:
    folder = make_folder(family)
    edit_config(folder, model_type=claimed)
    with pytest.raises(ContradictionError, match=what):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_missing_tensors(make_folder: MakeFolder, name: str) -> None:
    folder = make_folder("llama", attention_bias=True)
    edit_tensors(folder, drop=name)
    with pytest.raises(MissingTensorError) as error:
        read_checkpoint(folder)
    assert error.value.place == f"{folder}:{name}"


def test_missing_layer(make_folder: MakeFolder) -> None:
    folder = make_folder("llama")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: array for name, array in tensors.items() if ".layers.1." not in name}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(MissingTensorError, match=r"model\.layers\.1"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.sinks",
        "lm_head.bias",
        "model.layers.1.mlp.up_proj.bias",
        "model.layers.00.x",
    ],
)
def test_unknown_tensors(make_folder: MakeFolder, name: str) -> None:
    folder = make_folder("llama")
    edit_tensors(folder, **{name: np.zeros(48, np.float32)})
    with pytest.raises(UnknownTensorError) as error:
        read_checkpoint(folder)
    assert error.value.place == f"{folder}:{name}"


def test_shapes_that_contradict_each_other(make_folder: MakeFolder) -> None:
    folder = make_folder("llama")
    edit_tensors(folder, model__layers__2__mlp__down_proj__weight=np.zeros((32, 47), np.float32))
    with pytest.raises(ContradictionError, match=r"layers\.2\.mlp\.down_proj\.weight"):
        read_checkpoint(folder)
    edit_tensors(folder, model__embed_tokens__weight=np.zeros(5, np.float32))
    with pytest.raises(ContradictionError, match="a matrix"):
        read_checkpoint(folder)


def test_heads_that_kv_heads_do_not_divide(make_folder: MakeFolder) -> None:
    folder = make_folder("llama")
    three = np.zeros((24, 32), np.float32)
    edit_tensors(
        folder, **{f"model.layers.{i}.self_attn.{p}_proj.weight": three for i in range(3) for p in "kv"}
    )
    with pytest.raises(ContradictionError, match=r"24 rows of k, 32 of q, heads of 8"):
        read_checkpoint(folder)


def test_heads_of_odd_size(make_folder: MakeFolder) -> None:
    with pytest.raises(ContradictionError, match="an even head_dim"):
        read_checkpoint(make_folder("llama", head_dim=3))


def test_context_of_pretraining_outside_the_scaling(make_folder: MakeFolder) -> None:
    folder = make_folder("llama", rope_parameters={"rope_type": "yarn", "rope_theta": 5.0, **YARN})
    edit_config(folder, original_max_position_embeddings=32)
    assert read_checkpoint(folder).config.rope.original_max_position == 32


def test_mixed_dtypes(make_folder: MakeFolder) -> None:
    folder = make_folder("llama")
    edit_tensors(folder, model__layers__1__mlp__down_proj__weight=np.zeros((32, 48), np.float16))
    with pytest.raises(ContradictionError, match="F16 and F32"):
        read_checkpoint(folder)


def test_old_rotary_tables_are_left_out(make_folder: MakeFolder) -> None:
    folder = make_folder("llama")
    before = read_checkpoint(folder)
    edit_tensors(folder, model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(4, np.float32))
    after = read_checkpoint(folder)
    assert after.tensors.keys() == before.tensors.keys()


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["0.0.linear.weight", "0.1.weight"], "Medusa heads"),
        (["medusa_head.0.0.linear.weight"], "Medusa heads"),
        (["fc.weight", "layers.0.self_attn.q_proj.weight"], "an EAGLE head"),
        (["midlayer.self_attn.q_proj.weight", "fc.weight", "d2t"], "an EAGLE-3 head"),
        (["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"], "a LoRA adapter"),
        (["model.layers.0.mlp.experts.0.gate_proj.weight"], "a mixture of experts"),
        (["model.layers.0.block_sparse_moe.gate.weight"], "a mixture of experts"),
        (["vision_tower.x.weight", "model.layers.0.mlp.up_proj.weight"], "a vision tower"),
        (["model.visual.blocks.0.attn.qkv.weight"], "a vision tower"),
        (["transformer.h.0.attn.c_attn.weight"], "a GPT-2-type model"),
        (["encoder.layer.0.x.weight"], "an encoder"),
    ],
)
def test_what_is_recognised_without_a_config(tmp_path: Path, names: list[str], what: str) -> None:
    save_file({name: np.zeros((2, 2), np.float32) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(ArchitectureError, match=what) as error:
        read_checkpoint(tmp_path)
    assert "llama, mistral, qwen2, qwen3" in error.value.allowed


def test_unknown_architectures(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder("llama")
    edit_config(folder, model_type="gemma3")
    with pytest.raises(ArchitectureError, match=r"'gemma3'.*model\.layers\.N") as error:
        read_checkpoint(folder)
    assert error.value.allowed == "llama, mistral, qwen2, qwen3"
    other = tmp_path / "other"
    other.mkdir()
    save_file({"blocks.0.w": np.zeros(2, np.float32)}, other / "model.safetensors")
    (other / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ArchitectureError, match=r"blocks\.0\.w"):
        read_checkpoint(other)


@pytest.mark.parametrize(
    "name", ["qweight", "scales", "weight_scale", "weight_scale_inv", "weight.absmax", "weight_packed"]
)
def test_quantized_checkpoints(make_folder: MakeFolder, name: str) -> None:
    folder = make_folder("llama")
    edit_tensors(folder, **{f"model.layers.0.mlp.up_proj.{name}": np.zeros(2, np.uint8)})
    with pytest.raises(QuantizedError) as error:
        read_checkpoint(folder)
    assert "Not yet supported: quantized" in error.value.remedy


def test_quantized_dtypes_and_configs(make_folder: MakeFolder) -> None:
    folder = make_folder("llama")
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(QuantizedError, match="quantization_config"):
        read_checkpoint(folder)
    edit_config(folder, quantization_config=None)
    edit_tensors(folder, lm_head__weight=np.zeros((300, 32), np.int8))
    with pytest.raises(QuantizedError, match="I8"):
        read_checkpoint(folder)


def test_files_in_the_place_of_folders(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(GgufInputError) as error:
        read_checkpoint(file)
    assert f"trtspec convert {file} -o DIR" in error.value.remedy
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"")
    with pytest.raises(MissingFileError) as missing:
        read_checkpoint(other)
    assert str(tmp_path) in missing.value.remedy
    with pytest.raises(MissingFileError):
        read_checkpoint(tmp_path / "none")


def test_config_is_missing_or_broken(make_folder: MakeFolder) -> None:
    folder = make_folder("llama")
    for content in ("", "[]", "{", '{"a": 1, "a": 2}'):
        (folder / "config.json").write_text(content)
        with pytest.raises(BadJsonError, match=r"config\.json"):
            read_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(MissingFileError, match=r"config\.json"):
        read_checkpoint(folder)


def test_fingerprint_follows_every_part(make_folder: MakeFolder) -> None:
    folder = make_folder("llama")
    write_tokenizer(folder, ["a", "b"])
    seen = {read_checkpoint(folder).fingerprint}
    assert read_checkpoint(folder).fingerprint in seen  # and is stable
    edit_config(folder, extra=1)
    seen.add(read_checkpoint(folder).fingerprint)
    write_tokenizer(folder, ["b", "a"])
    seen.add(read_checkpoint(folder).fingerprint)
    edit_tensors(folder, drop="lm_head.weight")
    seen.add(read_checkpoint(folder).fingerprint)
    assert len(seen) == 4


def test_ids_beyond_the_embedding(make_folder: MakeFolder) -> None:
    folder = make_folder("llama")
    write_tokenizer(folder, [f"t{i}" for i in range(301)])
    assert "ids up to 300; the tensors hold 300 rows" in read_checkpoint(folder).warnings[0]
    edit_config(folder, eos_token_id=300)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_checkpoint(folder)


def test_description_is_plain_data(make_folder: MakeFolder) -> None:
    folder = make_folder("qwen2", rope_parameters={"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0})
    write_tokenizer(folder, ["a", "</s>", "b"], config={"eos_token": "</s>", "chat_template": "x"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = read_checkpoint(folder)
    found = describe(checkpoint)
    assert json.loads(json.dumps(found)) == found
    size = (folder / "model.safetensors").stat().st_size
    assert size - 100_000 < found["bytes"] < size
    expected = {
        "family": "qwen2",
        "parameters": found["bytes"] // 4,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "biases": ["qkv"],
        "vocab_width": 300,
        "vocab_real": 3,
        "rope": {"kind": "linear", "theta": 5.0, "factor": 2.0},
        "special_tokens": {"eos_token": 1},
        "eos_token_ids": [1, 2],
        "chat_template_sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881",
        "warnings": [],
    }
    assert {key: found[key] for key in expected} == expected
    assert describe(read_checkpoint(make_folder("llama", name="bare")))["vocab_real"] is None


def test_a_draft_model_borrows_the_targets_embedding(make_folder: MakeFolder) -> None:
    """What a small draft model leaves out is its target's, with the tokenizer that belongs to it."""
    target_folder = make_folder("llama", name="target", tie_word_embeddings=True)
    write_tokenizer(target_folder, ["a", "b", "c"])
    target = read_checkpoint(target_folder)
    draft_folder = make_folder("llama", name="draft", tie_word_embeddings=True, num_hidden_layers=1)
    edit_tensors(draft_folder, drop="model.embed_tokens.weight")
    with pytest.raises(MissingTensorError):
        read_checkpoint(draft_folder)
    draft = read_checkpoint(draft_folder, borrow=target)
    assert draft.tensors["model.embed_tokens.weight"] == target.tensors["model.embed_tokens.weight"]
    assert draft.tokenizer is target.tokenizer
    assert draft.config.tie_embeddings
