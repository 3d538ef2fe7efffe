"""A draft checkpoint out of a model's first layers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from builders.checkpoints.reader import read_checkpoint
from builders.checkpoints.safetensors_writer import (
    ELEMENT,
    TensorSpec,
    atomic_folder,
    fusable,
    write_safetensors,
)
from builders.checkpoints.types import TensorRef
from engines.errors import UsageError

__all__ = ["truncate_checkpoint"]

_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_CHUNK = 16 << 20
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class LayerCountError(UsageError):
    """More layers are asked for than there are."""

    rule = "truncate.layers"


class SameFolderError(UsageError):
    """The result would replace its own source."""

    rule = "truncate.same-folder"
    remedy_text = "Choose another output folder."


def truncate_checkpoint(
    source: Path, layers: int, out: Path, *, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Write a Hugging Face folder with the first `layers` layers of the model in `source`.

    Raises:
        LayerCountError: the model has no more than `layers` layers.
        CheckpointError: `source` is no checkpoint, or `out` holds something else.
        DiskFullError: no space; nothing is left behind.
    """
    checkpoint = read_checkpoint(source)
    if out.resolve() == source.resolve():
        raise SameFolderError("the folder is the source itself", place=out)
    if layers >= checkpoint.config.num_layers:
        raise LayerCountError(
            f"{layers} layers", place=source, allowed=f"1 … {checkpoint.config.num_layers - 1}"
        )

    def kept(name: str) -> bool:
        layer = _LAYER.match(name)
        return layer is None or int(layer[1]) < layers

    names = fusable(name for name in checkpoint.tensors if kept(name))
    specs = [TensorSpec(n, checkpoint.tensors[n].dtype, checkpoint.tensors[n].shape) for n in names]
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] = layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    files = frozenset({"config.json", "model.safetensors", *_TEXT_FILES})
    with atomic_folder(out, files) as folder:
        write_safetensors(
            folder / "model.safetensors",
            specs,
            lambda spec: _chunks(checkpoint.tensors[spec.name]),
            progress=progress,
        )
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        for name in _TEXT_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)
    return out


def _chunks(tensor: TensorRef) -> Iterator[npt.NDArray[Any]]:
    element = ELEMENT[tensor.dtype]
    data = np.memmap(tensor.file, element, "r", tensor.offset, (tensor.length // element.itemsize,))
    for start in range(0, data.size, _CHUNK):
        yield np.asarray(data[start : start + _CHUNK])
