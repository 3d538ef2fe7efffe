"""Reads published drafter heads and proves that they fit their target: headers and configs only."""

from __future__ import annotations

from pathlib import Path

from builders.checkpoints.heads.convert import needs_conversion
from builders.checkpoints.heads.eagle import read_eagle
from builders.checkpoints.heads.kinds import kind_of, need_kind
from builders.checkpoints.heads.medusa import read_medusa
from builders.checkpoints.heads.source import HeadError, Source
from builders.checkpoints.heads.types import EagleHead, MedusaHeads
from builders.checkpoints.reader import fingerprint
from builders.checkpoints.types import Checkpoint

__all__ = ["UnconvertedError", "is_head", "read_head"]


class UnconvertedError(HeadError):
    """The head is stored as a pickle or in FP8, and was not converted."""

    rule = "head.unconverted"
    remedy_text = "trtspec build converts it by itself; elsewhere call convert_head first."


def read_head(path: Path, target: Checkpoint) -> MedusaHeads | EagleHead:
    """Reads Medusa or EAGLE heads as people publish them, and proves that they fit their target.

    What the tensors prove wins over config.json; contradictions become `warnings`, and so does what the
    head takes from the target (embedding, lm_head).

    Args:
        path: a folder, or a safetensors file with or without a config.json beside it.
        target: the checkpoint that the heads are to draft for.

    Raises:
        CheckpointError: a narrow class of it for whatever is wrong with the files; UnsupportedHeadError and
            UnknownHeadError for what they hold.
        PairingError: OtherTargetError and TapsError, where they were made for another target.
    """
    if needs_conversion(path):
        raise UnconvertedError("a pickle, or FP8 weights", place=path, allowed="plain safetensors")
    source = Source.read(path)
    kind = need_kind(source)
    folder = path.parent if path.is_file() else path
    digest = fingerprint(folder, sorted({tensor.file for tensor in source.tensors.values()}))
    if kind == "medusa":
        return read_medusa(source, target, digest)
    return read_eagle(source, kind, target, digest)


def is_head(path: Path) -> bool:
    """Whether there are heads at `path`, supported or not, rather than a whole model.

    Raises:
        CheckpointError: as `read_head`, where the files cannot be read, or hold a kind that is known and
            not supported.
    """
    if path.is_file() and path.suffix != ".safetensors":
        return False
    return path.exists() and kind_of(Source.read(path)) is not None
