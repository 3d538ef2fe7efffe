"""Atomic writes, bounded reads, digests."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import files
from engines.files import (
    DiskFullError,
    FileError,
    atomic_write,
    link_or_copy,
    need_space,
    publish_folder,
    read_json,
    read_text,
    resolve_inside,
    sha256_file,
)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "memory"))
    return tmp_path / "memory" / "digests"


def test_atomic_write_replaces_whole(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b.txt"
    atomic_write(file, "one")
    atomic_write(file, b"two")
    assert file.read_text() == "two"
    assert [p.name for p in file.parent.iterdir()] == ["b.txt"]


def test_atomic_write_keeps_the_old_file_on_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    atomic_write(file, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError) as caught:
        atomic_write(file, "new")
    assert caught.value.exit_code == 3
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_publish_folder_replaces_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for text in ("one", "two"):
        with publish_folder(out) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / text).write_text(text)
    assert [p.name for p in out.rglob("*")] == ["sub", "two"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_publish_folder_leaves_nothing_on_error(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with publish_folder(out) as folder:
        (folder / "old").write_text("")
    with pytest.raises(ZeroDivisionError), publish_folder(out) as folder:
        (folder / "new").write_text("")
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "old"]


def test_publish_folder_sweeps_after_dead_processes_only(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = tmp_path / f".out.tmp-{dead.pid}-x"
    living = tmp_path / f".out.tmp-{os.getppid()}-x"
    for folder in (gone, living):
        folder.mkdir()
    with publish_folder(tmp_path / "out"):
        pass
    assert not gone.exists()
    assert living.exists()


def test_link_or_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "s"
    source.write_text("x")
    link_or_copy(source, tmp_path / "d" / "linked")
    assert (tmp_path / "d" / "linked").samefile(source)

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another device")

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(source, tmp_path / "d" / "copied")
    assert (tmp_path / "d" / "copied").read_text() == "x"
    assert not (tmp_path / "d" / "copied").samefile(source)


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "link/x"])
def test_resolve_inside_refuses(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(FileError, match="leaves the folder"):
        resolve_inside(root, path)
    assert resolve_inside(root, "a/b") == root / "a" / "b"


def test_bounded_reads(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"12345")
    assert read_text(file, max_bytes=5) == "12345"
    with pytest.raises(FileError, match="larger"):
        read_text(file, max_bytes=4)
    file.write_bytes(b"\xff")
    with pytest.raises(FileError, match="UTF-8"):
        read_text(file, max_bytes=5)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(FileError, match="cannot be read"):
            read_text(missing, max_bytes=5)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "{", "[" * 100_000, "1" * 5000])
def test_bad_json(tmp_path: Path, text: str) -> None:
    file = tmp_path / "f"
    file.write_text(text)
    with pytest.raises(FileError):
        read_json(file, max_bytes=1 << 20)


def test_digest_notices_every_write(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 4)  # so that small files are remembered, too
    file = tmp_path / "f"
    file.write_bytes(b"aaaaaaaa")
    assert sha256_file(file) == hashlib.sha256(b"aaaaaaaa").hexdigest()
    assert len(list(memory.iterdir())) == 1
    stat = file.stat()
    file.write_bytes(b"aaaaaaab")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert sha256_file(file) == hashlib.sha256(b"aaaaaaab").hexdigest()


def test_damaged_memory_of_digests_is_ignored(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK", 4)
    file = tmp_path / "f"
    file.write_bytes(b"aaaaaaaa")
    expected = sha256_file(file)
    for damage in (b"", b"short", b"\xff" * 64, b"g" * 64):
        next(memory.iterdir()).write_bytes(damage)
        assert sha256_file(file) == expected


def test_need_space(tmp_path: Path) -> None:
    need_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(DiskFullError, match="MB free"):
        need_space(tmp_path / "not" / "yet", 1 << 60)
