"""Imports point one way; the rule is shown to bite."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as m; m()",
        "--no-cache",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_tree_keeps_the_rules() -> None:
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_planted_violation_is_found(tmp_path: Path) -> None:
    for package in ("engines", "builders", "triton_repo", "pipelines"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "engines" / "errors.py").open("a") as file:
        file.write("\nimport builders.pairing\n")
    found = lint(tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "engines.errors -> builders.pairing" in found.stdout
