"""Heads that are not plain safetensors, made so: pickles (`.pt`, `.bin`) and FP8 weights.

A pickle is opened by PyTorch's weights-only unpickler, which builds tensors and runs nothing else. FP8
weights are multiplied by their scales; names stay as published, so that the reader sees what was there.
"""

from __future__ import annotations

import math
import pickle
import re
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from builders.checkpoints.files import LfsPointerError, MissingFileError, is_lfs_pointer
from builders.checkpoints.heads.source import HeadError, Source
from builders.checkpoints.heads.values import PIECE, pieces
from builders.checkpoints.safetensors_writer import ELEMENT, TensorSpec, atomic_folder, write_safetensors
from builders.checkpoints.types import TensorRef
from engines.errors import MachineError

if TYPE_CHECKING:
    import torch

__all__ = [
    "BadPickleError",
    "BadScaleError",
    "CodeInPickleError",
    "NoTorchError",
    "convert_head",
    "needs_conversion",
]

_PICKLES = (".pt", ".pth", ".bin")
_MAX_TENSORS = 4096
_SAFE_TORCH = (2, 6)  # before, weights-only loading could run code (CVE-2025-32434)
_FP8 = "F8_E4M3"
# How PyTorch's weights-only unpickler speaks of calls that it refuses.
_CALL = re.compile(r"GLOBAL ([\w.]+)|Trying to call reduce|Can only (?:create|build)")
_ADVICE = ("Weights only load failed", "Please file an issue", "Check the documentation")
# What PyTorch lets through when a file is damaged.
_BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
_STATE_DICT = "a state dict as torch.save writes it"
_TEXT_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_OUT = frozenset({"model.safetensors", *_TEXT_FILES})

Pieces = Callable[[], Iterable[npt.NDArray[Any]]]


class CodeInPickleError(HeadError):
    """A pickle wants to call something else than what builds tensors."""

    rule = "head.code-in-pickle"
    remedy_text = "Do not open it. Ask its publisher for safetensors, or for a plain state dict."


class BadPickleError(HeadError):
    """A pickle cannot be read, or holds something else than a state dict."""

    rule = "head.bad-pickle"
    remedy_text = "Fetch the file again and compare its checksum; or use safetensors."


class BadScaleError(HeadError):
    """An FP8 weight without a scale that fits, or a scale without its weight."""

    rule = "head.bad-scale"
    remedy_text = "Export the head again, with one F32 scale a tensor or one an output row."


class NoTorchError(MachineError):
    """Pickled weights need PyTorch."""

    rule = "head.no-torch"
    remedy_text = "pip install 'trtspec[reference]', or convert the file to safetensors elsewhere."


def needs_conversion(path: Path) -> bool:
    """Whether weights at `path` are a single pickle, or FP8, and not plain safetensors.

    Raises:
        CheckpointError: where there are safetensors files and their headers cannot be read.
    """
    if _pickle(path) is not None:
        return True
    if not (path.is_dir() and any(path.glob("*.safetensors"))) and path.suffix != ".safetensors":
        return False
    tensors = Source.read(path).tensors
    return any(t.dtype == _FP8 and f"{name}_scale" in tensors for name, t in tensors.items())


def convert_head(path: Path, out: Path) -> None:
    """Writes `out`/model.safetensors with F32, F16, BF16, I64 and BOOL tensors, and copies the texts.

    Args:
        path: a folder, or the weight file itself.
        out: a folder; it may exist if it holds an earlier result.

    Raises:
        CodeInPickleError, BadPickleError: the pickle is hostile, cut short, or no state dict.
        BadScaleError: FP8 weights and scales that do not belong together.
        LfsPointerError, MissingFileError, CheckpointError: as `read_head`.
        NoTorchError: a pickle, and PyTorch is not installed.
        DiskFullError: no space; nothing is left behind.
    """
    folder = path.parent if path.is_file() else path
    pickled = _pickle(path)
    parts = _plain(Source.read(path)) if pickled is None else _unpickled(pickled)
    with atomic_folder(out, _OUT) as made:
        write_safetensors(
            made / "model.safetensors",
            [spec for spec, _ in parts.values()],
            lambda spec: parts[spec.name][1](),
        )
        for name in _TEXT_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, made / name)


def _pickle(path: Path) -> Path | None:
    """The pickle at `path`, if that is where the weights are."""
    if path.is_file():
        return path if path.suffix in _PICKLES else None
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    found = [file for file in path.iterdir() if file.suffix in _PICKLES]
    return found[0] if len(found) == 1 else None


# -- FP8 --------------------------------------------------------------------------------------------


def _plain(source: Source) -> dict[str, tuple[TensorSpec, Pieces]]:
    """All tensors in plain dtypes; FP8 weights times their scales, in F32, which loses nothing."""
    parts: dict[str, tuple[TensorSpec, Pieces]] = {}
    scales = {name for name in source.tensors if name.endswith(".weight_scale")}
    for name, tensor in source.tensors.items():
        if name in scales:
            weight = source.tensors.get(name.removesuffix("_scale"))
            if weight is None or weight.dtype != _FP8:
                raise BadScaleError("a scale without an FP8 weight", place=source.at(name))
        elif tensor.dtype == _FP8:
            scale = _scale(source, tensor, source.tensors.get(f"{name}_scale"))
            spec = TensorSpec(name, "F32", tensor.shape)
            parts[name] = spec, lambda t=tensor, s=scale: _scaled(t, s)  # type: ignore[misc]
        elif tensor.dtype in ELEMENT:
            spec = TensorSpec(name, tensor.dtype, tensor.shape)
            parts[name] = spec, lambda t=tensor: pieces(t, ELEMENT[t.dtype])  # type: ignore[misc]
        else:
            raise HeadError(f"dtype {tensor.dtype}", place=source.at(name), allowed=f"{_FP8}, {_dtypes()}")
    return parts


def _scale(source: Source, weight: TensorRef, scale: TensorRef | None) -> npt.NDArray[np.float32]:
    """[rows, 1] or [1, 1]."""
    place = source.at(f"{weight.name}_scale")
    if scale is None:
        raise BadScaleError("it is not there", place=place, allowed="F32 [] or [rows, 1]")
    rows = weight.shape[0] if len(weight.shape) == 2 and weight.shape[1] else 0
    if scale.dtype != "F32" or rows == 0 or scale.shape not in ((), (1,), (rows, 1)):
        raise BadScaleError(
            f"{scale.dtype} {list(scale.shape)} for a weight {list(weight.shape)}",
            place=place,
            allowed=f"F32 [] or [{rows}, 1]" if rows else "a weight that is a matrix",
        )
    values = np.fromfile(scale.file, np.float32, math.prod(scale.shape), offset=scale.offset)
    if not (np.isfinite(values) & (values > 0)).all():
        raise BadScaleError("a scale that is no positive number", place=place, allowed="positive numbers")
    return values.reshape(-1, 1)


def _scaled(weight: TensorRef, scale: npt.NDArray[np.float32]) -> Iterator[npt.NDArray[np.float32]]:
    """Row by row groups of the product."""
    rows, columns = weight.shape
    step = max(1, PIECE // columns)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        part = replace(
            weight,
            shape=(count, columns),
            offset=weight.offset + start * columns,
            length=count * columns,
        )
        values = np.concatenate(list(pieces(part, np.dtype(ml_dtypes.float8_e4m3fn)))).astype(np.float32)
        factor = scale if len(scale) == 1 else scale[start : start + count]
        yield values.reshape(count, columns) * factor


# -- pickles ----------------------------------------------------------------------------------------


def _unpickled(file: Path) -> dict[str, tuple[TensorSpec, Pieces]]:
    """The tensors of a state dict; they stay in the file (memory-mapped) until they are written."""
    state = _load(file)
    if not isinstance(state, Mapping) or not 0 < len(state) <= _MAX_TENSORS:
        raise BadPickleError(
            f"a {type(state).__name__}", place=file, allowed=f"a dict of at most {_MAX_TENSORS} tensors"
        )
    parts: dict[str, tuple[TensorSpec, Pieces]] = {}
    for name, tensor in state.items():
        spec = _spec(file, name, tensor)
        parts[spec.name] = spec, lambda t=tensor: _numpy(t)  # type: ignore[misc]
    written, size = sum(spec.length for spec, _ in parts.values()), file.stat().st_size
    # Names may share a storage (a residual block used twice), but not without end.
    if written > 16 * size:
        raise BadPickleError(
            f"{size:,} bytes that would become {written:,}", place=file, allowed="tensors of their own"
        )
    return parts


def _load(file: Path) -> Any:
    _check_archive(file)
    try:
        import torch
    except ImportError as error:
        raise NoTorchError("a pickle, and PyTorch is not installed", place=file) from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _SAFE_TORCH:
        raise NoTorchError(
            f"PyTorch {torch.__version__}, whose weights-only unpickler can be fooled", place=file
        )
    mapped = zipfile.is_zipfile(file)  # the older format cannot be mapped
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the older formats
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        called = _CALL.search(str(error))
        if called is None:
            raise BadPickleError(_reason(error), place=file, allowed=_STATE_DICT) from error
        found = f"it wants to call {called[1] or 'something'}"
        raise CodeInPickleError(
            found, place=file, allowed="a dict of tensors, of which nothing runs"
        ) from error
    except _BROKEN as error:
        raise BadPickleError(_reason(error), place=file, allowed=_STATE_DICT) from error


def _check_archive(file: Path) -> None:
    """A first look without unpickling: no pointer, not empty, and an archive that cannot swell."""
    if not file.is_file():
        raise MissingFileError("no such file", place=file)
    with file.open("rb") as opened:
        start = opened.read(64)
    if is_lfs_pointer(start):
        raise LfsPointerError("a Git LFS pointer instead of the weights", place=file)
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise BadPickleError(_reason(error), place=file, allowed="a whole archive") from error
    packed = next((entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None or sum(entry.file_size for entry in entries) > file.stat().st_size:
        found = "compressed or overlapping entries"
        raise BadPickleError(found, place=file, allowed="an archive as torch.save writes it")


def _spec(file: Path, name: object, tensor: object) -> TensorSpec:
    import torch

    place = f"{file}:{name}"[:300]
    if not isinstance(name, str) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise BadPickleError(
            f"{name!r}: a {type(tensor).__name__}"[:200], place=file, allowed="named tensors"
        )
    assert isinstance(tensor, torch.Tensor)
    dtypes = {
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.bool: "BOOL",
    }
    dtype = dtypes.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        found = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise BadPickleError(found, place=place, allowed=f"a dense tensor in {_dtypes()}")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise BadPickleError(
            f"shape {list(tensor.shape)} on {tensor.untyped_storage().nbytes():,} bytes",
            place=place,
            allowed="a tensor that is no larger than what it is stored in",
        )
    return TensorSpec(name, dtype, tuple(tensor.shape))


def _numpy(tensor: torch.Tensor) -> Iterator[npt.NDArray[Any]]:
    """Values of a tensor, a row group at a time; bfloat16 by its bits, which numpy lacks."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    for start in range(0, flat.numel(), PIECE):
        part = flat[start : start + PIECE]
        if part.dtype == torch.bfloat16:
            yield part.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            yield part.numpy()


def _dtypes() -> str:
    return "F32, F16, BF16, I64 or BOOL"


def _reason(error: BaseException) -> str:
    """What PyTorch said, without its advice to trust the file."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(_ADVICE)]
    return lines[0].strip()[:300] if lines else type(error).__name__
