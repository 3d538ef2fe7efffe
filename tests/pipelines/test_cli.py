"""The command line: exit codes, messages, what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.cli import COMMANDS, main


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out, err = capfd.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=str)
def test_help(capfd: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, out, _ = call(capfd, *command, "--help")
    assert code == 0
    assert "Usage: trtspec" in out
    assert max(map(len, out.splitlines())) <= 80


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom pipelines.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'onnx', 'pydantic', 'onnxruntime', 'rich') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(capfd, "--version")[1].startswith("trtspec 0.")


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["build"], ["generate", "x", "--nonsense"], ["generate", "x", "-n", "-1", "-p", "y"]],
    ids=str,
)
def test_usage_errors(capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = call(capfd, *arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err


def test_errors_have_rule_place_and_remedy(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = call(capfd, "generate", str(tmp_path / "none"), "-p", "x")
    assert (code, out) == (1, "")
    assert "[bundle.incomplete]" in err
    assert "remedy:" in err
    code, out, err = call(capfd, "inspect", str(tmp_path), "--format", "json")
    assert code == 1
    assert out == ""
    assert json.loads(err)["error"]["rule"].startswith("checkpoint.")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"bundle\.incomplete"):
        main(["--debug", "generate", str(tmp_path / "none"), "-p", "x"])


def test_reader_that_leaves_hears_no_complaint() -> None:
    command = f"{sys.executable} -m pipelines.cli --help | true"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert found.stderr == ""


def test_markup_in_paths_is_text(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import zoo

    folder = zoo.save(zoo.make_model("llama"), tmp_path / "[red]a[")
    code, out, _ = call(capfd, "inspect", str(folder))
    assert code == 0
    assert "[red]a[" in out.replace("\n", "").replace(" ", "")
