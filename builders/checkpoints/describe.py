"""A checkpoint as plain data, for tables, manifests and `--format json`."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

from builders.checkpoints.heads.types import EagleHead, MedusaHeads
from builders.checkpoints.types import Checkpoint, Rope

__all__ = ["describe", "describe_head"]


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What was found: strings, numbers, lists and maps only. Sizes are bytes."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    template = tokenizer.chat_template if tokenizer is not None else None
    return {
        "path": str(checkpoint.path),
        "fingerprint": checkpoint.fingerprint,
        "family": config.family,
        "parameters": checkpoint.num_parameters,
        "bytes": sum(tensor.length for tensor in checkpoint.tensors.values()),
        "files": len(checkpoint.files),
        "dtype": config.dtype,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "biases": [
            name
            for name, there in (("qkv", config.qkv_bias), ("o", config.o_bias), ("mlp", config.mlp_bias))
            if there
        ],
        "qk_norm": config.qk_norm,
        "tied_embeddings": config.tie_embeddings,
        "vocab_width": config.vocab_size,
        "vocab_real": tokenizer.size if tokenizer is not None else None,
        "context": config.max_position,
        "rope": _rope(config.rope),
        "sliding_window": config.sliding_window,
        "sliding_layers": list(config.sliding_layers),
        "tokenizer_tokens": len(tokenizer.vocab) if tokenizer is not None else None,
        "special_tokens": dict(tokenizer.special) if tokenizer is not None else {},
        "eos_token_ids": list(tokenizer.eos_token_ids) if tokenizer is not None else [],
        "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest()
        if template is not None
        else None,
        "warnings": list(checkpoint.warnings),
    }


def describe_head(head: EagleHead | MedusaHeads) -> dict[str, Any]:
    """The same of a drafter's heads."""
    found = {
        "path": str(head.path),
        "fingerprint": head.fingerprint,
        "method": head.method,
        "format": head.format,
        "parameters": head.num_parameters,
        "bytes": sum(tensor.length for tensor in head.tensors.values()),
        "own_lm_head": head.own_lm_head,
    }
    if isinstance(head, MedusaHeads):
        found |= {"heads": head.num_heads, "layers": head.num_layers, "hidden_size": head.hidden_size}
    else:
        config = head.config
        found |= {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "draft_vocabulary": config.vocab_size,
            "own_embedding": head.own_embedding,
            "taps": list(head.taps),
            "fc_norm": head.fc_norm,
            "head_norm": head.head_norm,
            "rope": _rope(config.rope),
        }
    return found | {"warnings": list(head.warnings)}


def _rope(rope: Rope) -> dict[str, Any]:
    """The fields that count for the kind."""
    counting = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
        "yarn": ("factor", "original_max_position", "beta_fast", "beta_slow", "attention_factor"),
    }[rope.kind]
    values = asdict(rope)
    return {"kind": rope.kind, "theta": rope.theta, **{name: values[name] for name in counting}}
