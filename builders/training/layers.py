"""The drafters' one decoder layer, written so that chains can be unrolled for every position at once.

Step 0 of a chain that starts at row t reads the target's states of rows 0..t. Step k > 0 reads what
the drafter itself made: its own output of step k-1 at row t. So its keys are those of step 0 up to
row t, and one key of each later step at the same row t (EAGLE-3, section 3.2, training-time test).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Chain", "Layer", "LayerShape", "RMSNorm"]


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a Llama decoder layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float


@dataclass
class Chain:
    """Keys and values of the steps so far, each [B, kv heads, T, D]; rotated."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as `x`."""
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `width` is that of its input."""

    def __init__(self, shape: LayerShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, chain: Chain) -> torch.Tensor:
        """One more step of all chains; `chain` grows by it. x [B, T, width] → [B, T, hidden]."""
        shape = self.shape
        batch, length, _ = x.shape
        step = len(chain.keys)
        cos, sin = _rotation(length, step, shape, x.device)

        def split(y: torch.Tensor, heads: int) -> torch.Tensor:
            return y.view(batch, length, heads, shape.head_dim).transpose(1, 2)

        query = _rotate(split(self.q_proj(x), shape.heads), cos, sin)
        chain.keys.append(_rotate(split(self.k_proj(x), shape.kv_heads), cos, sin))
        chain.values.append(split(self.v_proj(x), shape.kv_heads))
        if step == 0:
            repeats = shape.heads // shape.kv_heads
            out = functional.scaled_dot_product_attention(
                query,
                chain.keys[0].repeat_interleave(repeats, 1),
                chain.values[0].repeat_interleave(repeats, 1),
                is_causal=True,
            )
        else:
            out = _attend_chain(query, chain)
        merged: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return merged


def _attend_chain(query: torch.Tensor, chain: Chain) -> torch.Tensor:
    """Attention of a step > 0: causal over step 0, one key a later step. [B, heads, T, D]."""
    batch, heads, length, dim = query.shape
    groups = chain.keys[0].shape[1]
    grouped = query.reshape(batch, groups, heads // groups, length, dim) * dim**-0.5
    scores = torch.matmul(grouped, chain.keys[0][:, :, None].transpose(3, 4)).float()
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    own = [(grouped * key[:, :, None]).sum(-1, keepdim=True).float() for key in chain.keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(chain.values[0].dtype)
    out = torch.matmul(weights[..., :length], chain.values[0][:, :, None])
    for j, value in enumerate(chain.values[1:]):
        out = out + weights[..., length + j, None] * value[:, :, None]
    return out.reshape(batch, heads, length, dim)


def _rotation(
    length: int, step: int, shape: LayerShape, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, D] for row t at position t + step."""
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
    angle = torch.outer(torch.arange(step, step + length, device=device).float(), frequency)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] → [..., hidden]."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A Llama decoder layer; its attention may read something wider than the residual stream.

    Norms of the attention's input belong to the drafter, since they differ between the formats;
    where a format keeps them in the layer they are attached to it under their published names.
    """

    def __init__(self, shape: LayerShape, width: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(shape, width or shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, residual: torch.Tensor, read: torch.Tensor, chain: Chain) -> torch.Tensor:
        """residual [B, T, hidden], read [B, T, width] → [B, T, hidden]."""
        y = residual + self.self_attn(read, chain)
        out: torch.Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out
