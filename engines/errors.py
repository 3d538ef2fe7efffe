"""The exception tree of trtspec.

    TrtspecError                 exit 1   a check failed
    ├── CheckpointError                   a checkpoint cannot be read or is not what it claims to be
    ├── PairingError                      target and drafter do not fit together
    ├── BundleError                       a built bundle is incomplete, edited or of another version
    ├── EngineError                       an engine produced something it must not (NaN logits, ...)
    ├── UsageError               exit 2   the command line, the deployment spec or a request is wrong
    └── MachineError             exit 3   the machine lacks something: disk, memory, a package

Narrow classes live beside the code that raises them. Every class names its rule id and its usual
remedy; an instance adds the place, what was found and what is allowed.
"""

from __future__ import annotations

from os import PathLike
from typing import ClassVar

__all__ = [
    "BundleError",
    "CheckpointError",
    "EngineError",
    "MachineError",
    "PairingError",
    "TrtspecError",
    "UsageError",
]


class TrtspecError(Exception):
    """Base of every error that trtspec raises on purpose.

    Args:
        found: what was found, in one sentence.
        place: where: a file, `file:line`, a key or a tensor's name.
        allowed: what would have been right.
        remedy: what to do; defaults to the class's own remedy.
    """

    rule: ClassVar[str] = "trtspec.error"
    remedy_text: ClassVar[str] = ""
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        found: str,
        *,
        place: str | PathLike[str] = "",
        allowed: str = "",
        remedy: str | None = None,
    ) -> None:
        self.found = found
        self.place = str(place)
        self.allowed = allowed
        self.remedy = self.remedy_text if remedy is None else remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"[{self.rule}] {self.place}".rstrip(), f"  found:   {self.found}"]
        if self.allowed:
            lines.append(f"  allowed: {self.allowed}")
        if self.remedy:
            lines.append(f"  remedy:  {self.remedy}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str]:
        """The error as plain data, for `--format json`."""
        return {
            "rule": self.rule,
            "place": self.place,
            "found": self.found,
            "allowed": self.allowed,
            "remedy": self.remedy,
        }


class CheckpointError(TrtspecError):
    """A checkpoint cannot be read, or is not what it claims to be."""

    rule = "checkpoint.invalid"
    remedy_text = "Fetch the checkpoint again and compare its checksums."


class PairingError(TrtspecError):
    """Target and drafter do not fit together."""

    rule = "pairing.mismatch"
    remedy_text = "Choose a drafter that was made for this target."


class BundleError(TrtspecError):
    """A built bundle is incomplete, was edited, or is of another version."""

    rule = "bundle.invalid"
    remedy_text = "Remove the folder and build again: trtspec build SPEC."


class EngineError(TrtspecError):
    """An engine produced something that it must not."""

    rule = "engine.failed"
    remedy_text = "Check the checkpoint's weights; build again with trtspec --debug build."


class UsageError(TrtspecError):
    """The command line, the deployment spec or a request is wrong."""

    rule = "usage.invalid"
    exit_code = 2


class MachineError(TrtspecError):
    """The machine lacks something: disk, memory, a package."""

    rule = "machine.insufficient"
    exit_code = 3
