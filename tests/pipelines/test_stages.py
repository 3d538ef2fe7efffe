"""Stages: keyed by their inputs, published whole, remade when damaged, worked on by one process at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipelines.stages import RECORD, Progress, Result, Stage, StageCache, source_digest

ROOT = Path(__file__).parents[2]


def silent(done: int, total: int) -> None:
    pass


class Worker:
    """A stage's work that counts its calls."""

    def __init__(self, **inputs: Any) -> None:
        self.calls = 0
        self.stage = Stage("emit", inputs, self)

    def __call__(self, folder: Path, progress: Progress) -> Mapping[str, Any]:
        self.calls += 1
        progress(1, 1)
        (folder / "sub").mkdir()
        (folder / "sub" / "data").write_bytes(b"data")
        return {"nodes": 7}


@pytest.fixture
def cache(tmp_path: Path) -> StageCache:
    return StageCache(tmp_path / "cache")


def entries(cache: StageCache) -> list[str]:
    """Everything below the stage's folder except locks."""
    return sorted(p.name for p in (cache.root / "emit").iterdir() if p.suffix != ".lock")


def test_found_by_content(cache: StageCache) -> None:
    first, second = Worker(a=1, b=2), Worker(b=2, a=1)  # the order of keys is no difference
    made = cache.run(first.stage, silent)
    assert not made.cached
    assert made.folder.name == first.stage.key
    found = cache.run(second.stage, silent)
    assert found == Result(made.folder, {"nodes": 7}, found.seconds, cached=True)
    assert (found.folder / "sub" / "data").read_bytes() == b"data"
    assert (first.calls, second.calls) == (1, 0)
    assert cache.find(first.stage) == found


def test_other_inputs_or_another_name_are_another_key() -> None:
    def work(folder: Path, progress: Progress) -> Mapping[str, Any]:
        return {}

    keys = {
        Stage(name, inputs, work).key
        for name in ("emit", "compile")
        for inputs in (
            {},
            {"a": 1},
            {"a": "1"},
            {"a": 1.5},
            {"a": None},
            {"a": [1]},
            {"b": 1},
            {"a": {"b": 1}},
        )
    }
    assert len(keys) == 16


def test_progress_reaches_the_caller(cache: StageCache) -> None:
    seen: list[tuple[int, int]] = []
    cache.run(Worker().stage, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 1)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
def test_an_error_leaves_nothing(cache: StageCache, error: type[BaseException]) -> None:
    def work(folder: Path, progress: Progress) -> Mapping[str, Any]:
        (folder / "half").write_text("half")
        raise error

    stage = Stage("emit", {}, work)
    with pytest.raises(error):
        cache.run(stage, silent)
    assert entries(cache) == []
    assert cache.find(stage) is None
    again = Worker()
    assert not cache.run(again.stage, silent).cached


def edit(folder: Path) -> None:
    (folder / "sub" / "data").write_bytes(b"atad")  # of the same size


def change_record(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        record = json.loads((folder / RECORD).read_text())
        (folder / RECORD).write_text(json.dumps({**record, **changes}))

    return change


DAMAGE: dict[str, Callable[[Path], object]] = {
    "edited": edit,
    "truncated": lambda f: os.truncate(f / "sub" / "data", 2),
    "missing": lambda f: (f / "sub" / "data").unlink(),
    "extra": lambda f: (f / "sub" / "more").write_text(""),
    "no record": lambda f: (f / RECORD).unlink(),
    "record cut": lambda f: os.truncate(f / RECORD, 40),
    "record empty": lambda f: (f / RECORD).write_text(""),
    "record not UTF-8": lambda f: (f / RECORD).write_bytes(b"\xff\xfe"),
    "record a list": lambda f: (f / RECORD).write_text("[]"),
    "record without keys": lambda f: (f / RECORD).write_text("{}"),
    "record a folder": lambda f: ((f / RECORD).unlink(), (f / RECORD).mkdir()),
    "facts gone": change_record(facts=None),
    "facts changed": change_record(facts={"nodes": 8}),
    "seconds no number": change_record(seconds="long"),
}


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_damage_is_made_good(cache: StageCache, kind: str) -> None:
    worker = Worker()
    folder = cache.run(worker.stage, silent).folder
    DAMAGE[kind](folder)
    assert cache.find(worker.stage) is None
    assert cache.run(worker.stage, silent).facts == {"nodes": 7}
    assert worker.calls == 2
    assert (folder / "sub" / "data").read_bytes() == b"data"
    assert sorted(p.name for p in folder.rglob("*")) == [RECORD, "data", "sub"]
    assert entries(cache) == [folder.name]


# A process of its own: a stage whose work appends to `ran`, then does what the test wants.
CHILD = """
import sys, time
from pathlib import Path
from pipelines.stages import Stage, StageCache

root = Path(sys.argv[1])

def work(folder, progress):
    (folder / "data").write_text("data")
    with (root / "ran").open("a") as file:
        file.write("x")
    {then}
    return {{"nodes": 7}}

result = StageCache(root / "cache").run(Stage("emit", {{"a": 1}}, work), lambda done, total: None)
print(result.cached)
"""


def child(root: Path, then: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(CHILD).format(then=then)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_after_a_kill_the_next_run_finishes_and_sweeps(cache: StageCache, tmp_path: Path) -> None:
    killed = child(tmp_path, "import os; os.kill(os.getpid(), 9)")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(entries(cache)) == 1  # the temporary folder
    worker = Worker(a=1)
    assert cache.find(worker.stage) is None
    result = cache.run(worker.stage, silent)
    assert entries(cache) == [result.folder.name]
    assert worker.calls == 1


def test_what_a_killed_stage_left_goes_also_when_its_inputs_changed(
    cache: StageCache, tmp_path: Path
) -> None:
    killed = child(tmp_path, "import os; os.kill(os.getpid(), 9)")
    killed.communicate(timeout=60)
    assert len(entries(cache)) == 1
    result = cache.run(Worker(a=2).stage, silent)
    assert entries(cache) == [result.folder.name]


def test_a_stage_at_work_keeps_its_folder(cache: StageCache, tmp_path: Path) -> None:
    """While another one of the same name, with other inputs, runs and sweeps."""
    go = tmp_path / "go"
    at_work = child(tmp_path, f"while not Path({str(go)!r}).exists(): time.sleep(0.01)")
    while not (tmp_path / "ran").exists():
        assert at_work.poll() is None
        time.sleep(0.01)
    cache.run(Worker(a=2).stage, silent)
    go.touch()
    assert at_work.communicate(timeout=60)[0].strip() == "False"
    assert at_work.returncode == 0
    found = cache.find(Worker(a=1).stage)
    assert found is not None
    assert (found.folder / "data").read_text() == "data"
    assert len(entries(cache)) == 2


def test_two_processes_work_once(cache: StageCache, tmp_path: Path) -> None:
    # Long enough for the other to come: were there no lock, both would work.
    both = [child(tmp_path, "time.sleep(1)") for _ in range(2)]
    outputs = sorted(process.communicate(timeout=60)[0].strip() for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert outputs == ["False", "True"]
    assert (tmp_path / "ran").read_text() == "x"


def test_source_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("a = 1")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(*modules: str) -> str:
        source_digest.cache_clear()
        return source_digest(*modules)

    whole, inner = digest("some_package"), digest("some_package.inner")
    assert digest("some_package") == whole
    (package / "inner.py").write_text("a = 2")
    assert digest("some_package") != whole
    assert digest("some_package.inner") != inner
    source_digest.cache_clear()
