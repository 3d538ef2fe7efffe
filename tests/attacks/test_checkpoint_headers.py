"""Checkpoint folders made to do harm: nothing is executed, hangs, swallows memory or leaks a traceback."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from builders.checkpoints.reader import read_checkpoint
from engines.errors import CheckpointError


def write_weights(folder: Path, header: dict[str, Any], data: int = 0) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_pickles_do_not_run(tmp_path: Path, name: str) -> None:
    witness = tmp_path / "executed"
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(witness)))
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path)
    assert not witness.exists()


def test_remote_code_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    config = {"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_weights(tmp_path, {"model.x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4)
    with pytest.raises(CheckpointError, match="'evil'"):
        read_checkpoint(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/hostname", "x/../../secret.safetensors"])
def test_indexes_do_not_reach_outside(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(folder)
    assert error.value.rule == "checkpoint.bad-index"


def test_a_linked_file_s_content_is_not_shown(tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("-----BEGIN PRIVATE KEY-----")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(secret)
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(folder)
    assert "BEGIN" not in str(error.value)


def test_announced_sizes_are_not_allocated(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("shape", [[1 << 62, 1 << 62], [0, 1 << 62], [1] * 40, [1 << 100]])
def test_shapes_that_overflow(tmp_path: Path, shape: list[int]) -> None:
    write_weights(tmp_path, {"model.x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path)


def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no such file"):
        read_checkpoint(tmp_path)


def test_deep_json(tmp_path: Path) -> None:
    write_weights(tmp_path, {"model.x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4)
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path)


def test_layer_numbers_do_not_size_anything(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    write_weights(tmp_path, {"model.layers.99999.x": entry, "model.layers.4294967295.x": entry})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="layer 0"):
        read_checkpoint(tmp_path)


def test_messages_stay_short(tmp_path: Path) -> None:
    write_weights(tmp_path, {"model.x": {"dtype": "F" * 100_000, "shape": [0], "data_offsets": [0, 0]}})
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path)
    assert len(str(error.value)) < 2000
    write_weights(tmp_path, {"x" * 100_000: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "y" * 100_000}))
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path)
    assert len(str(error.value)) < 2000
