"""Random drafter heads in the published formats, and plain torch forwards to compare engines with.

The references follow the published descriptions and read the folders on their own: they share nothing with
the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from zoo import COMMON

Tensors = dict[str, torch.Tensor]


# -- targets ----------------------------------------------------------------------------------------


def make_deep_model(layers: int = 7, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random Llama that is deep enough for EAGLE-3's default taps (2, L // 2, L - 3)."""
    torch.manual_seed(seed)
    config = {**COMMON, "num_hidden_layers": layers, "tie_word_embeddings": False, **changes}
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@torch.no_grad()
def target_features(model: PreTrainedModel, tokens: Sequence[int], taps: Sequence[int] = ()) -> torch.Tensor:
    """What a head reads of the target at every token, [tokens, width].

    Args:
        taps: how many layers ran before each; the un-normed residual stream there. (): the state behind
            the final norm.
    """
    last: list[torch.Tensor] = []
    layers = model.model.layers
    hook = layers[-1].register_forward_hook(
        lambda _module, _inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        out = model.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    if not taps:
        return out.last_hidden_state[0]
    streams = [*out.hidden_states[: len(layers)], last[0]]
    return torch.cat([streams[tap][0] for tap in taps], dim=-1)


# -- heads in the published formats ------------------------------------------------------------------


def make_medusa(
    model: PreTrainedModel,
    folder: Path,
    *,
    heads: int = 3,
    layers: int = 1,
    own_lm_head: bool = True,
    pickled: bool = False,
    seed: int = 1,
) -> Path:
    """`{h}.{l}.linear.*` and, in version 1, `{h}.{layers}.weight`."""
    torch.manual_seed(seed)
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    tensors: Tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(hidden, hidden) * 0.2
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(hidden) * 0.2
        if own_lm_head:
            tensors[f"{head}.{layers}.weight"] = torch.randn(vocab, hidden) * 0.3
    config = {
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": "some/target",
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(folder, config if own_lm_head else {**config, "version": "2"})
    if pickled:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def make_eagle(
    model: PreTrainedModel,
    folder: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 10,
    fc_bias: bool = True,
    qkv_bias: bool = False,
    own_embedding: bool = True,
    own_lm_head: bool = False,
    spelling: str = "eagle",
    seed: int = 2,
) -> Path:
    """EAGLE-1/2: `fc`, `layers.0` without input norm, `embed_tokens`.

    Args:
        spelling: "eagle", or "speculators" for that project's first format.
    """
    torch.manual_seed(seed)
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    old = spelling == "speculators"
    fc, layer = ("fusion_fc", "transformer.") if old else ("fc", "layers.0.")
    tensors = {f"{fc}.weight": torch.randn(hidden, 2 * hidden) * 0.15}
    if fc_bias:
        tensors[f"{fc}.bias"] = torch.randn(hidden) * 0.2
    tensors |= _layer(layer, hidden, hidden, heads, kv_heads, head_dim, qkv_bias=qkv_bias)
    tensors[f"{layer}post_attention_layernorm.weight"] = _norm(hidden)
    tensors |= _tables(hidden, vocab, own_embedding, vocab if own_lm_head else None)
    config = _layer_config(model, hidden, heads, kv_heads, head_dim)
    if old:
        config = {
            "speculators_model_type": "eagle",
            "speculators_version": "0.1.0",
            "architectures": ["EagleSpeculator"],
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "transformer_layer_config": config,
            "layernorms": False,
            "fusion_bias": fc_bias,
        }
    else:
        config |= {"architectures": ["LlamaForCausalLM"], "bias": fc_bias}
    return _save(folder, tensors, config)


def make_eagle3(
    model: PreTrainedModel,
    folder: Path,
    *,
    hidden: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 10,
    draft_vocab: int | None = 41,
    own_lm_head: bool = True,
    own_embedding: bool = True,
    qkv_bias: bool = False,
    taps: Sequence[int] | None = None,
    seed: int = 3,
) -> Path:
    """EAGLE-3 as its authors publish it: `midlayer`, and taps at the default depths.

    Args:
        hidden: the head's own hidden size; None: the target's.
        draft_vocab: None: the full vocabulary, without d2t and t2d.
        taps: layers that ran before each; None: 2, L // 2, L - 3, which no key of the config says.
    """
    torch.manual_seed(seed)
    tensors, config = _eagle3_parts(
        model, "midlayer.", hidden, heads, kv_heads, head_dim, draft_vocab, own_lm_head, own_embedding, 3
    )
    if qkv_bias:
        tensors |= _qkv_biases("midlayer.", heads, kv_heads, head_dim)
    config |= {"architectures": ["LlamaForCausalLMEagle3"]}
    if taps is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
    return _save(folder, tensors, config)


def make_specforge(
    model: PreTrainedModel,
    folder: Path,
    *,
    taps: Sequence[int] = (1, 2, 3),
    fc_norm: bool = True,
    norm_output: bool = False,
    hidden: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 10,
    draft_vocab: int | None = 41,
    own_lm_head: bool = True,
    own_embedding: bool = True,
    seed: int = 4,
) -> Path:
    """SpecForge: EAGLE-3's names; taps as output indices inside `eagle_config`; two switches.

    Args:
        taps: layers that ran before each (the config gets one less).
    """
    torch.manual_seed(seed)
    tensors, config = _eagle3_parts(
        model,
        "midlayer.",
        hidden,
        heads,
        kv_heads,
        head_dim,
        draft_vocab,
        own_lm_head,
        own_embedding,
        len(taps),
    )
    if fc_norm:
        tensors |= {f"fc_norm.{k}.weight": _norm(model.config.hidden_size) for k in range(len(taps))}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [t - 1 for t in taps],
        },
        "fc_norm": fc_norm,
        "norm_output": norm_output,
    }
    return _save(folder, tensors, config)


def make_speculators(
    model: PreTrainedModel,
    folder: Path,
    *,
    taps: Sequence[int] = (0, 1, 2),
    norm_before_residual: bool = True,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    qk_norm: bool = False,
    hidden: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 10,
    draft_vocab: int | None = 41,
    own_lm_head: bool = True,
    own_embedding: bool = True,
    seed: int = 5,
) -> Path:
    """The speculators format: `layers.0`, taps as input indices, all norm switches."""
    torch.manual_seed(seed)
    tensors, layer_config = _eagle3_parts(
        model,
        "layers.0.",
        hidden,
        heads,
        kv_heads,
        head_dim,
        draft_vocab,
        own_lm_head,
        own_embedding,
        len(taps),
    )
    size = model.config.hidden_size
    if norm_before_fc:
        tensors["input_norm.weight"] = _norm(size * len(taps))
    if fc_norm:
        tensors |= {f"fc_norm.{k}.weight": _norm(size) for k in range(len(taps))}
    if qk_norm:
        tensors["layers.0.self_attn.q_norm.weight"] = _norm(head_dim)
        tensors["layers.0.self_attn.k_norm.weight"] = _norm(head_dim)
        layer_config["model_type"] = "qwen3"
    draft_vocab_size = layer_config.pop("draft_vocab_size")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
    }
    return _save(folder, tensors, config)


def edit_head(folder: Path, change: Callable[[Tensors], object] | None = None, **config: Any) -> Path:
    """Changes a head's tensors (by a function of their dict) and keys of its config (None deletes one)."""
    if change is not None:
        file = next(folder.glob("*.safetensors"))
        tensors = load_file(file)
        change(tensors)
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file)
    if config:
        values = {**json.loads((folder / "config.json").read_text()), **config}
        _write_config(folder, {key: value for key, value in values.items() if value is not None})
    return folder


def store_fp8(folder: Path, *, per_row: bool = True) -> Path:
    """Rewrites a head's matrices as F8_E4M3 with scales, as heads are stored small. Lossy, on purpose."""
    file = next(folder.glob("*.safetensors"))
    tensors: Tensors = {}
    for name, tensor in load_file(file).items():
        if not name.endswith(".weight") or tensor.ndim < 2:
            tensors[name] = tensor.half() if tensor.is_floating_point() else tensor
            continue
        top = tensor.abs().amax(dim=1, keepdim=True) if per_row else tensor.abs().max()
        scale = top.float() / 448
        tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    file.unlink()
    save_file(tensors, folder / "model.safetensors")
    return folder


def _eagle3_parts(
    model: PreTrainedModel,
    layer: str,
    own_hidden: int | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    draft_vocab: int | None,
    own_lm_head: bool,
    own_embedding: bool,
    taps: int,
) -> tuple[Tensors, dict[str, Any]]:
    target_hidden, vocab = model.config.hidden_size, model.config.vocab_size
    hidden = own_hidden or target_hidden
    tensors = {"fc.weight": torch.randn(hidden, taps * target_hidden) * 0.15}
    tensors |= _layer(layer, hidden, 2 * hidden, heads, kv_heads, head_dim)
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}{norm}.weight"] = _norm(hidden)
    tensors["norm.weight"] = _norm(hidden)
    tensors |= _tables(hidden, vocab, own_embedding, (draft_vocab or vocab) if own_lm_head else None)
    if draft_vocab is not None:
        ids = torch.randperm(vocab)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    config = _layer_config(model, hidden, heads, kv_heads, head_dim)
    config["draft_vocab_size"] = draft_vocab or vocab
    if hidden != target_hidden:
        config["target_hidden_size"] = target_hidden
    return tensors, config


def _layer(
    prefix: str, hidden: int, width: int, heads: int, kv_heads: int, head_dim: int, qkv_bias: bool = False
) -> Tensors:
    inner = 60
    shapes = {
        "self_attn.q_proj": (heads * head_dim, width),
        "self_attn.k_proj": (kv_heads * head_dim, width),
        "self_attn.v_proj": (kv_heads * head_dim, width),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {f"{prefix}{module}.weight": torch.randn(shape) * 0.2 for module, shape in shapes.items()}
    return tensors | (_qkv_biases(prefix, heads, kv_heads, head_dim) if qkv_bias else {})


def _qkv_biases(prefix: str, heads: int, kv_heads: int, head_dim: int) -> Tensors:
    rows = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    return {f"{prefix}self_attn.{module}.bias": torch.randn(count) * 0.3 for module, count in rows.items()}


def _tables(hidden: int, vocab: int, own_embedding: bool, lm_head_rows: int | None) -> Tensors:
    """Not the target's values, so that who takes the wrong table is found out."""
    tensors: Tensors = {}
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(vocab, hidden) * 0.5
    if lm_head_rows is not None:
        tensors["lm_head.weight"] = torch.randn(lm_head_rows, hidden) * 0.3
    return tensors


def _norm(size: int) -> torch.Tensor:
    return 1 + torch.randn(size) * 0.2


def _layer_config(
    model: PreTrainedModel, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 60,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": model.config.vocab_size,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
    }


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    _write_config(folder, config)
    return folder


# -- references -------------------------------------------------------------------------------------


class MedusaReference:
    """Medusa's forward: head h on the hidden state behind the target's final norm."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        self.tensors = _load(folder)
        self.lm_head = target.lm_head.weight.detach().float()
        self.heads = 1 + max(int(name.split(".")[0]) for name in self.tensors)
        self.layers = 1 + max(int(name.split(".")[1]) for name in self.tensors if "linear" in name)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] → [heads, ..., V]; head h speaks of the token h + 2 places on."""
        found = []
        for head in range(self.heads):
            x = hidden.float()
            for layer in range(self.layers):
                weight = self.tensors[f"{head}.{layer}.linear.weight"]
                bias = self.tensors[f"{head}.{layer}.linear.bias"]
                x = x + silu(x @ weight.T + bias)
            own = self.tensors.get(f"{head}.{self.layers}.weight", self.lm_head)
            found.append(x @ own.T)
        return torch.stack(found)


@dataclass(frozen=True)
class Node:
    """A place in a tree of draft tokens; the root stands behind all committed tokens."""

    logits: torch.Tensor  # [Vd], of the tokens that may follow
    state: torch.Tensor  # [H], what recurs
    position: int
    keys: torch.Tensor  # [positions so far, kv heads, head_dim], rotated
    values: torch.Tensor


class EagleReference:
    """EAGLE's forward of any format, one position at a time, nothing shared between siblings.

    Position j reads the token x[j + 1] and the target's feature of position j. Where drafts go on, the
    layer's own output stands for the feature.
    """

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        tensors = _load(folder)
        config = json.loads((folder / "config.json").read_text())
        speculators = "speculators_model_type" in config
        layer = config.get("transformer_layer_config", config)
        spelled = {
            "fusion_fc.": "fc.",
            "transformer.": "layer.",
            "midlayer.": "layer.",
            "layers.0.": "layer.",
        }
        self.t: Tensors = {}
        for name, tensor in tensors.items():
            prefix = next((p for p in spelled if name.startswith(p)), "")
            self.t[spelled.get(prefix, "") + name.removeprefix(prefix)] = tensor
        self.eagle3 = "layer.hidden_norm.weight" in self.t
        self.eps = layer["rms_norm_eps"]
        self.theta = layer["rope_theta"]
        self.heads, self.kv_heads = layer["num_attention_heads"], layer["num_key_value_heads"]
        self.head_dim = layer["head_dim"]
        self.embedding = self.t.get("embed_tokens.weight", target.model.embed_tokens.weight.detach().float())
        self.to_target = None
        if "d2t" in self.t:
            self.to_target = torch.arange(len(self.t["d2t"])) + self.t["d2t"]
        lm_head = self.t.get("lm_head.weight")
        if lm_head is None:
            lm_head = target.lm_head.weight.detach().float()
            lm_head = lm_head if self.to_target is None else lm_head[self.to_target]
        self.lm_head = lm_head
        self.first_position = 1 if speculators and self.eagle3 else 0
        self.norm_before_residual = speculators and config.get("norm_before_residual", False)
        output = config.get("norm_output", not speculators)
        self.norm_logits = self.eagle3 and (speculators or output)
        self.norm_recurs = self.eagle3 and speculators and output

    @torch.no_grad()
    def root(self, tokens: Sequence[int], features: torch.Tensor) -> Node:
        """Committed tokens x[0] … x[T] and the target's features [T, F] of x[0] … x[T-1]."""
        if len(tokens) != len(features) + 1:
            raise ValueError("one token more than features: the last one was only just sampled")
        empty = torch.zeros(0, self.kv_heads, self.head_dim)
        node = Node(empty, empty, self.first_position - 1, empty, empty)
        for token, feature in zip(tokens[1:], features.float(), strict=True):
            node = self._step(node, token, self._fuse(feature))
        return node

    @torch.no_grad()
    def child(self, node: Node, token: int) -> Node:
        """The node's child by a draft token, given as the target's id."""
        return self._step(node, token, node.state)

    def best(self, node: Node, count: int) -> list[int]:
        """The target's ids of the `count` most likely draft tokens, the best first."""
        return [self.target_id(int(i)) for i in node.logits.topk(count).indices]

    def target_id(self, draft_id: int) -> int:
        return draft_id if self.to_target is None else int(self.to_target[draft_id])

    def draft(
        self, tokens: Sequence[int], features: torch.Tensor, gamma: int
    ) -> tuple[list[int], torch.Tensor]:
        """A greedy chain: the target's ids of γ draft tokens, and their logits [γ, Vd]."""
        node = self.root(tokens, features)
        found: list[int] = []
        logits: list[torch.Tensor] = []
        for i in range(gamma):
            node = self.child(node, found[-1]) if i else node
            found += self.best(node, 1)
            logits.append(node.logits)
        return found, torch.stack(logits)

    def tree(
        self, tokens: Sequence[int], features: torch.Tensor, parents: Sequence[int], drafts: Sequence[int]
    ) -> torch.Tensor:
        """Logits [1 + nodes, Vd] behind the root (row 0) and behind each node of a tree.

        Args:
            parents: of node 1, 2, …; 0 is the root. Parents come before their children.
            drafts: the nodes' tokens, as the target's ids.
        """
        nodes = [self.root(tokens, features)]
        for parent, token in zip(parents, drafts, strict=True):
            nodes.append(self.child(nodes[parent], token))
        return torch.stack([node.logits for node in nodes])

    def widened(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits [..., Vd] → [..., V]: -inf for what the draft vocabulary lacks."""
        if self.to_target is None:
            return logits
        wide = torch.full((*logits.shape[:-1], vocab_size), -torch.inf)
        wide[..., self.to_target] = logits
        return wide

    def _fuse(self, feature: torch.Tensor) -> torch.Tensor:
        """The target's feature as the layer takes it: EAGLE-3 brings its taps to the head's width."""
        if not self.eagle3:
            return feature
        if "input_norm.weight" in self.t:
            feature = self._norm(feature, "input_norm")
        if "fc_norm.0.weight" in self.t:
            taps = sum(name.startswith("fc_norm.") for name in self.t)
            parts = feature.chunk(taps)
            feature = torch.cat([self._norm(part, f"fc_norm.{k}") for k, part in enumerate(parts)])
        return self._linear(feature, "fc")

    def _step(self, node: Node, token: int, feature: torch.Tensor) -> Node:
        embedded = self.embedding[token]
        if self.eagle3:
            normed = self._norm(feature, "layer.hidden_norm")
            residual = normed if self.norm_before_residual else feature
            read = torch.cat([self._norm(embedded, "layer.input_layernorm"), normed])
        else:
            residual = read = self._linear(torch.cat([embedded, feature]), "fc")
        position = node.position + 1
        query = self._split(read, "q", self.heads)
        key = self._split(read, "k", self.kv_heads)
        value = self._linear(read, "layer.self_attn.v_proj").view(self.kv_heads, self.head_dim)
        keys = torch.cat([node.keys, self._rotate(key, position)[None]])
        values = torch.cat([node.values, value[None]])
        query = self._rotate(query, position)
        group = self.heads // self.kv_heads
        attended = []
        for head in range(self.heads):
            scores = keys[:, head // group] @ query[head] / self.head_dim**0.5
            attended.append(scores.softmax(0) @ values[:, head // group])
        y = residual + self._linear(torch.cat(attended), "layer.self_attn.o_proj")
        z = self._norm(y, "layer.post_attention_layernorm")
        gated = silu(self._linear(z, "layer.mlp.gate_proj")) * self._linear(z, "layer.mlp.up_proj")
        y = y + self._linear(gated, "layer.mlp.down_proj")
        normed = self._norm(y, "norm") if self.norm_logits else y
        state = normed if self.norm_recurs else y
        return Node(normed @ self.lm_head.T, state, position, keys, values)

    def _split(self, x: torch.Tensor, which: str, heads: int) -> torch.Tensor:
        y = self._linear(x, f"layer.self_attn.{which}_proj").view(heads, self.head_dim)
        norm = f"layer.self_attn.{which}_norm"
        return self._norm(y, norm) if f"{norm}.weight" in self.t else y

    def _rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = self.head_dim // 2
        angle = position * self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angle.cos().float(), angle.sin().float()
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def _linear(self, x: torch.Tensor, module: str) -> torch.Tensor:
        y = self.t[f"{module}.weight"] @ x
        bias = self.t.get(f"{module}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: torch.Tensor, module: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.t[f"{module}.weight"]


def naive_dynamic_tree(
    reference: EagleReference, root: Node, depth: int, top_k: int, size: int
) -> set[tuple[int, ...]]:
    """EAGLE-2 with lists: paths of tokens that are kept."""
    pool: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...], Node]] = [(0.0, (), root)]
    for _ in range(depth):
        level = []
        for score, path, node in frontier:
            logs = torch.log_softmax(node.logits, -1)
            for i in logs.topk(top_k).indices.tolist():
                level.append((score + float(logs[i]), (*path, reference.target_id(i)), node))
        pool += [(score, path) for score, path, _ in level]
        best = sorted(level, key=lambda entry: -entry[0])[:top_k]
        frontier = [(score, path, reference.child(node, path[-1])) for score, path, node in best]
    return {path for _, path in sorted(pool, key=lambda entry: -entry[0])[:size]}


def _load(folder: Path) -> Tensors:
    """Tensors by published name; floats in float32."""
    found = sorted(folder.glob("*.safetensors"))
    tensors = load_file(found[0]) if found else torch.load(next(folder.glob("*.pt")), weights_only=True)
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
