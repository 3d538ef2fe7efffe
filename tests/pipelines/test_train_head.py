"""`trtspec train-head` as a user meets it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_target import save_tiny_target, write_text

from pipelines.cli import main, train_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def short_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real prompts are long for a target that reads letters."""
    monkeypatch.setattr(train_head, "_benchmark_prompts", lambda: ["what is 7?"])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.jsonl", 40)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["train-head", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_a_head_from_text(
    target: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--method", "medusa", "--target", target, "-o", tmp_path / "head", "--draft-vocab", 20)
    code, out, err = call(capsys, *common, "--text", text, "--steps", 3, "--threads", 1, "--seed", 5)
    assert code == 0, err
    assert "mean acceptance length" in out
    assert {p.name for p in (tmp_path / "head").iterdir()} == {
        "config.json",
        "medusa_lm_head.safetensors",
        "provenance.json",
    }
    provenance = json.loads((tmp_path / "head/provenance.json").read_text())
    assert provenance["seed"] == 5
    code, _, err = call(capsys, *common, "--text", text, "--steps", 3)
    assert (code, "train.output-exists" in err) == (2, True)


@pytest.mark.parametrize(
    "options",
    [
        ("--steps", 3, "--learning-rate", "nan"),
        ("--minutes", "nan"),
        ("--minutes", "inf"),
        ("--minutes", "0"),
        ("--steps", 3, "--layers", 10**6),
        ("--steps", 3, "--intermediate", 10**12),
        ("--steps", 3, "-o", "/"),
        ("--steps", 3, "-o", "."),
        ("--steps", 3, "-o", ""),
    ],
)
def test_options_out_of_range(
    options: tuple[object, ...], target: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--method", "draft_model", "--target", target, "-o", tmp_path / "x", "--text", text)
    code, _, err = call(capsys, *given, *options)
    assert code == 2, err
    assert "Traceback" not in err
    assert not (tmp_path / "x").exists()


def test_a_disk_that_is_full_while_a_checkpoint_is_saved(target: Path, text: Path, tmp_path: Path) -> None:
    """The limit lets the data pass, and not the weights and the optimizer's state."""
    data = 4 * 32 * 2 * sum(len(line) for line in text.read_text().splitlines())
    arguments = [
        *("train-head", "--method", "draft_model", "--target", target, "-o", tmp_path / "x", "--text", text),
        *("--steps", 2, "--draft-vocab", 20, "--intermediate", 4000, "--work", tmp_path / "w"),
    ]
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({data}, {data}));"
        "from pipelines.cli import main, train_head; train_head._benchmark_prompts = lambda: ['what is 7?'];"
        f"main({list(map(str, arguments))!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "machine.disk-full" in done.stderr and "checkpoint" in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_head_from_what_the_target_writes(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random target writes no prompts: that is said, and nothing is left but the work folder."""
    common = ("--method", "eagle", "--target", target, "-o", tmp_path / "head", "--steps", 1)
    code, _, err = call(capsys, *common, "--generate", 3, "--threads", 1, "--draft-vocab", 20)
    assert code == 2
    assert "train.text" in err
    assert [p.name for p in tmp_path.iterdir()] == ["head.work"]


@pytest.mark.parametrize(
    "options",
    [
        ("--steps", 3),
        ("--steps", 3, "--generate", 5, "--text", "x"),
        ("--generate", 5),
        ("--generate", 5, "--steps", 3, "--minutes", 1),
    ],
)
def test_options_that_do_not_go_together(
    options: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "--method", "eagle", "--target", "t", "-o", tmp_path / "o", *options)
    assert (code, "train.options" in err) == (2, True)


def test_without_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "torch" else real(n, *a))
    code, _, err = call(
        capsys, "--method", "eagle", "--target", "t", "-o", tmp_path / "o", "--generate", 5, "--steps", 3
    )
    assert code == 3
    assert "train.no-torch" in err
    assert "pip install 'trtspec[train]'" in err


def test_a_bad_line_is_named(
    target: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text('{"prompt": "a?", "answer": "b"}\n{"prompt"\n')
    common = ("--method", "eagle3", "--target", target, "-o", tmp_path / "o", "--steps", 3)
    code, _, err = call(capsys, *common, "--text", text)
    assert code == 2
    assert f"{text}:2" in err
    assert not (tmp_path / "o").exists()


def test_a_target_that_is_none(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--method", "eagle3", "--target", tmp_path / "none", "-o", tmp_path / "o", "--steps", 3)
    code, _, err = call(capsys, *common, "--text", text)
    assert code != 0
    assert "found:" in err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom pipelines.cli import main\n"
        "try:\n    main(['train-head', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_benchmark_is_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert len(train_head._benchmark_prompts()) == 8
