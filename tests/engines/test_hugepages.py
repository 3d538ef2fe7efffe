"""Large pages are a request: nothing breaks, whatever the system says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.sessions import hugepages
from engines.sessions.hugepages import collapse_anonymous_memory


def test_memory_keeps_its_contents() -> None:
    block = np.arange(16 << 20, dtype=np.uint8)
    before = block.sum(dtype=np.int64)
    assert collapse_anonymous_memory() >= 0
    assert block.sum(dtype=np.int64) == before


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugepages.sys, "platform", "darwin")
    assert collapse_anonymous_memory() == 0


def test_unreadable_maps_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert collapse_anonymous_memory() == 0
