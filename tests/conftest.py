"""Fixtures that several packages' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file, which `make build-engines` downloads."""
    downloads = Path(__file__).parents[1] / "build" / "downloads"
    found = sorted(downloads.rglob("SmolLM2-135M-Instruct*.gguf"))
    if not found:
        pytest.fail(
            f"no demo model under {downloads}: run make build-engines, or deselect with -m 'not slow'"
        )
    return found[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are no part of the suite where there is none."""
    if not torch.cuda.is_available():
        gone = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]
