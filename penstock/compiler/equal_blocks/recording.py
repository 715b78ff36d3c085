"""The first block of a kind is traced, and its operator calls are recorded."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils import _pytree as pytree

from penstock.compiler.equal_blocks.records import (
    FIRST,
    Call,
    FirstBlock,
    NotEqual,
    TensorRef,
    metadata_of,
    tensor_refs,
    tensors_in,
)
from penstock.compiler.equal_blocks.runs import Run, last_node, nodes_after

_FEWEST_CALLS = 8  # below, a node for the block and its copy cost as much as its operators
_CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
)
_REFUSED_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Recording(Run):
    """The calls of the first block of a kind.

    Tensors are identified by their nodes. A reference to a tensor would change what PyTorch does:
    the result of `torch.full` is copied if anything else refers to it.
    """

    def __init__(self, first: FirstBlock, tracer: Any) -> None:
        super().__init__(first, tracer)
        self._refused = False
        self._numbers: dict[fx.Node, int] = {}

    def is_usable(self) -> bool:
        """Return whether the record describes every node of the block."""
        complete = last_node(self._tracer) is self._last
        return complete and not self._refused and len(self._first.calls) >= _FEWEST_CALLS

    def call(self, mode: Any, func: Any, args: Any, kwargs: Any, trace: Callable[[], Any]) -> Any:
        if self._refused:
            return trace()
        gradients = torch.is_grad_enabled()
        try:
            with torch._C.DisableTorchFunction():
                self._require(mode, func, args, kwargs)
                encoded = self._encoded(args), self._encoded(kwargs)
        except NotEqual:
            self._refused = True
            return trace()
        results = trace()
        try:
            with torch._C.DisableTorchFunction():
                self._add(func, args, kwargs, encoded, results, gradients)
        except NotEqual:
            self._refused = True
        return results

    def _require(self, mode: Any, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse operators whose result is more than a function of their arguments' metadata, and
        nodes that no operator call has made."""
        simple = isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable
        if (
            not simple
            or mode.tracer is not self._tracer
            or next(tensors_in((args, kwargs)), None) is None  # creates a tensor
            or func is torch.ops.aten.lift_fresh.default
            or not _REFUSED_TAGS.isdisjoint(func.tags)
            or last_node(self._tracer) is not self._last
        ):
            raise NotEqual

    def _encoded(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return TensorRef(self._number(value))
        if type(value) in (tuple, list):
            return type(value)(map(self._encoded, value))
        if isinstance(value, torch.Size):
            return torch.Size(value)
        if type(value) is dict:
            return {name: self._encoded(part) for name, part in value.items()}
        if type(value) in _CONSTANTS:
            return value
        raise NotEqual

    def _add(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        encoded: tuple[Any, Any],
        results: Any,
        gradients: bool,
    ) -> None:
        parts = results if type(results) in (tuple, list) else (results,)
        if not all(type(part) is FakeTensor or part is None for part in parts):
            raise NotEqual
        nodes = nodes_after(self._tracer, self._last)
        self._last = last_node(self._tracer)
        made = nodes[0] if nodes else None
        if (
            made is None
            or made.target is not func
            or any(n.args[:1] != (made,) or n.target is not operator.getitem for n in nodes[1:])
        ):
            raise NotEqual
        made.meta[FIRST] = (self._first.index, len(self._first.calls))
        given = [ref.number for ref in tensor_refs(encoded)]
        arguments = list(tensors_in((args, kwargs)))
        found = list(tensors_in(results))
        same = tuple(
            next((n for a, n in zip(arguments, given, strict=True) if a is tensor), None)
            for tensor in found
        )
        count = itertools.count(self._count)
        tree = pytree.tree_map_only(Tensor, lambda _: TensorRef(next(count)), results)
        for number, tensor in enumerate(found, self._count):
            self._numbers[self._node(tensor)] = number
        self._count += len(found)
        metadata = tuple(map(metadata_of, found))
        self._first.calls.append(Call(func, *encoded, tree, metadata, same, gradients))

    def _number(self, tensor: Tensor) -> int:
        slot: Any = get_proxy_slot(tensor, self._tracer, None)
        number = None if slot is None else self._numbers.get(slot.proxy.node)
        if number is None:
            number = ~self._externals
            self._first.externals.append(self._describe_external(tensor))
            self._numbers[self._node(tensor)] = number
        return number

    def _node(self, tensor: Tensor) -> fx.Node:
        slot: Any = get_proxy_slot(tensor, self._tracer)
        node: fx.Node = slot.proxy.node
        return node
