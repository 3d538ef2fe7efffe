"""What published drafter heads are, once read: facts proved from tensor headers. Plain data, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from builders.checkpoints.types import DecoderConfig, TensorRef

__all__ = ["EagleFormat", "EagleHead", "FcNorm", "Head", "HeadNorm", "MedusaHeads"]

EagleFormat = Literal["eagle", "eagle3", "specforge", "speculators"]
FcNorm = Literal["none", "joint", "each"]
HeadNorm = Literal["none", "logits", "recurrent"]


@dataclass(frozen=True)
class Head:
    """What all heads have. `tensors` is keyed by the names that graph emission uses."""

    path: Path
    tensors: Mapping[str, TensorRef] = field(repr=False)
    fingerprint: str  # SHA-256 over config.json and the weight file's name, size and header
    warnings: tuple[str, ...]  # claims of config.json that the tensors contradict, and what is shared

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, sorted, each once."""
        return tuple(sorted({t.file for t in self.tensors.values()}))

    @property
    def num_parameters(self) -> int:
        """Stored parameters; what is shared with the target does not count."""
        return sum(math.prod(t.shape) for t in self.tensors.values())


@dataclass(frozen=True)
class MedusaHeads(Head):
    """Medusa heads: head h (from 0) predicts the token h + 2 places behind the hidden state's own.

    Tensors: `heads.{h}.{l}.linear.weight` [H, H] and `.bias` [H]; where each head has its own lm_head,
    `heads.{h}.lm_head.weight` [vocab_size, H]. They read the target's hidden state behind its final norm.
    """

    num_heads: int
    num_layers: int  # residual blocks a head
    hidden_size: int
    own_lm_head: bool
    vocab_size: int | None  # rows of its own lm_heads; None: the target's lm_head serves all heads
    format: Literal["medusa"] = "medusa"
    method: Literal["medusa"] = "medusa"


@dataclass(frozen=True)
class EagleHead(Head):
    """An EAGLE head: one decoder layer that extrapolates the target's hidden states.

    Tensors, with H the head's hidden size, F the features' width and Vd the draft vocabulary:
    `fc.weight` [H, F] ([H, 2H] for method eagle, whose fc also reads the embedding) and optional `fc.bias`;
    `model.layers.0.*` as in a decoder, where eagle3's q, k and v read 2H, plus
    `model.layers.0.hidden_norm.weight` (eagle3); `model.norm.weight`, where there is one;
    `lm_head.weight` [Vd, H] and `model.embed_tokens.weight` [V, H], left out where the target's serve;
    `input_norm.weight` [F] or `fc_norm.{k}.weight` [F / taps].
    """

    method: Literal["eagle", "eagle3"]
    format: EagleFormat
    config: DecoderConfig  # of the one layer; vocab_size is Vd
    target_hidden_size: int
    taps: tuple[int, ...]  # target layers that ran before each tap; (): the final-normed hidden state
    fc_norm: FcNorm  # in front of fc: over all taps together (`input_norm`), or over each (`fc_norm.{k}`)
    norm_before_residual: bool  # the residual is the normed feature, not the feature itself
    head_norm: HeadNorm  # the final norm serves nothing, the logits alone, or also what recurs
    draft_to_target: npt.NDArray[np.int64] | None  # [Vd] target ids; None: the full vocabulary

    @property
    def own_lm_head(self) -> bool:
        """Whether lm_head is the head's own; else the target's serves (its rows `draft_to_target`)."""
        return "lm_head.weight" in self.tensors

    @property
    def own_embedding(self) -> bool:
        """Whether the embedding is the head's own; else the target's serves."""
        return "model.embed_tokens.weight" in self.tensors
