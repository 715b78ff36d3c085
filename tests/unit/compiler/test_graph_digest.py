"""The digest of a captured graph tells models apart that compute, or learn, something else."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from penstock.compiler.capture import capture
from penstock.compiler.graph_digest import graph_digest


class Net(nn.Module):
    """Two layers, of which the first may be read without gradients; `scale` is a plain number."""

    def __init__(self, *, without_gradients: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.without_gradients, self.scale = without_gradients, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad() if self.without_gradients else contextlib.nullcontext():
            hidden = self.first(x)
        return (self.second(torch.tanh(hidden)) * self.scale).mean()


def digest_of(module: nn.Module) -> str:
    return graph_digest(capture(module, {"x": torch.zeros(2, 3)}))


def test_digest_is_equal_for_equal_models_with_different_values():
    assert digest_of(Net()) == digest_of(Net())


@pytest.mark.parametrize("changed", [{"without_gradients": True}, {"scale": 2.0}])
def test_digest_differs_where_the_forward_differs(changed):
    assert digest_of(Net()) != digest_of(Net(**changed))
