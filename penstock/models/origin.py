"""Where a model source gets a module's structure and its initial weights."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.models.deferred import TensorNames


class WeightSource(Protocol):
    """What `Deferred` and `Built` have in common."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def fake_mode(self) -> FakeTensorMode: ...

    @property
    def names(self) -> TensorNames: ...

    @property
    def aliases(self) -> dict[str, str]: ...

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]: ...
