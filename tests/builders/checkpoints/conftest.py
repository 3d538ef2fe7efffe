"""Fixtures: random models, and folders that transformers saved them to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoints import MakeFolder, MakeModel, random_model


@pytest.fixture
def make_model() -> MakeModel:
    return random_model


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Saves a random model of a family: `make_folder("llama", tie_word_embeddings=True)`."""

    def make(
        family: str, *, name: str = "model", shard: str = "1GB", dtype: str = "float32", **changes: Any
    ) -> Path:
        model = random_model(family, **changes).to(getattr(torch, dtype))
        model.save_pretrained(tmp_path / name, max_shard_size=shard)
        return tmp_path / name

    return make
