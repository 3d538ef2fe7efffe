"""Safetensors headers: where every tensor lies, without reading a weight.

Format: the safetensors specification (8 bytes of header length, a JSON header, the data without
holes). A header is input from a stranger: every rule of the format is checked, reads are bounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builders.checkpoints.files import (
    LfsPointerError,
    MissingFileError,
    is_lfs_pointer,
    parse_json,
    read_json,
)
from builders.checkpoints.types import TensorRef
from engines.errors import CheckpointError

__all__ = [
    "HeaderError",
    "PickleError",
    "ShardIndexError",
    "read_folder",
    "read_header",
    "read_header_bytes",
]

MAX_HEADER = 100_000_000  # bytes, the format's own limit
_MAX_DIMS = 32
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


class HeaderError(CheckpointError):
    """A safetensors file is cut short, or its header breaks a rule of the format."""

    rule = "checkpoint.bad-header"
    remedy_text = "Fetch the file again and compare its checksum."


class ShardIndexError(CheckpointError):
    """The index of a sharded checkpoint and its shards contradict each other."""

    rule = "checkpoint.bad-index"
    remedy_text = "Fetch the index and all shards again, from the same revision."


class PickleError(CheckpointError):
    """Weights are stored as pickles, which run code when they are opened."""

    rule = "checkpoint.pickle"
    remedy_text = (
        "Convert them to safetensors in a place you trust: load the model with transformers, "
        "then model.save_pretrained(FOLDER)."
    )


def read_header_bytes(file: Path) -> bytes:
    """The JSON text of a file's header.

    Raises:
        MissingFileError: no such regular file, or it is not readable.
        LfsPointerError: only its LFS pointer is there.
        HeaderError: the file is shorter than its header, or the header longer than the format allows.
    """
    if not file.is_file():
        raise MissingFileError("no such file", place=file)
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            start = opened.read(32)
            if is_lfs_pointer(start):
                raise LfsPointerError("a Git LFS pointer instead of the weights", place=file)
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length > size - 8:
                announced = f"and announces a header of {length:,} bytes" if size >= 8 else ""
                raise HeaderError(f"the file has {size:,} bytes {announced}".rstrip(), place=file)
            if length > MAX_HEADER:
                raise HeaderError(
                    f"a header of {length:,} bytes", place=file, allowed=f"{MAX_HEADER:,} bytes"
                )
            opened.seek(8)
            text = opened.read(length)
    except PermissionError as error:
        raise MissingFileError("no permission to read it", place=file, remedy="Change its mode.") from error
    if len(text) < length:
        raise HeaderError("the file became shorter while it was read", place=file)
    return text


def read_header(file: Path) -> dict[str, TensorRef]:
    """The tensors of one file, by name, in the order of their data.

    Raises:
        MissingFileError, LfsPointerError, HeaderError: as `read_header_bytes`.
        BadJsonError: the header is not a JSON object, or names a tensor twice.
        HeaderError: a tensor of an unknown dtype, a shape that does not fit its length, data that
            overlap, leave holes, or lie outside the file.
    """
    text = read_header_bytes(file)
    header = parse_json(text, f"{file}:header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError("not a map of strings", place=f"{file}:__metadata__")
    start = 8 + len(text)
    tensors = [_tensor(file, name, entry, start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.length))

    end = start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlap those before" if tensor.offset < end else "leave a hole before them"
            raise HeaderError(
                f"its data {what}: byte {tensor.offset}", place=f"{file}:{tensor.name}", allowed=f"byte {end}"
            )
        end += tensor.length
    size = file.stat().st_size
    if end != size:
        raise HeaderError(
            f"the file has {size:,} bytes", place=file, allowed=f"{end:,} bytes, as its header says"
        )
    return {tensor.name: tensor for tensor in tensors}


def _tensor(file: Path, name: str, entry: Any, start: int) -> TensorRef:
    place = f"{file}:{name[:200]}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(repr(entry)[:100], place=place, allowed="dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise HeaderError(f"dtype {dtype!r}"[:100], place=place, allowed=", ".join(_BITS))
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise HeaderError(
            f"shape {shape!r}"[:100], place=place, allowed="a list of dimensions, none negative"
        )
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"data_offsets {offsets!r}"[:100], place=place, allowed="[begin, end]")
    bits = _BITS[dtype]
    for dim in shape:
        bits *= dim
    begin, end = offsets
    if bits != 8 * (end - begin):
        found = f"{end - begin:,} bytes of data"
        raise HeaderError(found, place=place, allowed=f"{-(-bits // 8):,} bytes for {dtype} {shape}"[:200])
    return TensorRef(name, dtype, tuple(shape), file, start + begin, end - begin)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def read_folder(path: Path) -> dict[str, TensorRef]:
    """The tensors of a checkpoint folder: `model.safetensors`, shards with an index, or one other file.

    An index may name files of its own folder only. Files may be symbolic links that leave the
    folder: the hub's cache consists of them, and an index cannot create one.

    Raises:
        MissingFileError: no weights, or a shard is missing.
        PickleError: the only weights are pickles; they are not opened.
        ShardIndexError: index and shards contradict each other.
        HeaderError, LfsPointerError, BadJsonError: as `read_header`.
    """
    if not path.is_dir():
        raise MissingFileError("no such folder", place=path, remedy="Check the path.")
    index = path / _INDEX
    if index.is_file():
        if (path / _SINGLE).is_file():
            raise ShardIndexError(
                f"both {_SINGLE} and {_INDEX}", place=path, allowed="one", remedy="Delete one."
            )
        return _sharded(path, index)
    return read_header(_single(path))


def _single(path: Path) -> Path:
    if (path / _SINGLE).exists():
        return path / _SINGLE
    files = sorted(path.iterdir())
    candidates = [file for file in files if file.suffix == ".safetensors"]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise MissingFileError(f"{len(candidates)} safetensors files and no index", place=path / _INDEX)
    pickles = [file for file in files if file.suffix in _PICKLES]
    if pickles:
        raise PickleError("a pickle, which is never opened", place=pickles[0], allowed="safetensors files")
    raise MissingFileError("no weights", place=path, allowed=f"{_SINGLE}, or shards with {_INDEX}")


def _sharded(path: Path, index: Path) -> dict[str, TensorRef]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ShardIndexError(
            "no tensors", place=f"{index}:weight_map", allowed="a map of tensor names to files"
        )
    by_shard: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _plain_name(shard):
            found = f"the file {shard!r}"[:200]
            raise ShardIndexError(
                found, place=f"{index}:{name}", allowed="a .safetensors file of this folder"
            )
        by_shard.setdefault(shard, set()).add(name)

    tensors: dict[str, TensorRef] = {}
    for shard, named in sorted(by_shard.items()):
        header = read_header(path / shard)
        missing, strange = named - header.keys(), header.keys() - named
        if missing:
            raise ShardIndexError(f"{shard} does not hold it", place=f"{index}:{min(missing)}")
        if strange:
            raise ShardIndexError(
                "a tensor that the index does not place in this shard", place=f"{path / shard}:{min(strange)}"
            )
        tensors.update(header)
    return tensors


def _plain_name(name: str) -> bool:
    # PurePath.name would accept what another system takes for a separator.
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0") and not name.startswith(".")
