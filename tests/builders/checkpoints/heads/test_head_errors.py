"""What is refused: every message has a rule, the tensor or key, what was found, what is allowed, a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_zoo import (
    Tensors,
    edit_head,
    make_deep_model,
    make_eagle,
    make_eagle3,
    make_medusa,
    make_specforge,
    make_speculators,
)
from safetensors.torch import save_file
from transformers import PreTrainedModel

from builders.checkpoints.heads.reader import is_head, read_head
from builders.checkpoints.types import Checkpoint
from engines.errors import CheckpointError, PairingError, TrtspecError

Make = Callable[..., Path]
Change = Callable[[Tensors], object]


def refused(folder: Path, target: Checkpoint) -> TrtspecError:
    with pytest.raises((CheckpointError, PairingError)) as caught:
        read_head(folder, target)
    error = caught.value
    assert error.found and error.place and error.remedy
    return error


def check(error: TrtspecError, rule: str, place: str, found: str, allowed: str) -> None:
    assert error.rule == rule
    assert error.place.endswith(place)
    assert found in error.found
    assert allowed in error.allowed


# -- another target ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "tensor", "found", "allowed"),
    [
        (make_medusa, "0.0.linear.weight", "a hidden size of 48", "64"),
        (make_eagle, "fc.weight", "a hidden size of 48", "64"),
        (make_eagle3, "fc.weight", "it reads 144 values of the target, for 3 taps", "taps of 64"),
        (make_speculators, "fc.weight", "3 taps, as eagle_aux_hidden_state_layer_ids says", "taps of 64"),
    ],
)
def test_another_hidden_size(
    make: Make,
    tensor: str,
    found: str,
    allowed: str,
    tmp_path: Path,
    target_model: PreTrainedModel,
    target: Checkpoint,
) -> None:
    wide = replace(target, config=replace(target.config, hidden_size=64))
    error = refused(make(target_model, tmp_path), wide)
    assert isinstance(error, PairingError)
    check(error, "head.other-target", f":{tensor}", found, allowed)


@pytest.mark.parametrize(
    ("make", "tensor"),
    [
        (make_medusa, "0.1.weight"),
        (make_eagle, "embed_tokens.weight"),
        (make_eagle3, "embed_tokens.weight"),
    ],
)
@pytest.mark.parametrize("vocab", [60, 128, 4096])
def test_another_vocabulary(
    make: Make, tensor: str, vocab: int, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    other = replace(target, config=replace(target.config, vocab_size=vocab))
    error = refused(make(target_model, tmp_path), other)
    assert isinstance(error, PairingError)
    check(error, "head.other-target", f":{tensor}", "97 rows", str(vocab))


def test_a_full_lm_head_of_another_vocabulary(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    other = replace(target, config=replace(target.config, vocab_size=128))
    folder = make_eagle3(target_model, tmp_path, draft_vocab=None, own_embedding=False)
    edit_head(folder, draft_vocab_size=None)
    check(refused(folder, other), "head.other-target", ":lm_head.weight", "97 rows", "128")


@pytest.mark.parametrize(
    ("make", "taps", "place"),
    [(make_speculators, (0, 2, 8), "config.json:"), (make_specforge, (1, 2, 8), "config.json:eagle_config:")],
)
def test_taps_beyond_the_layers(
    make: Make,
    taps: tuple[int, ...],
    place: str,
    tmp_path: Path,
    target_model: PreTrainedModel,
    target: Checkpoint,
) -> None:
    error = refused(make(target_model, tmp_path, taps=taps), target)
    check(
        error,
        "head.taps",
        f"{place}eagle_aux_hidden_state_layer_ids",
        "a tap behind 8 layers, and the target has 7",
        "0 … 7",
    )
    assert isinstance(error, PairingError)


def test_default_taps_need_three_layers(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    flat = replace(target, config=replace(target.config, num_layers=2))
    assert refused(make_eagle3(target_model, tmp_path), flat).rule == "head.taps"


@pytest.mark.parametrize("listed", [[0, 1], [0, 1, 2, 3], [2]])
def test_another_number_of_taps_than_fc_reads(
    listed: list[int], tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = edit_head(make_speculators(target_model, tmp_path), eagle_aux_hidden_state_layer_ids=listed)
    check(refused(folder, target), "head.other-target", ":fc.weight", f"for {len(listed)} taps", "taps of 48")


@pytest.mark.parametrize(
    "listed", ["0,1,2", [0, 1, "2"], [0, 1, 2.0], [True, 1, 2], {"a": 1}, [0, 1, 1 << 70]]
)
def test_taps_that_are_no_list_of_layers(
    listed: Any, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = edit_head(make_speculators(target_model, tmp_path), eagle_aux_hidden_state_layer_ids=listed)
    assert refused(folder, target).rule == "checkpoint.bad-config"


# -- the draft vocabulary ---------------------------------------------------------------------------


def set_d2t(value: int, at: int = 7) -> Change:
    return lambda tensors: tensors["d2t"].__setitem__(at, value)


def ids_of(tensors: Tensors) -> torch.Tensor:
    return torch.arange(len(tensors["d2t"])) + tensors["d2t"]


def repeat(tensors: Tensors) -> None:
    tensors["d2t"][8] = ids_of(tensors)[7] - 8


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] = ids_of(tensors)


def move(tensors: Tensors) -> None:
    """t2d with as many tokens, one of them another."""
    marked, free = tensors["t2d"].nonzero()[3], (~tensors["t2d"]).nonzero()[5]
    tensors["t2d"][marked], tensors["t2d"][free] = False, True


@pytest.mark.parametrize(
    ("change", "place", "found", "allowed"),
    [
        (lambda t: t.pop("d2t"), ":d2t", "no d2t, and t2d leaves tokens out", "d2t beside t2d"),
        (lambda t: [t.pop("d2t"), t.pop("t2d")], ":d2t", "lm_head.weight has 41 rows", "d2t [41]"),
        (set_d2t(90), ":d2t[7]", "the target's token 97 (1 such)", "0 … 96"),
        (set_d2t(-8), ":d2t[7]", "the target's token -1", "0 … 96"),
        (set_d2t(1 << 62), ":d2t[7]", "(1 such)", "0 … 96"),
        (set_d2t(-(1 << 63)), ":d2t[7]", "(1 such)", "0 … 96"),
        (repeat, ":d2t", "draft tokens [7, 8] all stand for token", "each token once"),
        (absolute, ":d2t[", "the target's token", "0 … 96"),
        (lambda t: t.update(d2t=t["d2t"].float()), ":d2t", "F32 [41]", "I64"),
        (lambda t: t.update(d2t=t["d2t"].int()), ":d2t", "I32 [41]", "I64"),
        (lambda t: t.update(d2t=t["d2t"][None]), ":d2t", "I64 [1, 41]", "I64 [draft vocabulary]"),
        (lambda t: t.update(d2t=t["d2t"][:40]), ":d2t", "40 entries", "41, one a row"),
        (lambda t: t.update(d2t=t["d2t"][:0]), ":d2t", "I64 [0]", "I64 [draft vocabulary]"),
        (lambda t: t["t2d"].fill_(True), ":t2d", "marks 97 tokens", "41"),
        (move, ":t2d", "where d2t leads to token", "the tokens that d2t leads to"),
        (lambda t: t.update(t2d=t["t2d"].long()), ":t2d", "I64 [97]", "BOOL"),
        (lambda t: [t.pop("d2t"), t.update(t2d=t["t2d"].byte())], ":t2d", "U8 [97]", "BOOL"),
    ],
)
def test_maps(
    change: Change,
    place: str,
    found: str,
    allowed: str,
    tmp_path: Path,
    target_model: PreTrainedModel,
    target: Checkpoint,
) -> None:
    error = refused(edit_head(make_eagle3(target_model, tmp_path), change), target)
    assert error.rule == "head.vocabulary-map"
    assert place in error.place and found in error.found and allowed in error.allowed
    assert "target id = draft id + d2t[draft id]" in error.remedy


@pytest.mark.parametrize("d2t", [True, False])
def test_t2d_for_another_vocabulary(
    d2t: bool, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = edit_head(make_eagle3(target_model, tmp_path), lambda t: t.update(t2d=t["t2d"][:96]))
    if not d2t:
        edit_head(folder, lambda t: t.pop("d2t"))
    check(refused(folder, target), "head.other-target", ":t2d", "96 rows", "97")


def test_a_padded_row_of_the_target_is_no_draft_token(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    from builders.checkpoints.types import TokenizerFacts

    facts = TokenizerFacts(None, {f"t{i}": i for i in range(60)}, {}, (), None, 60)
    error = refused(make_eagle3(target_model, tmp_path), replace(target, tokenizer=facts))
    assert error.rule == "head.vocabulary-map" and "0 … 59" in error.allowed


# -- what cannot be shared --------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["embed_tokens.weight", "lm_head.weight"])
def test_what_cannot_be_shared(
    part: str, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_eagle3(target_model, tmp_path, hidden=36)
    edit_head(folder, lambda tensors: tensors.pop(part))
    error = refused(folder, target)
    check(error, "head.not-shareable", f":{part}", "the target's has 48 columns", "[vocabulary, 36]")


def test_a_reduced_vocabulary_without_lm_head_and_map(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    """A known export bug: loaders that fill in a random lm_head then accept nothing."""
    folder = make_eagle3(target_model, tmp_path, own_lm_head=False)
    edit_head(folder, lambda t: [t.pop("d2t"), t.pop("t2d")])
    check(refused(folder, target), "head.vocabulary-map", ":d2t", "draft_vocab_size = 41", "row by row")


# -- tensors ----------------------------------------------------------------------------------------


def turn(name: str) -> Change:
    return lambda tensors: tensors.update({name: tensors[name].T})


def retype(name: str, dtype: torch.dtype) -> Change:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


@pytest.mark.parametrize(
    ("make", "change", "rule", "place"),
    [
        (make_medusa, lambda t: t.pop("1.0.linear.bias"), "missing-tensor", "1.0.linear.bias"),
        (make_medusa, lambda t: t.pop("1.1.weight"), "missing-tensor", "1.1.weight"),
        (
            make_medusa,
            lambda t: [t.pop(n) for n in list(t) if n[0] == "1"],
            "missing-tensor",
            "1.0.linear.weight",
        ),
        (make_medusa, lambda t: t.update({"0.1.bias": t["0.0.linear.bias"]}), "unknown-tensor", "0.1.bias"),
        (make_medusa, lambda t: t.update({"1.5.weight": t.pop("1.1.weight")}), "contradiction", "1.5.weight"),
        (make_medusa, lambda t: t.update({"1.5.weight": t["1.1.weight"]}), "contradiction", "1.5.weight"),
        (
            make_medusa,
            lambda t: t.update({"2.0.linear.weight": torch.ones(48, 47)}),
            "contradiction",
            "2.0.linear.weight",
        ),
        (
            make_medusa,
            lambda t: t.update({"0.0.linear.weight": torch.ones(48)}),
            "contradiction",
            "0.0.linear.weight",
        ),
        (make_medusa, lambda t: t.update({"2.1.weight": torch.ones(96, 48)}), "contradiction", "2.1.weight"),
        (make_medusa, retype("0.0.linear.weight", torch.float64), "quantized", "0.0.linear.weight"),
        (make_medusa, lambda t: t.update(extra=torch.ones(1)), "unknown-tensor", "extra"),
        (
            make_eagle,
            lambda t: t.pop("layers.0.mlp.up_proj.weight"),
            "missing-tensor",
            "layers.0.mlp.up_proj.weight",
        ),
        (make_eagle, lambda t: t.update({"fc.weight": torch.ones(48, 95)}), "contradiction", "fc.weight"),
        (make_eagle, lambda t: t.update({"fc.weight": torch.ones(48)}), "contradiction", "fc.weight"),
        (
            make_eagle,
            turn("layers.0.self_attn.o_proj.weight"),
            "contradiction",
            "layers.0.self_attn.o_proj.weight",
        ),
        (make_eagle, lambda t: t.update({"norm.weight": torch.ones(48)}), "unknown-tensor", "norm.weight"),
        (
            make_eagle,
            lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(48)}),
            "unknown-tensor",
            "layers.0.input_layernorm.weight",
        ),
        (
            make_eagle,
            lambda t: t.update({"lm_head.weight": torch.ones(97)}),
            "contradiction",
            "lm_head.weight",
        ),
        (make_eagle3, lambda t: t.pop("fc.weight"), "missing-tensor", "fc.weight"),
        (make_eagle3, lambda t: t.pop("norm.weight"), "missing-tensor", "norm.weight"),
        (
            make_eagle3,
            lambda t: t.pop("midlayer.hidden_norm.weight"),
            "missing-tensor",
            "midlayer.hidden_norm.weight",
        ),
        (
            make_eagle3,
            lambda t: t.update({"midlayer.self_attn.q_proj.weight": torch.ones(40, 48)}),
            "contradiction",
            "midlayer.self_attn.q_proj.weight",
        ),
        (make_eagle3, lambda t: t.update({"fc.bias": torch.ones(48)}), "unknown-tensor", "fc.bias"),
        (
            make_eagle3,
            lambda t: t.update({"midlayer.self_attn.q_proj.weight": torch.ones(50, 96)}),
            "contradiction",
            "midlayer.self_attn.q_proj.weight",
        ),
        (make_eagle3, retype("midlayer.mlp.up_proj.weight", torch.float16), "contradiction", ""),
        (make_eagle3, retype("norm.weight", torch.int64), "quantized", "norm.weight"),
        (
            make_eagle3,
            lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(48)}),
            "contradiction",
            "hidden_norm.weight",
        ),
        (make_specforge, lambda t: t.pop("fc_norm.1.weight"), "missing-tensor", "fc_norm.1.weight"),
        (
            make_specforge,
            lambda t: t.update({"fc_norm.3.weight": torch.ones(48)}),
            "unknown-tensor",
            "fc_norm.3.weight",
        ),
        (
            make_specforge,
            lambda t: t.update({"input_norm.weight": torch.ones(144)}),
            "contradiction",
            "input_norm.weight",
        ),
    ],
)
def test_tensors(
    make: Make,
    change: Change,
    rule: str,
    place: str,
    tmp_path: Path,
    target_model: PreTrainedModel,
    target: Checkpoint,
) -> None:
    error = refused(edit_head(make(target_model, tmp_path), change), target)
    assert (error.rule, error.place.endswith(place)) == (f"checkpoint.{rule}", True), str(error)


@pytest.mark.parametrize(
    "norm", ["embedding_layernorm", "pre_lm_head_layernorm", "transformer.input_layernorm"]
)
def test_optional_norms_of_the_older_speculators_are_named(
    norm: str, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_eagle(target_model, tmp_path, spelling="speculators")
    edit_head(folder, lambda t: t.update({f"{norm}.weight": torch.ones(48)}))
    check(
        refused(folder, target),
        "checkpoint.unknown-tensor",
        f":{norm}.weight",
        "older speculators",
        "no final",
    )


@pytest.mark.parametrize(
    ("make", "name"),
    [(make_eagle, "layers.1.mlp.up_proj.weight"), (make_eagle3, "layers.1.mlp.up_proj.weight")],
)
def test_several_layers(
    make: Make, name: str, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = edit_head(make(target_model, tmp_path), lambda t: t.update({name: torch.ones(2, 2)}))
    check(
        refused(folder, target), "head.several-layers", f":{name}", "a decoder layer 1", "one decoder layer"
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_attention_heads": None}, "checkpoint.bad-config"),
        ({"head_dim": 8}, "checkpoint.contradiction"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "checkpoint.unsupported-rope"),
        ({"hidden_act": "gelu"}, "checkpoint.bad-config"),
        ({"rms_norm_eps": "small"}, "checkpoint.bad-config"),
        ({"norm_output": 1}, "checkpoint.bad-config"),
        ({"eagle_config": [1]}, "checkpoint.bad-config"),
    ],
)
def test_configs(
    changes: dict[str, Any], rule: str, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    assert refused(edit_head(make_eagle3(target_model, tmp_path), **changes), target).rule == rule


# -- known and not supported ------------------------------------------------------------------------


def write(folder: Path, *names: str, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: torch.ones(4, 4) for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return edit_head(folder, **config)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["fc.weight", "layers.0.hidden_norm.weight", "mask_hidden"], "P-EAGLE"),
        (["fc.weight", "markov_head.w1.weight"], "DSpark"),
        (["fc.weight", "hidden_norm.weight", "layers.4.mlp.up_proj.weight"], "DFlash"),
        (["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"], "MTP"),
        (["model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight"], "MTP"),
        (["speculator.emb.0.weight", "speculator.head.0.weight"], "MLP speculator"),
        (["drafter.rnn_u.weight", "drafter.lm_head.weight"], "ReDrafter"),
        (["hydra_mlp.0.0.linear.weight", "hydra_lm_head.0.weight"], "Hydra"),
        (["base_model.model.layers.0.self_attn.q_proj.lora_A.weight"], "LoRA"),
    ],
)
def test_unsupported_by_tensors(names: list[str], what: str, tmp_path: Path, target: Checkpoint) -> None:
    error = refused(write(tmp_path / "head", *names), target)
    check(error, "head.unsupported", "head", what, "Medusa, EAGLE-1/2, EAGLE-3")
    assert f"by the tensor {error.found.rsplit(' ', 1)[-1]}" in error.found
    with pytest.raises(CheckpointError, match=what):
        is_head(tmp_path / "head")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"speculators_model_type": "dflash"}, "DFlash"),
        ({"speculators_model_type": "dspark"}, "DSpark"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"model_type": "deepseek_mtp"}, "MTP"),
        ({"model_type": "mlp_speculator"}, "MLP speculator"),
        ({"architectures": ["ReDrafterForLLaMALM"]}, "ReDrafter"),
    ],
)
def test_unsupported_by_config(config: dict[str, Any], what: str, tmp_path: Path, target: Checkpoint) -> None:
    error = refused(write(tmp_path, "body.0.weight", **config), target)
    check(error, "head.unsupported", "", f"{what}", "Medusa")
    assert error.found.endswith("by config.json")


def test_unknown(tmp_path: Path, target: Checkpoint) -> None:
    error = refused(write(tmp_path, "body.0.weight", architectures=[1]), target)
    check(error, "head.unknown-format", "", "body.N.weight", "Medusa")
    error = refused(target.path, target)
    check(error, "head.unknown-format", "", "a whole model", "Medusa")
    assert "draft_model" in error.remedy


def test_missing_folder_and_files(tmp_path: Path, target: Checkpoint) -> None:
    assert refused(tmp_path / "none", target).rule == "checkpoint.missing-file"
    assert refused(tmp_path, target).rule == "checkpoint.missing-file"


def test_tied_targets_serve_their_embedding_as_lm_head(tmp_path: Path) -> None:
    import zoo

    from builders.checkpoints.reader import read_checkpoint

    model = make_deep_model(tie_word_embeddings=True)
    target = read_checkpoint(zoo.save(model, tmp_path / "target"))
    head = read_head(make_eagle(model, tmp_path / "head"), target)
    assert not head.own_lm_head
