"""The loss in pieces equals the loss as it is defined; what it counts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from builders.training.objective import cross_entropy


@pytest.mark.parametrize("count", [1, 128, 300])
def test_cross_entropy_in_pieces(count: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(40, 12)
    teacher = torch.randn(50, 40).softmax(-1)
    index = torch.randint(0, 50, (count,))
    pieces = torch.randn(count, 12, requires_grad=True)
    whole = pieces.detach().clone().requires_grad_()
    found = cross_entropy(pieces, rows, teacher, index) * 3
    wanted = functional.cross_entropy(whole @ rows.T, teacher[index]) * 3
    found.backward()
    wanted.backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(pieces.grad, whole.grad)


def test_cross_entropy_of_nothing() -> None:
    features = torch.zeros(0, 12, requires_grad=True)
    found = cross_entropy(
        features, torch.randn(40, 12), torch.zeros(0, 40), torch.zeros(0, dtype=torch.int64)
    )
    assert found.item() == 0
