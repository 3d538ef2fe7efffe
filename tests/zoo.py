"""Small random checkpoints of every family, saved by transformers, and engines made from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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

from builders.checkpoints.heads.reader import read_head
from builders.checkpoints.reader import read_checkpoint
from builders.checkpoints.types import Checkpoint
from builders.graph.step import Drafter, emit_step, engine_shapes
from engines.bundle import CacheShape, DynamicTree, EngineFacts, LookaheadSize, StaticTree, TypicalAcceptance
from engines.sessions.base import StepInputs
from engines.sessions.onnxruntime import OnnxSession

COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}


def _llama(**changes: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**COMMON, **changes}))


FAMILIES = {
    "llama": lambda: _llama(tie_word_embeddings=False),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama3-rope": lambda: _llama(rope_parameters=LLAMA3_ROPE),
    "linear-rope": lambda: _llama(rope_parameters=LINEAR_ROPE),
    "yarn-rope": lambda: _llama(rope_parameters=YARN_ROPE),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=7)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON)),
    "qwen2-window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=16)),
}


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model; biases and norms are random, too, so that none can be forgotten unnoticed."""
    torch.manual_seed(seed)
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def make_noisy(name: str, noise: float) -> PreTrainedModel:
    """The model of `make_model`, disturbed: a drafter that is often, not always, right."""
    return disturbed(make_model(name), noise)


def disturbed(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    model.to(dtype).save_pretrained(folder)
    return folder


def engine_facts(target: Checkpoint, **changes: object) -> EngineFacts:
    """Facts of an engine that was never bundled."""
    config = target.config
    values: dict[str, object] = {
        "method": "none",
        "gamma": 0,
        "exit_layer": None,
        "verification": "exact",
        "precision": "fp32",
        "lossless": True,
        "max_batch_size": 8,
        "max_seq_len": 96,
        "vocab_size": config.vocab_size,
        "target_cache": CacheShape(
            layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim
        ),
        "draft_cache": None,
        "eos_token_ids": [],
        "margin_tolerance": 1e-3,
        "step_cost": [1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.12, 1.14, 1.16],
    }
    return EngineFacts.model_validate({**values, **changes})


def make_session(
    folder: Path,
    out: Path,
    *,
    method: str | None = None,
    gamma: int = 0,
    exit_layer: int | None = None,
    drafter: Path | None = None,
    vocab_size: int | None = None,
    max_seq_len: int = 96,
    tree: StaticTree | DynamicTree | None = None,
    lookahead: LookaheadSize | None = None,
    verification: str = "exact",
    confidence_threshold: float = 0.0,
    slots: int = 8,
) -> tuple[OnnxSession, EngineFacts]:
    """Emit the step of a checkpoint folder and load it, without the pipeline around it."""
    method = method or ("ngram" if gamma else "none")
    target = read_checkpoint(folder)
    draft: Drafter | None = None
    if drafter is not None:
        draft = read_checkpoint(drafter) if method == "draft_model" else read_head(drafter, target)
    locations: dict[Path, str] = {}
    for who, checkpoint in (("target", target), ("drafter", draft)):
        for file in checkpoint.files if checkpoint else ():
            place = out / "weights" / who / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.hardlink_to(file)
            locations[file] = str(place.relative_to(out))
    facts = engine_facts(
        target,
        method=method,
        gamma=gamma,
        exit_layer=exit_layer,
        tree=tree,
        lookahead=lookahead,
        verification=verification,
        typical=TypicalAcceptance(posterior_threshold=0.09, posterior_alpha=0.3)
        if verification == "typical"
        else None,
        lossless=verification != "typical",
        confidence_threshold=confidence_threshold,
        max_batch_size=slots,
        max_seq_len=max_seq_len,
        vocab_size=vocab_size or target.config.vocab_size,
    )
    facts = facts.model_copy(update=engine_shapes(target, draft))
    emit_step(target, draft, facts, locations=locations, out=out)
    return OnnxSession(out / facts.graph, facts, threads=1), facts


def step_inputs(tokens: np.ndarray, lengths: list[int], **changes: object) -> StepInputs:
    """A greedy step."""
    batch = tokens.shape[0]
    drafts = changes.get("draft_tokens")
    rows = 1 if drafts is None else 1 + drafts.shape[1]  # type: ignore[union-attr,attr-defined]
    values: dict[str, object] = {
        "slot": 0,
        "tokens": tokens,
        "token_counts": np.full(batch, tokens.shape[1], np.int64),
        "lengths": np.array(lengths, np.int64),
        "draft_counts": np.full(batch, rows - 1, np.int64),
        "temperature": np.zeros(batch, np.float32),
        "top_k": np.zeros(batch, np.int64),
        "top_p": np.ones(batch, np.float32),
        "uniforms": np.zeros((batch, rows, 3), np.float32),
        **changes,
    }
    return StepInputs(**values)  # type: ignore[arg-type]
