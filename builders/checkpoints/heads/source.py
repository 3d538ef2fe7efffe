"""A drafter's head as it lies on disk: tensors under their published names, and what config.json claims."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from builders.checkpoints.architecture import is_buffer
from builders.checkpoints.claims import Claims
from builders.checkpoints.files import read_json
from builders.checkpoints.safetensors import read_folder, read_header
from builders.checkpoints.types import Checkpoint, TensorRef
from engines.errors import CheckpointError, PairingError

__all__ = ["HeadError", "OtherTargetError", "Source", "check_rows", "real_tokens"]

_MAX_CONFIG = 1 << 20  # bytes
_MAX_PADDING = 512  # rows; vocabularies are padded to multiples of at most this


class HeadError(CheckpointError):
    """A drafter's head cannot be used."""

    rule = "head.invalid"
    remedy_text = "Fetch the head again, from the repository that published it."


class OtherTargetError(PairingError):
    """A head was made for another target."""

    rule = "head.other-target"
    remedy_text = "Use heads that were trained for this very target: the same model, the same size."


@dataclass(frozen=True)
class Source:
    """A head's folder (or weight file), read but not yet understood."""

    path: Path
    tensors: dict[str, TensorRef] = field(repr=False)
    config: Claims  # empty where there is no config.json: Medusa heads are published without

    @classmethod
    def read(cls, path: Path) -> Source:
        """Headers and config.json of a folder, or of one safetensors file and the config.json beside it.

        Raises:
            CheckpointError: as `read_folder` and `read_json`.
        """
        found = read_header(path) if path.is_file() else read_folder(path)
        folder = path.parent if path.is_file() else path
        file = folder / "config.json"
        return cls(
            path=path,
            tensors={name: tensor for name, tensor in found.items() if not is_buffer(name)},
            config=Claims(read_json(file, _MAX_CONFIG) if file.exists() else {}, file),
        )

    def at(self, name: str) -> str:
        """A tensor's place, for messages."""
        return f"{self.path}:{name}"


def real_tokens(target: Checkpoint) -> int:
    """Ids that stand for tokens; the target's lm_head may be wider (padding)."""
    width = target.config.vocab_size
    return width if target.tokenizer is None else min(target.tokenizer.size, width)


def check_rows(source: Source, name: str, rows: int, target: Checkpoint) -> tuple[str, ...]:
    """That a table with one row a token covers the target's vocabulary; a warning if padded differently.

    Raises:
        OtherTargetError: it does not.
    """
    width, real = target.config.vocab_size, real_tokens(target)
    if rows == width:
        return ()
    if real < width and real <= rows < width + _MAX_PADDING:
        return (f"{name} has {rows} rows and the target {width}: only padding differs",)
    raise OtherTargetError(
        f"{rows} rows: a vocabulary of another size",
        place=source.at(name),
        allowed=f"{width}, as in {target.path}",
    )
