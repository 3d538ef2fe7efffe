"""The heads' forward passes, written anew from the published descriptions: one row after the other."""

from __future__ import annotations

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """x [heads, D] turned as pairs (i, i + D/2) of complex numbers."""
    half = x.shape[1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[1])
    turned = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(
        torch.ones(half, dtype=torch.float64), angles
    )
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


class Chain:
    """A drafter's decoder layer with its cache. `prefix` is where the layer's tensors are."""

    def __init__(self, tensors: Tensors, config: dict[str, object], prefix: str) -> None:
        self.t = {n.removeprefix(prefix): w.float() for n, w in tensors.items() if n.startswith(prefix)}
        self.heads, self.kv = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        self.dim, self.theta = int(config["head_dim"]), float(config["rope_theta"])
        self.eps = float(config["rms_norm_eps"])
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def copy(self) -> Chain:
        other = object.__new__(Chain)
        other.__dict__ = dict(self.__dict__, keys=list(self.keys), values=list(self.values))
        return other

    def row(self, residual: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        """One row [H], at the position after those before."""
        position = len(self.keys)

        def heads(name: str, count: int) -> torch.Tensor:
            return (self.t[f"self_attn.{name}_proj.weight"] @ read).view(count, self.dim)

        query = rope(heads("q", self.heads), position, self.theta)
        self.keys.append(rope(heads("k", self.kv), position, self.theta))
        self.values.append(heads("v", self.kv))
        group = self.heads // self.kv
        out = []
        for h in range(self.heads):
            keys = torch.stack([k[h // group] for k in self.keys])
            values = torch.stack([v[h // group] for v in self.values])
            out.append(((keys @ query[h]) / np.sqrt(self.dim)).softmax(0) @ values)
        y = residual + self.t["self_attn.o_proj.weight"] @ torch.cat(out)
        x = rms(y, self.t["post_attention_layernorm.weight"], self.eps)
        gate = self.t["mlp.gate_proj.weight"] @ x
        return y + self.t["mlp.down_proj.weight"] @ (
            gate * gate.sigmoid() * (self.t["mlp.up_proj.weight"] @ x)
        )


def eagle_chain(
    tensors: Tensors,
    config: dict[str, object],
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    ids: list[int],
    hidden: torch.Tensor,
    drafts: int,
) -> list[int]:
    """EAGLE-1: drafts after `ids`; `hidden` [len(ids) - 1, H] are the target's states before the last."""
    chain = Chain(tensors, config, "layers.0.")
    state = hidden[0]
    for j in range(len(ids) - 1):
        mixed = tensors["fc.weight"].float() @ torch.cat([embedding[ids[j + 1]], hidden[j]])
        mixed = mixed + tensors["fc.bias"].float()
        state = chain.row(mixed, mixed)
    found = []
    for _ in range(drafts):
        found.append(int((lm_head @ state).argmax()))
        mixed = tensors["fc.weight"].float() @ torch.cat([embedding[found[-1]], state])
        mixed = mixed + tensors["fc.bias"].float()
        state = chain.row(mixed, mixed)
    return found


def eagle3_chain(
    tensors: Tensors,
    config: dict[str, object],
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    ids: list[int],
    taps: torch.Tensor,
    drafts: int,
) -> list[int]:
    """EAGLE-3: the same with `taps` [len(ids) - 1, 3H]; `lm_head` [Vd, H] are its own rows."""
    chain = Chain(tensors, config, "midlayer.")
    eps = chain.eps

    def row(token: int, state: torch.Tensor) -> torch.Tensor:
        read = torch.cat(
            [
                rms(embedding[token], tensors["midlayer.input_layernorm.weight"].float(), eps),
                rms(state, tensors["midlayer.hidden_norm.weight"].float(), eps),
            ]
        )
        return chain.row(state, read)

    state = taps[0]
    for j in range(len(ids) - 1):
        state = row(ids[j + 1], tensors["fc.weight"].float() @ taps[j])
    found = []
    for _ in range(drafts):
        best = int((lm_head @ rms(state, tensors["norm.weight"].float(), eps)).argmax())
        found.append(best + int(tensors["d2t"][best]))
        state = row(found[-1], state)
    return found


def medusa_drafts(tensors: Tensors, lm_head: torch.Tensor, hidden: torch.Tensor) -> list[int]:
    """Medusa v2: one draft a head from the last hidden state [H]."""
    found = []
    while f"{len(found)}.0.linear.weight" in tensors:
        x, layer = hidden, f"{len(found)}.0.linear"
        while f"{layer}.weight" in tensors:
            z = tensors[f"{layer}.weight"].float() @ x + tensors[f"{layer}.bias"].float()
            x = x + z * z.sigmoid()
            h, depth, _ = layer.split(".")
            layer = f"{h}.{int(depth) + 1}.linear"
        found.append(int((lm_head @ x).argmax()))
    return found
