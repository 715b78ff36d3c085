"""A later block of a group is not traced: its operator calls are compared with the record."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor_tree
from torch.utils import _pytree as pytree

from penstock.compiler.equal_blocks.calls import BlockCalls, last_node, metadata_of_each
from penstock.compiler.equal_blocks.records import (
    BLOCK,
    BlockRecord,
    ExternalRef,
    NotEqual,
    OperatorCall,
    ResultRef,
    TensorRef,
    refs_in,
    with_refs_replaced,
)
from penstock.compiler.equal_blocks.reused_results import ReusedResults
from penstock.compiler.tensors import storage_of, tensors_in


class BlockComparison(BlockCalls):
    """The operator calls of a later block of a group.

    After a difference the block is traced: `is_equal` is False.
    """

    def __init__(self, record: BlockRecord, reused: ReusedResults, tracer: Any) -> None:
        super().__init__(record, tracer)
        self._reused = reused
        self._objects: dict[TensorRef, Any] = {}
        self._refs: dict[int, TensorRef] = {}  # the newest of each tensor, by id
        self._places: list[tuple[dict[str, Any], str | None]] = []  # of the calls so far
        self.is_equal = True

    def call(self, mode: Any, func: Any, args: Any, kwargs: Any, trace: Callable[[], Any]) -> Any:
        if not self.is_equal:
            return trace()
        place = len(self._places)
        try:
            if place == len(self._record.calls) or mode.tracer is not self._tracer:
                raise NotEqual
            call = self._record.calls[place]
            self._compare(call, func, args, kwargs)
            results = self._results(call, func, args, kwargs)
        except NotEqual:
            self.trace_from_here()
            return trace()
        self._places.append((self._tracer.module_stack.copy(), call.line))
        return results

    def _compare(self, call: OperatorCall, func: Any, args: Any, kwargs: Any) -> None:
        if call.target is not func or call.with_gradients != torch.is_grad_enabled():
            raise NotEqual
        with torch._C.DisableTorchFunction():
            equal = self._equal(call.args, args) and self._equal(call.kwargs, kwargs)
        if not equal or metadata_of_each(tensors_in((args, kwargs))) != call.inputs:
            raise NotEqual
        if (call.modules, call.line) != self._place():
            raise NotEqual

    def _equal(self, recorded: Any, value: Any) -> bool:
        if isinstance(recorded, (ResultRef, ExternalRef)):
            return isinstance(value, Tensor) and self._ref(value) == recorded
        if type(recorded) is not type(value):
            return False
        if isinstance(recorded, (tuple, list)):
            return len(recorded) == len(value) and all(map(self._equal, recorded, value))
        if isinstance(recorded, dict):
            return list(recorded) == list(value) and all(
                self._equal(part, value[name]) for name, part in recorded.items()
            )
        return _equal_constants(recorded, value)

    def _ref(self, tensor: Tensor) -> TensorRef:
        ref = self._refs.get(id(tensor))
        if ref is None:
            ref, first_of_storage = self._take_external(tensor)
            if self._record.storages[ref.number : ref.number + 1] != [first_of_storage]:
                raise NotEqual
            self._add(ref, tensor)
        return ref

    def _add(self, ref: TensorRef, tensor: Tensor) -> None:
        self._refs[id(tensor)] = ref
        self._objects[ref] = tensor

    def _results(self, call: OperatorCall, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of a call: those of an earlier block, or new ones."""
        refs: list[ResultRef] = list(refs_in(call.results))
        tensors: list[Any] = [
            self._objects[argument] if argument is not None else self._reused.get(ref.number)
            for ref, argument in zip(refs, call.returned_arguments, strict=True)
        ]
        if any(tensor is None for tensor in tensors):
            tensors = list(tensors_in(func(*args, **kwargs)))
            same = tuple(self._refs.get(id(tensor)) for tensor in tensors)
            if same != call.returned_arguments or metadata_of_each(tensors) != call.outputs:
                raise NotEqual
            new = {
                r.number: t for r, t in zip(refs, tensors, strict=True) if id(t) not in self._refs
            }
            # A view of an external tensor belongs to this block alone.
            if self._storages.keys().isdisjoint(map(storage_of, new.values())):
                self._reused.keep(new)
        for ref, tensor in zip(refs, tensors, strict=True):
            self._add(ref, tensor)
        return with_refs_replaced(call.results, self._objects)

    def trace_from_here(self) -> None:
        """Add the nodes of the calls so far, so that the rest of the block can be traced."""
        self.is_equal = False
        modules = self._tracer.module_stack
        try:
            with proxy_tensor.disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
                for call, (stack, line) in zip(self._record.calls, self._places, strict=False):
                    self._tracer.module_stack = stack
                    self._trace(call, line)
        finally:
            self._tracer.module_stack = modules
        self._reused.forget_all()

    def _trace(self, call: OperatorCall, line: str | None) -> None:
        """Add the node of a call, and those of its results."""
        tracer = self._tracer
        newest = last_node(tracer)
        proxies = {ref: self._proxy(ref) for ref in refs_in((call.args, call.kwargs))}
        proxy = tracer.create_proxy(
            "call_function",
            call.target,
            with_refs_replaced(call.args, proxies),
            with_refs_replaced(call.kwargs, proxies),
            name=tracer.graph._target_to_str(call.target.overloadpacket.__name__),
        )
        results = with_refs_replaced(call.results, self._objects)
        track_tensor_tree(results, proxy, constant=None, tracer=tracer)
        node = last_node(tracer)
        while node is not None and node is not newest:
            node.stack_trace = line
            node = node.prev

    def _proxy(self, ref: TensorRef) -> Any:
        slot: Any = get_proxy_slot(self._objects[ref], self._tracer)
        return slot.proxy

    def finish(self, outputs: Any, index: int) -> tuple[ResultRef, ...] | None:
        """Add the node of the block; return what it returns. None if the block is not equal.

        **Arguments:** `outputs` are those of the block's forward, `index` is that of the block in
        `BlockTracing.equal`.
        """
        if self.is_equal and len(self._places) < len(self._record.calls):
            self.trace_from_here()
        if not self.is_equal:
            return None
        with proxy_tensor.disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            visible = self._take_visible(outputs)
            externals = [ExternalRef(number) for number in range(self._external_count)]
            inputs = [self._proxy(ref) for ref in externals]
            proxy = self._tracer.create_proxy(
                "call_function",
                torch.ops.penstock.equal_block.default,
                (inputs,),
                {},
                name="equal_block",
            )
            proxy.node.meta[BLOCK] = index
            tensors = [self._objects[ref] for ref in visible]
            track_tensor_tree(tensors, proxy, constant=None, tracer=self._tracer)
        return tuple(visible)

    def _take_visible(self, outputs: Any) -> list[ResultRef]:
        """Return the results that code outside of the block can see.

        The next block computes these itself, and those whose metadata the block has changed.
        """
        expected = {
            ref.number: metadata
            for call in self._record.calls
            for ref, metadata in zip(refs_in(call.results), call.outputs, strict=True)
        }
        self._reused.forget_changed(expected)
        returned = {id(leaf) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)}
        # An operator that returns its argument gives an external tensor a new node.
        returned |= {id(t) for ref, t in self._objects.items() if isinstance(ref, ExternalRef)}
        returned |= {id(self._objects[ref]) for ref in self._reused.referenced(self._objects)}
        visible: dict[ResultRef, Tensor] = {}
        for tensor in list(self._objects.values()):
            newest = self._refs[id(tensor)]
            if id(tensor) in returned and isinstance(newest, ResultRef):
                visible[newest] = tensor
                base = self._refs.get(id(tensor._base)) if tensor._base is not None else None
                if isinstance(base, ResultRef):
                    visible[base] = self._objects[base]
        self._reused.forget(visible.values())
        return list(visible)


def _equal_constants(recorded: Any, value: Any) -> bool:
    """Compare two constants of one type; 0.0 and -0.0 differ."""
    if isinstance(recorded, float):
        signs = math.copysign(1.0, recorded) == math.copysign(1.0, value)
        return recorded == value and signs
    if isinstance(recorded, complex):
        return repr(recorded) == repr(value)
    return bool(recorded == value)
