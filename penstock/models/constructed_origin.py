"""A model that a constructor builds, some of whose tensors have their values from files."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from penstock.models.origin import WeightSource
from penstock.models.tensor_names import TensorNames

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


class ConstructedOrigin:
    """The modules of a constructor; a subclass knows which values are from files.

    Args:
        constructor: the model without files: recorded in this process, or recalled. A recalled
            model is recorded when its modules are first used.
        names: the model's tensors by name, for their shapes and types.
        stored: names of the buffers whose values are from files.
    """

    def __init__(
        self, constructor: WeightSource, names: TensorNames, stored: Iterable[str]
    ) -> None:
        self.constructor = constructor
        self.aliases = constructor.aliases
        self.bfloat16 = constructor.bfloat16
        self.stored = frozenset(stored)
        self.tensors = {**names.parameters, **names.buffers}

    @property
    def module(self) -> nn.Module:
        """The model, on fake tensors."""
        return self.constructor.module

    @property
    def fake_mode(self) -> "FakeTensorMode":
        """The mode of the model's fake tensors."""
        return self.constructor.fake_mode

    @property
    def names(self) -> TensorNames:
        """The tensors of the module by name."""
        return self.constructor.names

    def wanted(self, names: Iterable[str] | None) -> list[str]:
        """Return names, each once; all if none are given."""
        return list(self.tensors if names is None else dict.fromkeys(names))
