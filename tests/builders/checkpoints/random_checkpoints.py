"""Small random checkpoints, saved by transformers, and small tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

MakeModel = Callable[..., PreTrainedModel]
MakeFolder = Callable[..., Path]


def random_model(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config, model = CLASSES[family]
    return model(config(**{**SIZES, **changes})).eval()


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None deletes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def write_tokenizer(folder: Path, tokens: list[str], *, config: dict[str, Any] | None = None) -> None:
    """A tokenizer.json with these tokens, in the order of their ids."""
    folder.mkdir(exist_ok=True)
    vocab = {token: number for number, token in enumerate(tokens)}
    content = {"added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
