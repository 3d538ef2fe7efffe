"""What a checkpoint is, once read: facts proved from tensor headers. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["Checkpoint", "DecoderConfig", "Rope", "TensorRef", "TokenizerFacts"]

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class TensorRef:
    """A tensor's place on disk. `offset` counts from the start of `file`, in bytes."""

    name: str
    dtype: str  # as safetensors spells it: F32, F16, BF16, I64, F8_E4M3, ...
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base, and the scaling of its frequencies.

    `kind` selects which of the other fields count; names are Hugging Face's `rope_scaling` keys.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn: None means the paper's 0.1 ln(factor) + 1


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer of the Llama family, as its tensors prove it."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"]
    vocab_size: int  # rows of lm_head: the logit width, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # applies to the layers listed below
    sliding_layers: tuple[int, ...] = ()
    dtype: str = "F32"  # of the linear weights


@dataclass(frozen=True)
class TokenizerFacts:
    """What is known of a tokenizer without running it.

    `vocab` maps token to id, added tokens included; `size` is the highest id + 1, which is the
    real vocabulary (lm_head may be wider: the rest is padding).
    """

    file: Path | None
    vocab: Mapping[str, int] = field(repr=False)
    special: Mapping[str, int]  # bos_token, eos_token, pad_token, unk_token -> id, where present
    eos_token_ids: tuple[int, ...]  # generation stops at any of these
    chat_template: str | None
    size: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers were read. `tensors` is keyed by Hugging Face tensor name."""

    path: Path
    config: DecoderConfig
    tensors: Mapping[str, TensorRef] = field(repr=False)
    tokenizer: TokenizerFacts | None
    fingerprint: str  # SHA-256 over config, tokenizer and the weight files' headers
    warnings: tuple[str, ...] = ()  # claims of config.json that the headers contradict

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, sorted, each once."""
        return tuple(sorted({t.file for t in self.tensors.values()}))

    @property
    def num_parameters(self) -> int:
        """Stored parameters (tied weights count once)."""
        total = 0
        for tensor in self.tensors.values():
            count = 1
            for dim in tensor.shape:
                count *= dim
            total += count
        return total
