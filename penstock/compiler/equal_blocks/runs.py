"""A block whose forward runs: what recording and comparing its calls have in common."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from penstock.compiler.equal_blocks.records import FirstBlock, NotEqual, metadata_of, storage_of


class Run:
    """The operator calls of a block while its forward runs.

    Tensors are numbered: the results in the order of the calls from 0 on, the external tensors in
    the order in which the block reads them from -1 downwards.
    """

    def __init__(self, first: FirstBlock, tracer: Any) -> None:
        self._first, self._tracer = first, tracer
        self._externals = 0
        self._storages: dict[int, int] = {}  # the first external tensor in each storage
        self._count = 0  # of results
        self._last = last_node(tracer)

    def call(self, mode: Any, func: Any, args: Any, kwargs: Any, trace: Callable[[], Any]) -> Any:
        """Return the results of an operator; `trace` adds its nodes to the graph."""
        raise NotImplementedError

    def _describe_external(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the metadata of the next external tensor.

        Raises:
            NotEqual: the tensor does not come from the graph.
        """
        slot: Any = get_proxy_slot(tensor, self._tracer, None)
        if not isinstance(tensor, FakeTensor) or slot is None or slot.constant is not None:
            raise NotEqual
        place = self._externals
        self._externals += 1
        return *metadata_of(tensor), self._storages.setdefault(storage_of(tensor), place)


def last_node(tracer: Any) -> fx.Node | None:
    """Return the newest node of a graph that is being traced."""
    return next(reversed(tracer.graph.nodes), None)


def nodes_after(tracer: Any, last: fx.Node | None) -> list[fx.Node]:
    """Return the nodes that are newer than one, in their order."""
    nodes = list(takewhile(lambda n: n is not last, reversed(tracer.graph.nodes)))
    return nodes[::-1]
