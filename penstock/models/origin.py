"""The origin of a model source: the module's structure and its initial weights."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from penstock.models.tensor_names import TensorNames

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from penstock.sparsity import PackedIndex


class WeightSource(Protocol):
    """A module on fake tensors, and its weights one at a time: `Deferred`, `Built`, `Pretrained`,
    `WithStoredBuffers`, `AdaptedOrigin`, `RecalledOrigin`.

    `bfloat16` are the parameters that were bfloat16 at the origin: they are returned as float32,
    and every value is exactly a bfloat16. `stored` are the buffers whose values are from a file.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def fake_mode(self) -> "FakeTensorMode": ...

    @property
    def names(self) -> TensorNames: ...

    @property
    def aliases(self) -> dict[str, str]: ...

    @property
    def bfloat16(self) -> frozenset[str]: ...

    @property
    def stored(self) -> frozenset[str]: ...

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]: ...

    def mask(self, name: str) -> "PackedIndex | None":
        """Return the mask that a weight has at its origin, a packed folder; else None."""
        ...

    def draws(self, names: Iterable[str]) -> bool:
        """Return whether the values of these tensors may depend on the seed."""
        ...
