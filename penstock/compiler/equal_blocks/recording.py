"""The first block of a group is traced, and its operator calls are recorded."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils import _pytree as pytree

from penstock.compiler.equal_blocks.calls import BlockCalls, last_node, metadata_of_each
from penstock.compiler.equal_blocks.records import (
    CALL,
    BlockRecord,
    NotEqual,
    OperatorCall,
    ResultRef,
    TensorRef,
    refs_in,
)
from penstock.compiler.tensors import tensors_in

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
# The first takes a constant. The export erases the second if nothing reads its result.
_REFUSED = {torch.ops.aten.lift_fresh.default, torch.ops.aten.detach.default}
_REFUSED_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class BlockRecording(BlockCalls):
    """The operator calls of the first block of a group.

    Tensors are identified by their nodes. A reference to a tensor would change what PyTorch does:
    the result of an operator that creates a tensor is copied if anything else refers to it.
    """

    def __init__(self, record: BlockRecord, tracer: Any) -> None:
        super().__init__(record, tracer)
        self._refused = False
        self._refs: dict[fx.Node, TensorRef] = {}
        self._newest = last_node(tracer)

    def is_usable(self) -> bool:
        """Return whether the record describes every node of the block."""
        complete = last_node(self._tracer) is self._newest
        return complete and not self._refused and len(self._record.calls) >= _FEWEST_CALLS

    def call(self, mode: Any, func: Any, args: Any, kwargs: Any, trace: Callable[[], Any]) -> Any:
        if self._refused:
            return trace()
        try:
            self._require(mode, func, args, kwargs)
            with torch._C.DisableTorchFunction():
                before = self._encoded(args), self._encoded(kwargs)
            inputs = metadata_of_each(tensors_in((args, kwargs)))
            gradients, (modules, line) = torch.is_grad_enabled(), self._place()
        except NotEqual:
            self._refused = True
            return trace()
        results = trace()
        try:
            self._require_node(func, results)
            same = self._returned_arguments(list(tensors_in((args, kwargs))), before, results)
            described = self._numbered(results)
            outputs = metadata_of_each(tensors_in(results))
            call = OperatorCall(
                func, *before, inputs, described, outputs, same, gradients, modules, line
            )
            self._record.calls.append(call)
        except NotEqual:
            self._refused = True
        return results

    def _require(self, mode: Any, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse operators whose results are more than a function of the arguments' metadata, and
        nodes that no operator call has made."""
        if (
            not isinstance(func, torch._ops.OpOverload)
            or func._schema.is_mutable
            or mode.tracer is not self._tracer
            or next(tensors_in((args, kwargs)), None) is None
            or any(a.name == "pin_memory" for a in func._schema.arguments)  # creates a tensor
            or func in _REFUSED
            or not _REFUSED_TAGS.isdisjoint(func.tags)
            or last_node(self._tracer) is not self._newest
        ):
            raise NotEqual

    def _encoded(self, value: Any) -> Any:
        """Return arguments with a `TensorRef` for every tensor."""
        if isinstance(value, Tensor):
            return self._ref(value)
        if type(value) in (tuple, list):
            return type(value)(map(self._encoded, value))
        if type(value) is dict:
            return {name: self._encoded(part) for name, part in value.items()}
        if type(value) in _CONSTANTS or type(value) is torch.Size:
            return value
        raise NotEqual

    def _ref(self, tensor: Tensor) -> TensorRef:
        slot: Any = get_proxy_slot(tensor, self._tracer, None)
        ref = None if slot is None else self._refs.get(slot.proxy.node)
        if ref is None:
            ref, first_of_storage = self._take_external(tensor)
            self._record.storages.append(first_of_storage)
            self._refs[self._node(tensor)] = ref
        return ref

    def _node(self, tensor: Tensor) -> fx.Node:
        slot: Any = get_proxy_slot(tensor, self._tracer)
        node: fx.Node = slot.proxy.node
        return node

    def _require_node(self, func: Any, results: Any) -> None:
        """Mark the node of a call; refuse a call that made other nodes, or results of other types.

        An operator with several results has a node for each of them.
        """
        parts = results if type(results) in (tuple, list) else (results,)
        nodes = list(
            itertools.takewhile(
                lambda node: node is not self._newest, reversed(self._tracer.graph.nodes)
            )
        )
        tensors = [part for part in parts if part is not None]
        if not nodes or not tensors or any(type(tensor) is not FakeTensor for tensor in tensors):
            raise NotEqual
        *items, node = nodes
        if node.target is not func or any(
            item.target is not operator.getitem or item.args[0] is not node for item in items
        ):
            raise NotEqual
        node.meta[CALL] = (self._record.index, len(self._record.calls))
        self._newest = nodes[0]

    def _returned_arguments(
        self, arguments: list[Tensor], encoded: Any, results: Any
    ) -> tuple[TensorRef | None, ...]:
        refs = list(refs_in(encoded))
        return tuple(
            next((ref for arg, ref in zip(arguments, refs, strict=True) if arg is result), None)
            for result in tensors_in(results)
        )

    def _numbered(self, results: Any) -> Any:
        """Return results with a `ResultRef` for every tensor."""

        def number(tensor: Tensor) -> ResultRef:
            ref = ResultRef(self._result_count)
            self._result_count += 1
            self._refs[self._node(tensor)] = ref
            return ref

        with torch._C.DisableTorchFunction():
            return pytree.tree_map_only(Tensor, number, results)
