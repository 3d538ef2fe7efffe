"""Small text files of a checkpoint, read with bounds: their content comes from strangers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engines.errors import CheckpointError

__all__ = [
    "BadJsonError",
    "LfsPointerError",
    "MissingFileError",
    "is_lfs_pointer",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_text",
]

_LFS_POINTER = b"version https://git-lfs"
MAX_TEXT = 256 << 20  # bytes; the largest tokenizer.json in use is below 64 MiB


class MissingFileError(CheckpointError):
    """A file that the checkpoint needs is not there."""

    rule = "checkpoint.missing-file"
    remedy_text = "Fetch the whole checkpoint folder again."


class LfsPointerError(CheckpointError):
    """A file's place is taken by a Git LFS pointer."""

    rule = "checkpoint.lfs-pointer"
    remedy_text = "Fetch the real file: git lfs pull."


class BadJsonError(CheckpointError):
    """A JSON file cannot be parsed, or does not hold what it must."""

    rule = "checkpoint.bad-json"
    remedy_text = "Fetch the file again; if it was edited by hand, correct it."


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file that starts with these bytes is a Git LFS pointer."""
    return start.startswith(_LFS_POINTER)


def read_bytes(file: Path, limit: int = MAX_TEXT) -> bytes:
    """The whole of a small file.

    Raises:
        MissingFileError: no such regular file, or no permission to read it.
        LfsPointerError: only its LFS pointer is there.
        CheckpointError: it is longer than `limit` bytes.
    """
    if not file.is_file():
        raise MissingFileError("no such file", place=file)
    try:
        with file.open("rb") as opened:
            content = opened.read(limit + 1)
    except PermissionError as error:
        raise MissingFileError("no permission to read it", place=file, remedy="Change its mode.") from error
    if is_lfs_pointer(content):
        raise LfsPointerError("a Git LFS pointer instead of the file", place=file)
    if len(content) > limit:
        raise CheckpointError("the file is too long", place=file, allowed=f"{limit:,} bytes")
    return content


def read_text(file: Path, limit: int = MAX_TEXT) -> str:
    """The whole of a small UTF-8 file; errors as `read_bytes`, and BadJsonError where it is not UTF-8."""
    try:
        return read_bytes(file, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadJsonError(f"not UTF-8: {error}", place=file) from error


def parse_json(content: bytes, place: str | Path) -> dict[str, Any]:
    """A JSON object; a key that occurs twice in one object is an error.

    Raises:
        BadJsonError: not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError as error:
        raise BadJsonError("nested too deeply", place=place) from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadJsonError(str(error)[:200], place=place, allowed="a JSON object in UTF-8") from error
    if not isinstance(value, dict):
        raise BadJsonError(f"a JSON {type(value).__name__}", place=place, allowed="a JSON object")
    return value


def read_json(file: Path, limit: int = MAX_TEXT) -> dict[str, Any]:
    """A file that holds one JSON object; errors as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(file, limit), file)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {twice[:100]!r} occurs twice")
    return found
