"""The operator calls of a block while its forward runs: what recording and comparing share."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from penstock.compiler.equal_blocks.records import (
    BlockRecord,
    ExternalRef,
    Metadata,
    ModulesBelow,
    NotEqual,
    TensorRef,
    metadata_of,
)
from penstock.compiler.lean_tracing import innermost_forward
from penstock.compiler.tensors import storage_of


class BlockCalls:
    """The operator calls of a block.

    Args:
        record: the record of the block's group.
        tracer: the export's tracer, whose innermost module is the block.
    """

    def __init__(self, record: BlockRecord, tracer: Any) -> None:
        self._record, self._tracer = record, tracer
        self._depth = len(tracer.module_stack)
        self._key, (self._path, _) = list(tracer.module_stack.items())[-1]
        self._external_count = self._result_count = 0
        self._storages: dict[int, int] = {}  # the first external tensor in each

    def call(self, mode: Any, func: Any, args: Any, kwargs: Any, trace: Callable[[], Any]) -> Any:
        """Return the results of an operator; `trace` adds its nodes to the graph."""
        raise NotImplementedError

    def _take_external(self, tensor: Tensor) -> tuple[ExternalRef, int]:
        """Return the next external tensor, and the first one that shares its memory.

        Raises:
            NotEqual: the tensor does not come from the graph.
        """
        slot: Any = get_proxy_slot(tensor, self._tracer, None)
        if not isinstance(tensor, FakeTensor) or slot is None or slot.constant is not None:
            raise NotEqual
        number = self._external_count
        self._external_count += 1
        return ExternalRef(number), self._storages.setdefault(storage_of(tensor), number)

    def _ref(self, tensor: Tensor) -> TensorRef:
        raise NotImplementedError

    def _place(self) -> tuple[ModulesBelow, str | None]:
        """Return the modules below the block and the line of the model's code that is running.

        Raises:
            NotEqual: a module that is not part of the block is called.
        """
        below = []
        for key, (path, module_type) in list(self._tracer.module_stack.items())[self._depth :]:
            if not key.startswith(f"{self._key}.") or not path.startswith(f"{self._path}."):
                raise NotEqual
            below.append((key[len(self._key) :], path[len(self._path) :], module_type))
        return tuple(below), innermost_forward(sys._getframe(1))


def metadata_of_each(tensors: Any) -> tuple[Metadata, ...]:
    """Return the metadata of tensors."""
    with torch._C.DisableTorchFunction():
        return tuple(map(metadata_of, tensors))


def last_node(tracer: Any) -> fx.Node | None:
    """Return the newest node of a graph that is being traced."""
    return next(iter(reversed(tracer.graph.nodes)), None)
