"""The writer's files are valid safetensors, aligned and ordered."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from builders.checkpoints.safetensors import read_header
from builders.checkpoints.safetensors_writer import TensorSpec, fusable, write_safetensors
from engines.files import DiskFullError


def test_written_file_is_read_by_safetensors(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(12, dtype=np.float32).reshape(4, 3),
        "b": np.array([1.5, -2], ml_dtypes.bfloat16),
        "c": np.array([[3], [4]], np.float16),
    }
    specs = [TensorSpec("a", "F32", (4, 3)), TensorSpec("b", "BF16", (2,)), TensorSpec("c", "F16", (2, 1))]
    seen: list[tuple[int, int]] = []
    file = tmp_path / "x.safetensors"
    write_safetensors(
        file, specs, lambda s: np.array_split(arrays[s.name], 2), progress=lambda *at: seen.append(at)
    )
    loaded = load_file(file)
    assert torch.equal(loaded["a"], torch.from_numpy(arrays["a"]))
    assert loaded["b"].dtype == torch.bfloat16
    assert loaded["b"].tolist() == [1.5, -2]
    assert loaded["c"].tolist() == [[3], [4]]
    assert seen == [(48, 56), (52, 56), (56, 56)]
    assert next(iter(read_header(file).values())).offset % 64 == 0


def test_chunks_must_fit_their_spec(tmp_path: Path) -> None:
    spec = TensorSpec("a", "F32", (2,))
    with pytest.raises(ValueError, match="float64"):
        write_safetensors(tmp_path / "x", [spec], lambda _: [np.zeros(2)])
    with pytest.raises(ValueError, match="4 bytes instead of 8"):
        write_safetensors(tmp_path / "y", [spec], lambda _: [np.zeros(1, np.float32)])


def test_layers_that_share_an_input_are_adjacent() -> None:
    parts = ["mlp.down_proj.weight", "mlp.up_proj.weight", "mlp.gate_proj.weight", "self_attn.v_proj.weight"]
    parts += ["self_attn.q_proj.bias", "self_attn.k_proj.weight", "self_attn.q_proj.weight"]
    parts += [
        "self_attn.v_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.o_proj.weight",
        "input_layernorm.weight",
    ]
    names = [f"model.layers.{layer}.{part}" for layer in (10, 2) for part in parts]
    order = fusable([*names, "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
    text = " ".join(name.removeprefix("model.layers.") for name in order)
    for layer in (2, 10):
        for kind in ("weight", "bias"):
            assert " ".join(f"{layer}.self_attn.{p}_proj.{kind}" for p in "qkv") in text
        assert f"{layer}.mlp.gate_proj.weight {layer}.mlp.up_proj.weight" in text
    assert order[0] == "model.embed_tokens.weight"
    assert order[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(name.split(".")[2]) for name in order[1:-2]]
    assert layers == sorted(layers)


def test_no_space(tmp_path: Path) -> None:
    spec = TensorSpec("a", "F32", (1 << 50,))
    with pytest.raises(DiskFullError) as error:
        write_safetensors(tmp_path / "x", [spec], lambda _: pytest.fail("asked for data"))
    assert error.value.exit_code == 3
    assert not (tmp_path / "x").exists()


def test_disk_fills_while_writing() -> None:
    spec = TensorSpec("a", "F32", (1 << 20,))

    class Full(type(Path())):  # type: ignore[misc]
        def open(self, mode: str) -> object:
            return os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")

    with pytest.raises(DiskFullError):
        write_safetensors(Full("/tmp/never-created"), [spec], lambda _: [np.zeros(1 << 20, np.float32)])
