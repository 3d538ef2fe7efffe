"""A target of 7 layers, hidden size 48 and 97 tokens."""

from __future__ import annotations

import pytest
import zoo
from heads_zoo import make_deep_model
from transformers import PreTrainedModel

from builders.checkpoints.reader import read_checkpoint
from builders.checkpoints.types import Checkpoint


@pytest.fixture(scope="session")
def target_model() -> PreTrainedModel:
    return make_deep_model()


@pytest.fixture(scope="session")
def target(target_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_checkpoint(zoo.save(target_model, tmp_path_factory.mktemp("target")))
