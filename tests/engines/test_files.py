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


def test_publish_folder_sweeps_whatever_the_name(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".a[b]*.tmp-{dead.pid}-x").mkdir()
    (tmp_path / f".ab*.tmp-{dead.pid}-x").mkdir()  # what the name would match as a pattern
    with publish_folder(tmp_path / "a[b]*"):
        pass
    assert {p.name for p in tmp_path.iterdir()} == {"a[b]*", f".ab*.tmp-{dead.pid}-x"}


@pytest.mark.parametrize("stop_at", [1, 2])
def test_publish_folder_stopped_while_it_swaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """Ctrl-C before the old folder is moved away, or between the two renames: the old one stands."""
    out = tmp_path / "out"
    with publish_folder(out) as folder:
        (folder / "old").write_text("")
    rename, calls = Path.rename, 0

    def interrupted(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), publish_folder(out) as folder:
        (folder / "new").write_text("")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "old"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from engines.errors import TrtspecError
from engines.files import atomic_write, link_or_copy, publish_folder

root = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

def publish():
    with publish_folder(root / "published") as folder:
        (folder / "small").write_bytes(b"x")
        (folder / "large").write_bytes(b"x" * 2000)

def copy():
    import os
    os.link = lambda *_: (_ for _ in ()).throw(OSError("no links here"))
    with publish_folder(root / "copied") as folder:
        link_or_copy(root / "source", folder / "large")

for work in (lambda: atomic_write(root / "written", b"x" * 2000), publish, copy):
    try:
        work()
    except TrtspecError as error:
        print(error.rule, error.exit_code)
"""


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the system refuses the write in the middle."""
    (tmp_path / "source").write_bytes(b"x" * 2000)
    found = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == ["machine.disk-full 3"] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_link_or_copy_writes_into_no_file_that_is_there(tmp_path: Path) -> None:
    source, other = tmp_path / "s", tmp_path / "o"
    source.write_text("new")
    other.write_text("other")
    link_or_copy(other, tmp_path / "d")
    with pytest.raises(FileExistsError):
        link_or_copy(source, tmp_path / "d")
    assert other.read_text() == "other"


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
