"""Files: atomic writes, bounded reads, digests. The one place that renames, links and hashes."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from engines.errors import MachineError, TrtspecError

__all__ = [
    "DISK_FULL",
    "DiskFullError",
    "FileError",
    "atomic_write",
    "disk_errors",
    "link_or_copy",
    "need_space",
    "publish_folder",
    "read_json",
    "read_text",
    "resolve_inside",
    "sha256_file",
]

_CHUNK = 8 << 20
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(MachineError):
    """The disk cannot hold what is to be written."""

    rule = "machine.disk-full"
    remedy_text = "Free some space, or write to another disk."


class FileError(TrtspecError):
    """A file is missing, unreadable, too large or malformed."""

    rule = "file.unreadable"
    remedy_text = "Check the path, its permissions and its contents."
    exit_code = 2


@contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Turn "no space left" into a `DiskFullError` that names `place`."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DiskFullError(str(error.strerror), place=place) from error
        raise


def need_space(folder: Path, size: int) -> None:
    """Refuse early if the disk below `folder` has less than `size` bytes free.

    Raises:
        DiskFullError: with both figures.
    """
    parent = folder
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < size:
        raise DiskFullError(f"{free / 1e6:,.0f} MB free", place=folder, allowed=f"{size / 1e6:,.0f} MB")


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a file whole or not at all: temporary name beside it, fsync, rename.

    Raises:
        DiskFullError: no space.
    """
    content = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with disk_errors(path), os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` that takes its place when the block ends without an error.

    What stood at `path` before is replaced; after a kill there is the old folder, the new one, or none,
    and a leftover `.NAME.tmp-PID-…` that the next call sweeps away.

    Raises:
        DiskFullError: no space.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.tmp-{os.getpid()}-", dir=path.parent))
    try:
        with disk_errors(path):
            yield folder
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.stat().st_nlink == 1:  # a linked file was synced at its source
                    _sync_file(file)
        folder.chmod(0o755)
        _swap(folder, path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _swap(folder: Path, path: Path) -> None:
    """Put `folder` in the place of `path`; another process may do the same at the same time."""
    old = folder.with_name(folder.name + ".old")
    try:
        for _ in range(10):
            with contextlib.suppress(FileNotFoundError):
                path.rename(old)
            try:
                folder.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                shutil.rmtree(old, ignore_errors=True)  # the other one was quicker: replace its result
            else:
                return
        raise FileError("other processes keep writing it", place=path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Delete temporary siblings whose process is gone."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        pid = leftover.name.removeprefix(f".{path.name}.tmp-").split("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets folders be synced
        _sync_file(folder)


def link_or_copy(source: Path, destination: Path) -> None:
    """A hard link, or a copy where links are impossible (another disk, a link limit).

    Raises:
        DiskFullError: no space for a copy.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), destination)
    except FileExistsError:
        raise  # a copy would write into whatever file that is a link to
    except OSError:
        need_space(destination.parent, source.stat().st_size)
        with disk_errors(destination):
            shutil.copyfile(source, destination)


def resolve_inside(root: Path, relative: str) -> Path:
    """`root`/`relative`, refused if it leaves `root` by `..`, an absolute path or a link.

    Raises:
        FileError: rule `file.unreadable`, naming the path.
    """
    pure = PurePosixPath(relative)
    path = root / pure
    if pure.is_absolute() or ".." in pure.parts or not path.resolve().is_relative_to(root.resolve()):
        raise FileError(f"the path {relative!r} leaves the folder", place=root, allowed="paths inside it")
    return path


def read_text(path: Path, *, max_bytes: int) -> str:
    """A UTF-8 file of at most `max_bytes`.

    Raises:
        FileError: missing, a folder, too large, or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", place=path) from error
    if len(data) > max_bytes:
        raise FileError("larger than any such file should be", place=path, allowed=f"{max_bytes:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"not UTF-8: {error.reason} at byte {error.start}", place=path) from error


def read_json(path: Path, *, max_bytes: int) -> Any:
    """A JSON file, duplicate keys refused.

    Raises:
        FileError: see `read_text`; or not JSON, or a key twice in one object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [k for k, _ in pairs]
            twice = next(k for k in keys if keys.count(k) > 1)
            raise FileError(f"the key {twice!r} stands twice", place=path)
        return found

    try:
        return json.loads(read_text(path, max_bytes=max_bytes), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # ValueError: also integers of thousands of digits
        raise FileError(f"not JSON: {error}", place=path) from error


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes.

    Hashing gigabytes on every run would be felt, so the digest is remembered under the file's identity
    (device, inode, size, time of last change): any write to the file changes that.
    """
    stat = path.stat()
    identity = f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}"
    memory = _digest_memory() / hashlib.sha256(identity.encode()).hexdigest()[:32]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        known = memory.read_text("ascii")
        if len(known) == 64 and set(known) <= set("0123456789abcdef"):
            return known
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if stat.st_size > _CHUNK:
        with contextlib.suppress(OSError, MachineError):  # a memory that cannot be kept costs time only
            atomic_write(memory, digest.hexdigest())
    return digest.hexdigest()


def _digest_memory() -> Path:
    root = os.environ.get("TRTSPEC_CACHE") or Path.home() / ".cache" / "trtspec"
    return Path(root) / "digests"
