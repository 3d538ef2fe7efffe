"""Content-addressed stages: a folder a result, named by the hash of everything that went into it.

A stage works in a temporary folder that is renamed into place when it is whole, so that a killed
build leaves nothing that looks finished, and the next one goes on behind the last finished stage.
Two builds that want the same result at once: the second waits for the first, and reuses it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import TrtspecError
from engines.files import atomic_write, publish_folder, read_json

__all__ = ["Progress", "Result", "Stage", "StageCache", "source_digest"]

RECORD = "_STAGE.json"
MAX_RECORD = 16 << 20

Progress = Callable[[int, int], None]  # (done, in all), in bytes or steps


@dataclass(frozen=True)
class Stage:
    """One step of a build.

    Attributes:
        inputs: plain data that determines the result, the keys of earlier stages included.
        work: fills an empty folder; returns facts that are kept with the result.
        seconds: a rough guess for the plan.
        size: bytes that the result takes on disk.
    """

    name: str
    inputs: Mapping[str, Any]
    work: Callable[[Path, Progress], Mapping[str, Any]]
    seconds: float = 1.0
    size: int = 0

    @functools.cached_property
    def key(self) -> str:
        """Hex SHA-256 over name and inputs."""
        return _digest([self.name, self.inputs])[:32]


@dataclass(frozen=True)
class Result:
    """A finished stage."""

    folder: Path
    facts: Mapping[str, Any]
    seconds: float
    cached: bool


class StageCache:
    """Results below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, stage: Stage) -> Result | None:
        """The stage's result, if it is there and whole."""
        folder = self.root / stage.name / stage.key
        try:
            record = read_json(folder / RECORD, max_bytes=MAX_RECORD)
            if record.pop("digest") == _digest(record) and record["files"] == _listing(folder):
                return Result(folder, record["facts"], float(record["seconds"]), cached=True)
        except (TrtspecError, OSError, AttributeError, KeyError, TypeError, ValueError):
            pass  # missing or damaged: to be made again
        return None

    def run(self, stage: Stage, progress: Progress) -> Result:
        """The stage's result, made if need be.

        Raises:
            DiskFullError: no space; nothing is left behind. Whatever the stage's work raises.
        """
        with self.lock(stage.name, stage.key):
            found = self.find(stage)
            if found is not None:
                return found
            self._sweep(stage.name)
            folder = self.root / stage.name / stage.key
            begin = time.perf_counter()
            with publish_folder(folder) as temporary:
                facts = dict(stage.work(temporary, progress))
                seconds = time.perf_counter() - begin
                record = {
                    "name": stage.name,
                    "inputs": stage.inputs,
                    "facts": facts,
                    "seconds": seconds,
                    "files": _listing(temporary),
                }
                text = json.dumps({**record, "digest": _digest(record)}, indent=2)
                atomic_write(temporary / RECORD, text + "\n")
            return Result(folder, facts, seconds, cached=False)

    def _sweep(self, name: str) -> None:
        """Delete what killed stages left under other keys: after a change nobody asks for those again.

        Whoever works on a key holds its lock, so a free lock means that nobody does.
        """
        for leftover in (self.root / name).glob(".*.tmp-*"):
            key = leftover.name[1:].partition(".tmp-")[0]
            with (leftover.parent / f"{key}.lock").open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def lock(self, name: str, key: str) -> Iterator[None]:
        """While the block runs, every other process that wants the same lock waits."""
        place = self.root / name
        place.mkdir(parents=True, exist_ok=True)
        with (place / f"{key}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released by the system if this process dies
            yield


def _digest(data: object) -> str:
    """SHA-256 over plain data; the order of keys is no difference."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _listing(folder: Path) -> dict[str, list[int]]:
    """Size and time of last change of every file but the record."""
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != RECORD:
            stat = file.stat()
            files[file.relative_to(folder).as_posix()] = [stat.st_size, stat.st_mtime_ns]
    return files


@functools.cache
def source_digest(*modules: str) -> str:
    """SHA-256 over the source of modules and packages: code is an input, too."""
    digest = hashlib.sha256()
    for module in modules:
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        assert spec.origin is not None, module
        origin = Path(spec.origin)
        files = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()
