"""The command line: exit codes, messages, what it imports."""

from __future__ import annotations

import json
import os
import resource
import shutil
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from test_build import make_checkpoint

    folder = tmp_path_factory.mktemp("pair")
    return make_checkpoint(folder / "target"), make_checkpoint(folder / "drafter", seed=1)


@pytest.fixture(scope="module")
def bundle(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from test_build import run, write_spec

    folder = tmp_path_factory.mktemp("built")
    code, _, err = run(folder, "build", str(write_spec(folder, pair[0])))
    assert code == 0, err
    return folder / "build/bundles/tiny"


def test_inspect_checkpoint_and_pair(capfd: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    target, drafter = map(str, pair)
    code, out, err = call(capfd, "inspect", target, "--format", "json")
    found = json.loads(out)
    assert (code, err, found["pairing"]) == (0, "", None)
    assert found["found"][0]["layers"] == 3
    assert found["found"][0]["parameters"] == 62_640
    code, out, err = call(capfd, "inspect", target, drafter, "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["pairing"]
    code, out, err = call(capfd, "inspect", target, drafter)
    assert (code, err) == (0, "")
    assert "The drafter fits the target" in out
    assert "62,640" in out


def test_inspect_bundle(capfd: pytest.CaptureFixture[str], pair: tuple[Path, Path], bundle: Path) -> None:
    code, out, err = call(capfd, "inspect", str(bundle))
    assert (code, err) == (0, "")
    assert "ngram" in out
    code, out, err = call(capfd, "inspect", str(bundle), str(pair[0]), "--format", "json")
    first, second = json.loads(out)["found"]
    assert first["engine"]["gamma"] == 3
    assert second["layers"] == 3


def test_inspect_edited_bundle(capfd: pytest.CaptureFixture[str], bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    (copy / "step.onnx").write_bytes(b"")
    for command in (["inspect", str(copy)], ["generate", str(copy), "-p", "x"]):
        code, out, err = call(capfd, *command)
        assert (code, out) == (1, "")
        assert "bundle.edited" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", "x", "--gamma", "4"], "request.invalid"),
        (["-p", "x", "--temperature", "nan"], "sampling.out-of-range"),
        (["-p", "x", "--seed", "-1"], "sampling.out-of-range"),
        (["-p", "x" * 251], "at most 250 tokens"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "x", "--threads", "1000000"], "512"),
        (["-p", os.fsdecode(b"\xff")], "not UTF-8"),
        (["-p", "x", "--stop", os.fsdecode(b"\xff")], "not UTF-8"),
        (["--prompt-file", "nowhere"], "file.unreadable"),
        ([], "Nothing to generate from"),
    ],
    ids=str,
)
def test_bad_requests(
    capfd: pytest.CaptureFixture[str], bundle: Path, arguments: list[str], says: str
) -> None:
    code, out, err = call(capfd, "generate", str(bundle), *arguments)
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize("text", ["", "[", "name: x"], ids=["empty", "no YAML", "no target"])
def test_bad_spec(capfd: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    code, out, err = call(capfd, "build", str(tmp_path / "s.yaml"), "-o", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert "[spec.invalid]" in err
    assert not (tmp_path / "out").exists()


def test_one_name_for_two_specs(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    from test_build import write_spec

    spec = str(write_spec(tmp_path, pair[0]))
    code, _, err = call(capfd, "build", spec, spec, "-o", str(tmp_path / "out"))
    assert code == 2
    assert "'tiny'" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_may_leave_in_the_middle(bundle: Path, form: str) -> None:
    command = f"{sys.executable} -m pipelines.cli generate {bundle} -p x -n 200 --format {form} | head -c 1"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in found.stderr
    assert "Exception" not in found.stderr


def test_output_to_a_full_disk(pair: tuple[Path, Path]) -> None:
    command = f"{sys.executable} -m pipelines.cli inspect {pair[0]} > /dev/full"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert found.returncode == 3
    assert "machine.disk-full" in found.stderr
    assert "Traceback" not in found.stderr


def test_output_larger_than_files_may_be(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A quota on the size of files is a full disk, too."""
    with (tmp_path / "out").open("w") as out:
        found = subprocess.run(
            [sys.executable, "-m", "pipelines.cli", "inspect", str(pair[0])],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        )
    assert found.returncode == 3
    assert "machine.disk-full" in found.stderr
    assert "Traceback" not in found.stderr


def test_interrupts(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that an extension module took for a failure to load."""

    def plain(*_: object) -> None:
        raise KeyboardInterrupt

    def while_loading(*_: object) -> None:
        raise ImportError("initialization failed") from KeyboardInterrupt()

    def broken(*_: object) -> None:
        raise ImportError("no such module")

    for fail in (plain, while_loading):
        monkeypatch.setattr("pipelines.spec.load_spec", fail)
        code, out, err = call(capfd, "build", "x")
        assert (code, out) == (130, "")
        assert err.strip().startswith("Interrupted.")
    monkeypatch.setattr("pipelines.spec.load_spec", broken)
    with pytest.raises(ImportError, match="no such module"):
        main(["build", "x"])
