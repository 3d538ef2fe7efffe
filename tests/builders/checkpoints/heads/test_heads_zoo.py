"""The references themselves: against transformers' own layer, and against what is known of the formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heads_zoo import (
    EagleReference,
    MedusaReference,
    edit_head,
    make_eagle,
    make_eagle3,
    make_medusa,
    make_specforge,
    make_speculators,
    target_features,
)
from safetensors.torch import load_file
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

TOKENS = [5, 17, 42, 8, 93, 3]


def features(model: PreTrainedModel, taps: tuple[int, ...] = ()) -> torch.Tensor:
    return target_features(model, TOKENS[:-1], taps)


def test_the_layer_is_that_of_transformers(tmp_path: Path, target_model: PreTrainedModel) -> None:
    """EAGLE-1: all positions at once through a LlamaDecoderLayer whose input norm does nothing."""
    folder = make_eagle(target_model, tmp_path, qkv_bias=True)
    t = load_file(folder / "model.safetensors")
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=60,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        attention_bias=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(config, 0).eval()
    layer.input_layernorm = torch.nn.Identity()
    weights = {n.removeprefix("layers.0."): w for n, w in t.items() if n.startswith("layers.0.")}
    weights["self_attn.o_proj.bias"] = torch.zeros(48)
    layer.load_state_dict(weights)
    emb = t["embed_tokens.weight"][torch.tensor(TOKENS[1:])]
    x = torch.cat([emb, features(target_model)], dim=-1) @ t["fc.weight"].T + t["fc.bias"]
    positions = torch.arange(len(x))[None]
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        out = layer(
            x[None],
            attention_mask=mask,
            position_embeddings=LlamaRotaryEmbedding(config)(x, positions),
        )
        out = out[0] if isinstance(out, tuple) else out
        expected = target_model.lm_head(out.reshape(-1, 48)[-1])
    reference = EagleReference(folder, target_model)
    got = reference.root(TOKENS, features(target_model))
    torch.testing.assert_close(got.logits, expected, rtol=1e-4, atol=1e-4)


def test_medusa_starts_as_the_target(tmp_path: Path, target_model: PreTrainedModel) -> None:
    """Blocks of zeros and a copy of lm_head: every head says what the target says."""
    folder = make_medusa(target_model, tmp_path, layers=2)

    def untrain(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.zero_() if "linear" in name else tensor.copy_(target_model.lm_head.weight.detach())

    edit_head(folder, untrain)
    hidden = features(target_model)
    with torch.no_grad():
        expected = target_model.lm_head(hidden)
    found = MedusaReference(folder, target_model).logits(hidden)
    assert found.shape == (3, len(hidden), 97)
    for head in found:
        torch.testing.assert_close(head, expected)


def test_features_are_the_residual_stream(target_model: PreTrainedModel) -> None:
    embedded = target_model.model.embed_tokens(torch.tensor(TOKENS[:-1])).detach()
    first, last = features(target_model, (0, 7)).chunk(2, dim=-1)
    torch.testing.assert_close(first, embedded)
    with torch.no_grad():
        torch.testing.assert_close(target_model.model.norm(last), features(target_model))


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"])
def test_every_switch_matters(switch: str, tmp_path: Path, target_model: PreTrainedModel) -> None:
    plain = {"norm_before_residual": False}
    chains = []
    for i, switches in enumerate((plain, {**plain, switch: True})):
        folder = make_speculators(target_model, tmp_path / str(i), **switches)  # type: ignore[arg-type]
        reference = EagleReference(folder, target_model)
        chains.append(reference.draft(TOKENS, features(target_model, (0, 1, 2)), 3)[1])
    # What only recurs leaves the first draft token alone.
    assert torch.equal(chains[0][0], chains[1][0]) == (switch == "norm_output")
    assert not torch.allclose(chains[0][1], chains[1][1], atol=1e-2)


def test_specforge_without_output_norm(tmp_path: Path, target_model: PreTrainedModel) -> None:
    logits = []
    for norm in (True, False):
        folder = make_specforge(target_model, tmp_path / str(norm), norm_output=norm)
        reference = EagleReference(folder, target_model)
        logits.append(reference.root(TOKENS, features(target_model, (1, 2, 3))).logits)
    assert not torch.allclose(logits[0], logits[1], atol=1e-2)


def test_trees_are_chains_that_share_a_start(tmp_path: Path, target_model: PreTrainedModel) -> None:
    reference = EagleReference(make_eagle3(target_model, tmp_path), target_model)
    taps = features(target_model, (2, 3, 4))
    chain, logits = reference.draft(TOKENS, taps, 4)
    root = reference.root(TOKENS, taps)
    other = reference.best(root, 2)[1]
    tree = reference.tree(TOKENS, taps, [0, 0, 1, 3], [chain[0], other, chain[1], chain[2]])
    torch.testing.assert_close(tree[[0, 1, 3, 4]], logits)
    assert not torch.allclose(tree[2], tree[1], atol=1e-3)
    assert torch.equal(reference.widened(logits, 97).isfinite().sum(-1), torch.full((4,), 41))
    assert all(reference.widened(logits, 97)[i, token].isfinite() for i, token in enumerate(chain))


def test_positions_are_relative(tmp_path: Path, target_model: PreTrainedModel) -> None:
    reference = EagleReference(make_speculators(target_model, tmp_path), target_model)
    taps = features(target_model, (0, 1, 2))
    expected = reference.draft(TOKENS, taps, 3)[1]
    assert reference.first_position == 1
    reference.first_position = 30
    torch.testing.assert_close(reference.draft(TOKENS, taps, 3)[1], expected, rtol=1e-4, atol=1e-4)
