"""New streamed values of weights whose update is deferred.

An update moves the whole state of a weight; its streamed values depend on the old state only. Where
engines wait for weights, these values are computed first, into memory of their own, and the update
is made later in the step, from the same inputs: the bits are those of an update at the fetch. An
update of AdamW with split masters and gradients of bfloat16 reads 14 bytes per parameter and writes
12; its streamed values alone take 14 and 2.
"""

from collections.abc import Collection

import numpy as np
import torch

from penstock.errors import BudgetError
from penstock.kernels.memory import page_lock
from penstock.store.holding import Holding
from penstock.store.layout import allocate_role, role_bytes, slabs_of
from penstock.store.masters import stream_of
from penstock.store.optimizers import Optimizer


def early_weights_of(program: Holding, optimizer: Optimizer | None) -> tuple[str, ...]:
    """Return the weights that may be streamed before their update: the dense ones that train.

    There are none if the optimizer cannot do that, or would gain little by it.
    """
    if optimizer is None or not optimizer.computes_streamed:
        return ()
    return tuple(
        name for name, spec in program.weights.items() if spec.trainable and not spec.is_sparse
    )


def early_weights_bytes(program: Holding, optimizer: Optimizer) -> int:
    """Return the memory of `EarlyWeights`."""
    return role_bytes(program, _types(program, early_weights_of(program, optimizer)))


def _types(program: Holding, names: Collection[str]) -> dict[str, np.dtype]:
    return {name: np.dtype(program.weights[name].format.parts[0].dtype) for name in names}


class EarlyWeights:
    """The new streamed values of weights, and which of them are there.

    Their memory is allocated when the first weights may be streamed early. If it cannot be
    allocated, or not page-locked, none are.

    Args:
        program: describes the weights.
        names: which weights (`early_weights_of`).
    """

    def __init__(self, program: Holding, names: Collection[str]) -> None:
        self._program = program
        self._specs = {name: program.weights[name] for name in names}
        self._arrays: dict[str, np.ndarray] = {}
        self._streams: dict[str, torch.Tensor] = {}
        self.elements = sum(spec.elements for spec in self._specs.values())
        self.memory_bytes = 0
        self._is_page_locked = False
        self._limit = self._left = 0
        self._there: set[str] = set()

    def page_lock(self) -> None:
        """Let the memory be page-locked when it is allocated."""
        self._is_page_locked = True

    def limit(self, elements: int) -> None:
        """Let weights of so many elements be streamed early after each commit from the next on."""
        if elements and not self._arrays and self.elements:
            self._allocate()
        self._limit = min(elements, self.elements)

    def _allocate(self) -> None:
        try:
            arrays, size = allocate_role(self._program, _types(self._program, self._specs))
        except BudgetError:
            self.elements = 0
            return
        # Copies from memory that is not locked would be slower than the updates that are saved.
        if self._is_page_locked and not all(page_lock(slab) for slab in slabs_of(arrays.values())):
            self.elements = 0
            return
        self._arrays, self.memory_bytes = arrays, size
        self._streams = {name: stream_of(arrays[name], spec) for name, spec in self._specs.items()}

    def begin(self) -> None:
        """Forget all values: the step is committed, or other weights are restored."""
        self._left = self._limit
        self._there.clear()

    def has_room(self, name: str) -> bool:
        """Return whether a weight may be streamed early."""
        return name in self._arrays and self._specs[name].elements <= self._left

    def array(self, name: str) -> np.ndarray:
        """Return the memory of a weight, flat, in the type of its first stored part."""
        return self._arrays[name]

    def add(self, name: str) -> None:
        """Record that the new values of a weight are in its memory."""
        self._left -= self._specs[name].elements
        self._there.add(name)

    def stream(self, name: str) -> torch.Tensor | None:
        """Return the new values of a weight in its shape, if they are there."""
        return self._streams[name] if name in self._there else None

    def is_there(self, name: str) -> bool:
        """Return whether the new values of a weight are there."""
        return name in self._there
