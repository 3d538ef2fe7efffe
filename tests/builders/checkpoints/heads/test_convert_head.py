"""Pickles and FP8 weights become plain safetensors with the published names, and values stay."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from heads_zoo import (
    edit_head,
    make_eagle,
    make_eagle3,
    make_medusa,
    make_speculators,
    store_fp8,
)
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import builders.checkpoints.heads.values as values_module
from builders.checkpoints.heads.convert import convert_head, needs_conversion
from builders.checkpoints.heads.reader import read_head
from builders.checkpoints.heads.values import check_values
from builders.checkpoints.types import Checkpoint
from engines.errors import CheckpointError, MachineError


def assert_same(left: Path, right: dict[str, torch.Tensor]) -> None:
    found = load_file(left)
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_what_needs_conversion(tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint) -> None:
    assert needs_conversion(make_medusa(target_model, tmp_path / "pt", pickled=True))
    assert needs_conversion(tmp_path / "pt" / "medusa_lm_head.pt")
    assert needs_conversion(store_fp8(make_eagle(target_model, tmp_path / "fp8")))
    assert needs_conversion(tmp_path / "fp8" / "model.safetensors")
    assert not needs_conversion(make_medusa(target_model, tmp_path / "plain"))
    assert not needs_conversion(target.path)
    assert not needs_conversion(tmp_path / "nowhere")
    assert not needs_conversion(target.path / "config.json")
    (tmp_path / "shards").mkdir()
    for i in (1, 2):
        (tmp_path / "shards" / f"pytorch_model-0000{i}-of-00002.bin").write_bytes(b"")
    assert not needs_conversion(tmp_path / "shards")  # a whole model: refused by the reader as pickles


def test_safetensors_win_over_a_pickle_beside_them(
    tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_medusa(target_model, tmp_path)
    (folder / "medusa_lm_head.pt").write_bytes(b"not even a pickle")
    assert not needs_conversion(folder)
    assert read_head(folder, target).method == "medusa"


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_medusa(
    legacy: bool, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    source, out = make_medusa(target_model, tmp_path / "head", layers=2, pickled=True), tmp_path / "out"
    file = source / "medusa_lm_head.pt"
    state = torch.load(file, weights_only=True)
    if legacy:
        torch.save(state, file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError) as caught:
        read_head(source, target)
    assert caught.value.rule == "head.unconverted"
    convert_head(source, out)
    assert_same(out / "model.safetensors", state)
    assert json.loads((out / "config.json").read_text())["medusa_num_layers"] == 2
    assert read_head(out, target).num_layers == 2  # type: ignore[union-attr]
    convert_head(file, out)  # again, over its own result, and by the file's name
    assert_same(out / "model.safetensors", state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_pickled_eagle3_in_any_float(
    dtype: torch.dtype, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = make_eagle3(target_model, tmp_path / "head")
    state = load_file(folder / "model.safetensors")
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}
    state["fc.weight"] = torch.nn.Parameter(state["fc.weight"].T.contiguous().T)  # strides of its own
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    convert_head(folder, tmp_path / "out")
    assert_same(tmp_path / "out" / "model.safetensors", {n: t.detach() for n, t in state.items()})
    assert read_head(tmp_path / "out", target).config.vocab_size == 41  # type: ignore[union-attr]


def test_shared_storages_are_written_out(tmp_path: Path) -> None:
    """The reference code of Medusa builds several layers from one module."""
    weight = torch.randn(4, 4)
    torch.save({"0.0.linear.weight": weight, "0.1.linear.weight": weight}, tmp_path / "a.pt")
    convert_head(tmp_path / "a.pt", tmp_path / "out")
    assert_same(
        tmp_path / "out" / "model.safetensors", {"0.0.linear.weight": weight, "0.1.linear.weight": weight}
    )


def test_without_torch(
    tmp_path: Path, target_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_medusa(target_model, tmp_path / "head", pickled=True)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MachineError) as caught:
        convert_head(folder, tmp_path / "out")
    assert caught.value.rule == "head.no-torch"
    assert "pip install" in caught.value.remedy and "safetensors" in caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_a_torch_whose_unpickler_can_be_fooled(
    tmp_path: Path, target_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_medusa(target_model, tmp_path / "head", pickled=True)
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    with pytest.raises(MachineError, match=r"PyTorch 2\.5\.1"):
        convert_head(folder, tmp_path / "out")


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("make", [make_eagle, make_eagle3, make_speculators])
def test_fp8(
    make: object, per_row: bool, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    folder = store_fp8(make(target_model, tmp_path / "head"), per_row=per_row)  # type: ignore[operator]
    stored = load_file(folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_head(folder, target)
    assert caught.value.rule == "head.unconverted"
    convert_head(folder, tmp_path / "out")
    expected = {
        name: tensor.float() * stored[f"{name}_scale"] if f"{name}_scale" in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale")
    }
    assert sum(name.endswith("_scale") for name in stored) > 7
    assert_same(tmp_path / "out" / "model.safetensors", expected)
    head = read_head(tmp_path / "out", target)
    assert head.config.dtype == "F32"  # type: ignore[union-attr]
    check_values(head)


def test_fp8_in_small_pieces(
    tmp_path: Path, target_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import builders.checkpoints.heads.convert as convert_module

    folder = store_fp8(make_eagle(target_model, tmp_path / "head"))
    convert_head(folder, tmp_path / "whole")
    monkeypatch.setattr(convert_module, "PIECE", 100)
    monkeypatch.setattr(values_module, "PIECE", 7)
    convert_head(folder, tmp_path / "pieces")
    assert_same(
        tmp_path / "pieces" / "model.safetensors", load_file(tmp_path / "whole" / "model.safetensors")
    )


def test_an_fp8_draft_model_keeps_its_tokenizer(tmp_path: Path, target: Checkpoint) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    state = {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    state["model.layers.0.mlp.up_proj.weight_scale"] = torch.tensor(0.5)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("left behind")
    convert_head(folder, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    }
    assert_same(
        tmp_path / "out" / "model.safetensors",
        {"model.layers.0.mlp.up_proj.weight": torch.full((2, 2), 0.5)},
    )


NAME = "layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (None, "it is not there"),
        (torch.ones(60, 1).half(), "F16 [60, 1]"),
        (torch.ones(59, 1), "F32 [59, 1]"),
        (torch.ones(60), "F32 [60]"),
        (torch.ones(1, 48), "F32 [1, 48]"),
        (torch.full((60, 1), torch.nan), "no positive number"),
        (torch.tensor(0.0), "no positive number"),
        (torch.tensor(torch.inf), "no positive number"),
    ],
)
def test_scales(
    scale: torch.Tensor | None, found: str, tmp_path: Path, target_model: PreTrainedModel
) -> None:
    folder = store_fp8(make_eagle(target_model, tmp_path / "head"))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{NAME}_scale"]
        if scale is not None:
            tensors[f"{NAME}_scale"] = scale

    edit_head(folder, change)
    with pytest.raises(CheckpointError) as caught:
        convert_head(folder, tmp_path / "out")
    assert caught.value.rule == "head.bad-scale"
    assert caught.value.place.endswith(f"{NAME}_scale")
    assert found in caught.value.found
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "rule", "place"),
    [
        (lambda t: t.update({NAME: t[NAME].half()}), "head.bad-scale", f"{NAME}_scale"),
        (lambda t: t.pop(NAME), "head.bad-scale", f"{NAME}_scale"),
        (lambda t: t.update({NAME: t[NAME].reshape(-1)}), "head.bad-scale", f"{NAME}_scale"),
        (lambda t: t.update({NAME: t[NAME][:0]}), "head.bad-scale", f"{NAME}_scale"),
        (lambda t: t.update({"x.weight": torch.ones(2, dtype=torch.float64)}), "head.invalid", "x.weight"),
    ],
)
def test_fp8_with_odd_parts(
    change: object, rule: str, place: str, tmp_path: Path, target_model: PreTrainedModel
) -> None:
    folder = store_fp8(make_eagle(target_model, tmp_path / "head"))
    edit_head(folder, change)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as caught:
        convert_head(folder, tmp_path / "out")
    assert caught.value.rule == rule and caught.value.place.endswith(place)


def test_output_that_holds_something_else(tmp_path: Path, target_model: PreTrainedModel) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("do not delete")
    with pytest.raises(CheckpointError) as caught:
        convert_head(make_medusa(target_model, tmp_path / "head", pickled=True), out)
    assert caught.value.rule == "checkpoint.output-exists"
    assert (out / "thesis.txt").exists()


# -- values -----------------------------------------------------------------------------------------


@pytest.fixture(params=[0, 1 << 30])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of 100 values, or all values at once."""
    monkeypatch.setattr(values_module, "PIECE", request.param or 100)
    yield


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_no_numbers(
    bad: float, dtype: torch.dtype, tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype)

    folder = edit_head(make_eagle(target_model, tmp_path), change)
    check_values(read_head(folder, target))
    edit_head(folder, lambda t: t["layers.0.mlp.down_proj.weight"].__setitem__((45, 7), bad))
    with pytest.raises(CheckpointError) as caught:
        check_values(read_head(folder, target))
    error = caught.value
    assert error.rule == "head.not-finite"
    assert error.place.endswith("model.safetensors:layers.0.mlp.down_proj.weight")
    assert "[45, 7]" in error.found and str(np.float32(bad)) in error.found


@pytest.mark.usefixtures("piece")
def test_values_of_medusa_and_maps(tmp_path: Path, target_model: PreTrainedModel, target: Checkpoint) -> None:
    check_values(read_head(make_medusa(target_model, tmp_path / "m"), target))
    check_values(read_head(make_eagle3(target_model, tmp_path / "e"), target))  # maps are no weights
    folder = edit_head(tmp_path / "m", lambda t: t["2.0.linear.bias"].__setitem__(47, torch.nan))
    with pytest.raises(CheckpointError, match=r"2\.0\.linear\.bias"):
        check_values(read_head(folder, target))
