"""The header of a GGUF file: metadata and the places of its tensors, read with bounds.

Format: the GGUF specification of the ggml project, versions 2 and 3, little endian. The `gguf`
package's own reader is for files one trusts: a hostile array length keeps it busy for ever, and a
tokenizer of 50,000 entries takes it seconds. It is used here for the tables of types only.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from builders.checkpoints.files import LfsPointerError, MissingFileError, is_lfs_pointer
from engines.errors import CheckpointError

__all__ = ["GgufFile", "GgufMalformedError", "GgufTensor", "read_gguf"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


class GgufMalformedError(CheckpointError):
    """A file is not GGUF, is cut short, or contradicts itself."""

    rule = "checkpoint.gguf-malformed"
    remedy_text = "Fetch the GGUF file again and compare its checksum."


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place. `shape` is in row-major order (GGUF stores it reversed); bytes throughout."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # from the start of the file
    length: int


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF header says. Arrays of numbers in `metadata` are tuples, strings are `str`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def rows(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, mapped rather than read: [rows, bytes a row]."""
        count = 1
        for dim in tensor.shape[:-1]:
            count *= dim
        return np.memmap(
            self.path,
            np.uint8,
            mode="r",
            offset=tensor.offset,
            shape=(count, tensor.length // count),
        )


class _Cursor:
    """Reads little-endian values one after the other; a read past the end is an error, not a wait."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def fail(self, found: str) -> GgufMalformedError:
        return GgufMalformedError(found, place=f"{self.path}:byte {self.at}")

    def need(self, length: int) -> None:
        left = len(self.data) - self.at
        if length > left:
            raise self.fail(f"{length} more bytes are announced and {left} are left: the file is cut short")

    def values(self, code: str, count: int = 1) -> tuple[Any, ...]:
        size = struct.calcsize(code) * count
        self.need(size)
        found = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return found

    def one(self, code: str) -> Any:
        return self.values(code)[0]

    def string(self) -> str:
        length = self.one("Q")
        self.need(length)
        raw = self.data[self.at : self.at + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"a string is not UTF-8: {raw[:40]!r}") from error
        self.at += length
        return text

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.one(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.fail(f"metadata of the unknown type {kind}")
        item, count = self.one("I"), self.one("Q")
        if item in _SCALARS:
            return self.values(_SCALARS[item], count)
        if item != _STRING:
            raise self.fail(f"an array of items of type {item}: neither numbers nor strings")
        self.need(8 * count)
        return tuple(self.string() for _ in range(count))


def read_gguf(path: Path) -> GgufFile:
    """Reads metadata and tensor places; no tensor data.

    Raises:
        MissingFileError, LfsPointerError: no such file, or only its LFS pointer.
        GgufMalformedError: not a GGUF file of version 2 or 3, cut short, or contradicting itself.
    """
    if not path.is_file():
        raise MissingFileError("no such file", place=path, remedy="Check the path.")
    with path.open("rb") as file:
        start = file.read(32)
        if is_lfs_pointer(start):
            raise LfsPointerError("a Git LFS pointer instead of the file", place=path)
        if start[:4] != b"GGUF":
            raise GgufMalformedError(
                f"the file starts with {start[:4]!r}",
                place=path,
                allowed="a GGUF file, which starts with b'GGUF'",
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path))


def _parse(cursor: _Cursor) -> GgufFile:
    cursor.at = 4
    version = cursor.one("I")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version}" + (" (big endian?)" if version > 0xFFFF else ""))
    tensor_count, pair_count = cursor.values("Q", 2)

    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} twice")
        metadata[key] = cursor.value(cursor.one("I"))

    listed = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.at // alignment) * alignment

    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in listed:
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} twice")
        tensors[name] = _placed(cursor, name, shape, kind, start + offset)
    return GgufFile(cursor.path, metadata, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dims = cursor.one("I")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {dims} dimensions")
    shape = tuple(reversed(cursor.values("Q", dims)))
    kind, offset = cursor.one("I"), cursor.one("Q")
    return name, shape, kind, offset


def _placed(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    try:
        type_ = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[type_]
    except (ValueError, KeyError) as error:
        raise GgufMalformedError(f"the unknown ggml type {kind}", place=f"{cursor.path}:{name}") from error
    if 0 in shape or shape[-1] % block:
        raise GgufMalformedError(
            f"shape {list(shape)} in {type_.name}, whose blocks hold {block} values of a row",
            place=f"{cursor.path}:{name}",
        )
    length = block_bytes * (shape[-1] // block)
    for dim in shape[:-1]:
        length *= dim
    if offset + length > len(cursor.data):
        raise GgufMalformedError(
            f"its data ends at byte {offset + length}, the file at {len(cursor.data)}: the file is cut short",
            place=f"{cursor.path}:{name}",
        )
    return GgufTensor(name, shape, type_, offset, length)
