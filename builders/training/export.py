"""Trained drafters as folders in the published formats, in full or stored small.

- Medusa: `medusa_lm_head.safetensors` with `{h}.{l}.linear.*`, version "2" (lm_head shared).
- EAGLE-1: `fc.*`, `layers.0.*` without input norm, `embed_tokens.weight`.
- EAGLE-3: `fc.weight`, `midlayer.*`, `norm.weight`, `lm_head.weight`, `d2t`, `t2d`.
- draft model: a Llama checkpoint with the target's tokenizer.

`fp16` and `fp32` files are complete. In `fp8` files, matrices are F8_E4M3 with one F32 scale an output
row (`{module}.weight_scale` [rows, 1]), vectors are F16, and rows of the target's embeddings or lm_head
are left out: a reader takes them from the target (rows `i + d2t[i]` for a reduced vocabulary).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import nn

from builders.checkpoints.types import Checkpoint
from builders.training.drafters import Drafter, DraftModel, Eagle, Eagle3, Medusa
from builders.training.layers import LayerShape

__all__ = ["Store", "stored", "write_head"]

Store = Literal["fp8", "fp16", "fp32"]
_FP8_MAX = 448.0  # the largest finite E4M3
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def stored(weight: torch.Tensor, store: Store) -> dict[str, torch.Tensor]:
    """A parameter as it is stored: {"weight": …} and, for an FP8 matrix, {"weight_scale": [rows, 1]}."""
    weight = weight.detach().float().cpu()
    if store == "fp32":
        return {"weight": weight.contiguous()}
    if store == "fp16" or weight.ndim < 2:
        return {"weight": weight.half().contiguous()}
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _FP8_MAX
    return {"weight": (weight / scale).to(torch.float8_e4m3fn).contiguous(), "weight_scale": scale}


def round_to_store(drafter: Drafter, store: Store) -> None:
    """Replace the weights by what a reader of the stored file gets, so that this is what is measured."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parts = stored(parameter, store)
            parameter.copy_(parts["weight"].float() * parts.get("weight_scale", torch.ones(())))


def write_head(
    drafter: Drafter, target: Checkpoint, folder: Path, store: Store, provenance: Mapping[str, Any]
) -> None:
    """Write config, weights and provenance into an empty folder.

    Raises:
        DiskFullError: by way of the caller's `publish_folder`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in drafter.named_parameters():
        name = name.removeprefix("heads.")  # Medusa's names begin with the head's number
        base, kind = name.rsplit(".", 1)
        for part, tensor in stored(parameter, store).items():
            tensors[f"{base}.{part.replace('weight', kind, 1)}"] = tensor
    file = "model.safetensors"
    embedding = stored(drafter.target.embedding, "fp32" if store == "fp32" else "fp16")["weight"]
    if isinstance(drafter, Medusa):
        file = "medusa_lm_head.safetensors"
    elif isinstance(drafter, Eagle3):
        ids = drafter.vocabulary.cpu()
        full = torch.zeros(target.config.vocab_size, dtype=torch.bool)
        full[ids] = True
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = full
        if store != "fp8":
            tensors["lm_head.weight"] = stored(drafter.target.lm_head[drafter.vocabulary], store)["weight"]
    elif store != "fp8":
        prefix = "model." if isinstance(drafter, DraftModel) else ""
        tensors[f"{prefix}embed_tokens.weight"] = embedding
        if isinstance(drafter, DraftModel) and not target.config.tie_embeddings:
            tensors["lm_head.weight"] = stored(drafter.target.lm_head, store)["weight"]
    (folder / file).write_bytes(save(tensors, metadata={"format": "pt"}))  # a full disk is an OSError
    _json(folder / "config.json", head_config(drafter, target, store))
    _json(folder / "provenance.json", provenance)
    if isinstance(drafter, DraftModel) and store != "fp8":
        for name in _TOKENIZER_FILES:
            if (target.path / name).exists():
                shutil.copyfile(target.path / name, folder / name)


def head_config(drafter: Drafter, target: Checkpoint, store: Store) -> dict[str, Any]:
    """config.json with the published keys."""
    dtype = {} if store == "fp8" else {"dtype": "float32" if store == "fp32" else "float16"}
    if isinstance(drafter, Medusa):
        return {
            "model_type": "medusa",
            "medusa_num_heads": len(drafter.heads),
            "medusa_num_layers": drafter.layers,
            "base_model_name_or_path": target.path.name,
            "version": "2",
            "hidden_size": target.config.hidden_size,
            "vocab_size": target.config.vocab_size,
            **dtype,
        }
    layers: Any = drafter.model.layers if isinstance(drafter, DraftModel) else [_layer(drafter)]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_shape_keys(layers[0].self_attn.shape),
        "num_hidden_layers": len(layers),
        "vocab_size": target.config.vocab_size,
        "max_position_embeddings": target.config.max_position,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": isinstance(drafter, DraftModel) and target.config.tie_embeddings,
        **dtype,
    }
    if target.tokenizer is not None:
        ids = target.tokenizer.special
        config |= {f"{n}_id": ids[n] for n in ("bos_token", "pad_token") if n in ids}
        if target.tokenizer.eos_token_ids:
            config["eos_token_id"] = target.tokenizer.eos_token_ids[0]
    if isinstance(drafter, Eagle):
        config["bias"] = True
    if isinstance(drafter, Eagle3):
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        config["draft_vocab_size"] = len(drafter.vocabulary)
        config["target_hidden_size"] = target.config.hidden_size
    return config


def _layer(drafter: Drafter) -> nn.Module:
    if isinstance(drafter, Eagle3):
        return drafter.midlayer
    assert isinstance(drafter, Eagle)
    return drafter.layers[0]


def _shape_keys(shape: LayerShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }


def _json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
