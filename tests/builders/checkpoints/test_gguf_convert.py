"""Converted GGUF files are the original model and tokenizer, for transformers and for our reader."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import MERGES, TOKENS, TYPES, write_gguf
from random_checkpoints import MakeModel
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from builders.checkpoints.architecture import MissingTensorError
from builders.checkpoints.gguf import GgufUnsupportedError, convert_gguf
from builders.checkpoints.gguf_tokenizer import GgufTokenizerError
from builders.checkpoints.reader import read_checkpoint
from builders.checkpoints.safetensors import read_header
from builders.checkpoints.safetensors_writer import OutputExistsError

TEXTS = [
    "in the then 1234567 x12y",
    "  two  spaces\n\n\nand\ttabs  ",
    "Grüße, 你好 🎉 e\u0301 ½ ३४",
    "zzz zzz",
    "it's WE'LL don't <|im_start|>user\nhi<|im_end|> <tool>x",
    "def f(x):\n    return x == 3.14 # ok\r\n",
    "",
]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20) * 7 % 290).logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_logits_are_the_original_model_s(
    make_model: MakeModel, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = make_model("llama", **changes)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too, differ from row to row
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.warnings == ()
    assert checkpoint.config.head_dim == model.config.head_dim
    assert checkpoint.config.tie_embeddings == model.config.tie_word_embeddings


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_weights_are_what_the_gguf_package_decodes(
    make_model: MakeModel, tmp_path: Path, name: str
) -> None:
    type_ = gguf.GGMLQuantizationType[name]
    model = make_model("llama", intermediate_size=64)
    source = write_gguf(tmp_path / "m.gguf", model, quantization=type_)
    loaded = load_file(convert_gguf(source, tmp_path / "out") / "model.safetensors")
    for part in ("v_proj", "q_proj"):  # the order of rows does not change a row's blocks
        original = model.state_dict()[f"model.layers.1.self_attn.{part}.weight"].numpy()
        decoded = gguf.quants.dequantize(gguf.quants.quantize(original, type_), type_)
        assert np.array_equal(loaded[f"model.layers.1.self_attn.{part}.weight"].numpy(), decoded)


def test_chunks_do_not_show(make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(tmp_path / "m.gguf", make_model("llama"))
    whole = convert_gguf(source, tmp_path / "whole") / "model.safetensors"
    monkeypatch.setattr("builders.checkpoints.gguf._CHUNK_VALUES", 1)
    pieces = convert_gguf(source, tmp_path / "pieces") / "model.safetensors"
    assert whole.read_bytes() == pieces.read_bytes()


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_dtype(make_model: MakeModel, tmp_path: Path, dtype: Any, torch_dtype: torch.dtype) -> None:
    model = make_model("llama")
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out", dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch_dtype
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(torch_dtype))
    assert read_checkpoint(folder).config.dtype == dtype


def test_fused_matrices_are_contiguous(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("llama", attention_bias=True)
    tensors = read_header(
        convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "o") / "model.safetensors"
    )
    for kind, parts in (("weight", "qkv"), ("bias", "qkv")):
        group = [tensors[f"model.layers.1.self_attn.{part}_proj.{kind}"] for part in parts]
        for left, right in pairwise(group):
            assert left.offset + left.length == right.offset
    gate, up = (tensors[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert gate.offset + gate.length == up.offset


def frequency_factors(model: Any) -> np.ndarray:
    """What llama.cpp's converter stores of a llama3 scaling: plain ÷ scaled frequencies."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    dim = model.config.head_dim
    plain = 1.0 / model.config.rope_parameters["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    return (plain / scaled.numpy()).astype(np.float32)


def test_llama3_frequency_factors_become_parameters(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("llama", rope_parameters=LLAMA3, max_position_embeddings=65536, head_dim=32)
    factors = frequency_factors(model)
    source = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors})
    folder = convert_gguf(source, tmp_path / "out")
    assert read_checkpoint(folder).config.rope.kind == "llama3"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.rope_parameters == model.config.rope_parameters
    assert torch.equal(logits(loaded), logits(model))


def test_other_frequency_factors_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("llama", rope_parameters=LLAMA3, max_position_embeddings=65536, head_dim=32)
    factors = frequency_factors(model)
    factors[8] *= 1.01
    source = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors})
    with pytest.raises(GgufUnsupportedError, match="rope_freqs"):
        convert_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(make_model: MakeModel, tmp_path: Path, kind: str) -> None:
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0}
    changes: dict[str, Any] = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 16
        changes["llama.rope.scaling.original_context_length"] = 16
    model = make_model("llama", rope_parameters=scaling)
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", model, changes=changes), tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))


def by_hand(pre: str) -> Tokenizer:
    """The tokenizer that a pre-tokenizer's name stands for, built from the parts of `tokenizers`."""
    vocab = {token: number for number, token in enumerate(TOKENS)}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.add_special_tokens(TOKENS[:3])
    tokenizer.add_tokens(["<tool>"])
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    words += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"llama-bpe": "{1,3}", "qwen2": ""}
    if pre in split:
        first = pre_tokenizers.Split(Regex(words.replace("DIGITS", split[pre])), "isolated")
        steps = [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2", "default"])
def test_token_ids(make_model: MakeModel, tmp_path: Path, pre: str) -> None:
    source = write_gguf(tmp_path / "m.gguf", make_model("llama"), pre=pre)
    folder = convert_gguf(source, tmp_path / "out")
    reference = by_hand(pre)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    through_transformers = AutoTokenizer.from_pretrained(folder)
    assert ours.get_vocab() == {token: number for number, token in enumerate(TOKENS)}
    for text in TEXTS:
        ids = reference.encode(text).ids
        assert ours.encode(text).ids == ids
        assert through_transformers(text)["input_ids"] == ids
        if pre != "qwen2":  # whose normalizer changes the text
            assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.decode(ours.encode("a<|im_end|><tool>").ids) == "a<tool>"  # one is special, one is not
    # Pre-tokenizers differ in what they do with digits: the merge of 1 and 2 shows it.
    assert (TOKENS.index("12") in ours.encode("x12").ids) == (pre not in ("smollm", "qwen2"))


def test_tokenizer_config(make_model: MakeModel, tmp_path: Path) -> None:
    changes = {
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "TOOLS",
    }
    folder = convert_gguf(
        write_gguf(tmp_path / "m.gguf", make_model("llama"), changes=changes), tmp_path / "out"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|end|>",
    )
    assert tokenizer.model_max_length == 64
    assert tokenizer("in")["input_ids"] == [1, TOKENS.index("in")]
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False, chat_template="tool_use") == "TOOLS"
    facts = read_checkpoint(folder).tokenizer
    assert facts is not None
    assert facts.eos_token_ids == (0, 2)
    assert facts.special == {"bos_token": 1, "eos_token": 2, "pad_token": 0}
    assert facts.size == len(TOKENS)


def test_padding_tokens_are_no_tokens(make_model: MakeModel, tmp_path: Path) -> None:
    changes = {
        "tokenizer.ggml.tokens": [*TOKENS, "[PAD268]", "[PAD269]"],
        "tokenizer.ggml.token_type": [*TYPES, 5, 5],
    }
    folder = convert_gguf(
        write_gguf(tmp_path / "m.gguf", make_model("llama"), changes=changes), tmp_path / "out"
    )
    facts = read_checkpoint(folder).tokenizer
    assert facts is not None
    assert facts.size == len(TOKENS)
    assert "[PAD268]" not in facts.vocab


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.merges": ["a bc"]}, r"merges\[0\]"),
        ({"tokenizer.ggml.merges": ["abc"]}, r"merges\[0\]"),
        ({"tokenizer.ggml.merges": [1, 2]}, r"merges\[0\]"),
        ({"tokenizer.ggml.tokens": ["a", "a", *TOKENS[2:]]}, r"tokens\[1\]"),
        ({"tokenizer.ggml.tokens": TOKENS[:-1]}, "token_type"),
        ({"tokenizer.ggml.token_type": [6] * len(TOKENS)}, r"tokens\[0\]"),
        ({"tokenizer.ggml.bos_token_id": len(TOKENS)}, "bos_token_id"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id"),
        ({"tokenizer.chat_templates": ["../../x"]}, "chat_templates"),
        ({"tokenizer.chat_template": 7}, "chat_template"),
    ],
)
def test_tokenizers_that_cannot_be_rebuilt(
    make_model: MakeModel, tmp_path: Path, changes: dict[str, Any], place: str
) -> None:
    source = write_gguf(tmp_path / "m.gguf", make_model("llama"), changes=changes)
    with pytest.raises(GgufTokenizerError, match=place):
        convert_gguf(source, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.gguf"]


@pytest.mark.parametrize(
    ("changes", "extra", "place"),
    [
        ({"llama.expert_count": 8}, None, "llama.expert_count"),
        ({"llama.attention.sliding_window": 9}, None, "llama.attention.sliding_window"),
        ({"llama.rope.scaling.type": "longrope"}, None, "llama.rope.scaling.type"),
        ({"llama.rope.dimension_count": 4}, None, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 4}, None, "llama.attention.value_length"),
        ({"llama.block_count": None}, None, "llama.block_count"),
        ({"llama.attention.head_count": 0}, None, "llama.attention.head_count"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, None, "rms_epsilon"),
        ({"llama.attention.head_count_kv": 4}, None, "says num_key_value_heads = 4; the tensors prove 2"),
        ({"llama.block_count": 4}, None, "says num_hidden_layers = 4; the tensors prove 3"),
        ({"llama.embedding_length": 64}, None, "says hidden_size = 64; the tensors prove 32"),
        ({}, {"blk.0.ffn_gate_inp.weight": np.zeros((2, 2), np.float32)}, "blk.0.ffn_gate_inp.weight"),
        ({}, {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}, "blk.0.attn_q_norm.weight"),
    ],
)
def test_models_that_cannot_be_converted(
    make_model: MakeModel, tmp_path: Path, changes: dict[str, Any], extra: Any, place: str
) -> None:
    source = write_gguf(tmp_path / "m.gguf", make_model("llama"), changes=changes, extra=extra)
    with pytest.raises(GgufUnsupportedError, match=place):
        convert_gguf(source, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.gguf"]


def test_missing_tensors_are_found_before_a_byte_is_written(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("llama")
    kept = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up" not in name}
    model.state_dict = lambda: kept  # type: ignore[method-assign]
    source = write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(MissingTensorError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(source, tmp_path / "out", progress=lambda *_: pytest.fail("something was written"))


def test_more_tokens_than_rows(make_model: MakeModel, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", make_model("llama", vocab_size=len(TOKENS) - 1))
    with pytest.raises(GgufUnsupportedError, match=f"{len(TOKENS)} tokens"):
        convert_gguf(source, tmp_path / "out")
    exact = write_gguf(tmp_path / "exact.gguf", make_model("llama", vocab_size=len(TOKENS)))
    assert read_checkpoint(convert_gguf(exact, tmp_path / "out")).warnings == ()


def test_other_architectures(make_model: MakeModel, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", make_model("llama"), architecture="gemma")
    with pytest.raises(GgufUnsupportedError, match="'gemma'"):
        convert_gguf(source, tmp_path / "out")


@pytest.mark.parametrize(("value", "dtype"), [(1e5, "F16"), (float("nan"), "F32")])
def test_weights_that_the_dtype_cannot_hold(
    make_model: MakeModel, tmp_path: Path, value: float, dtype: Any
) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    with pytest.raises(GgufUnsupportedError, match=r"blk\.1\.ffn_up\.weight"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out", dtype=dtype)


def test_output_that_is_someone_else_s(make_model: MakeModel, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", make_model("llama"))
    convert_gguf(source, tmp_path / "out")
    convert_gguf(source, tmp_path / "out")  # an earlier conversion is replaced
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"notes\.txt"):
        convert_gguf(source, tmp_path / "out")
    with pytest.raises(OutputExistsError, match=r"m\.gguf"):
        convert_gguf(source, source)


def test_an_interrupted_conversion_leaves_what_was_there(make_model: MakeModel, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", make_model("llama"))

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(source, tmp_path / "out", progress=interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
    convert_gguf(source, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(source, tmp_path / "out", dtype="F16", progress=interrupt)
    assert read_checkpoint(tmp_path / "out").config.dtype == "F32"


@pytest.mark.slow
def test_demo_model(demo_gguf: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = convert_gguf(demo_gguf, tmp_path / "demo", progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1]
    checkpoint = read_checkpoint(folder)
    assert checkpoint.num_parameters == 134_515_008
    assert checkpoint.config.rope.theta == 100_000
    ours = AutoTokenizer.from_pretrained(folder)
    reference = AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
    # transformers' loader forgets that digits stand alone, which shows where no merge forbids it: " ½".
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert ours.get_vocab() == reference.get_vocab()
    for text in TEXTS:
        assert ours(text)["input_ids"] == reference(text)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = ours.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = ours.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0])
    assert "capital of France is Paris" in answer
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5  # not 9.999999747378752e-06
