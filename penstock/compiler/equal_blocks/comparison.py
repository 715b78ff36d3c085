"""A later block of a kind is not traced: its operator calls are compared with the first block's."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor_tree
from torch.utils import _pytree as pytree

from penstock.compiler.equal_blocks.records import (
    EQUAL,
    Call,
    FirstBlock,
    NotEqual,
    TensorRef,
    metadata_of,
    storage_of,
    tensors_in,
)
from penstock.compiler.equal_blocks.runs import Run, last_node


class Comparison(Run):
    """The calls of a later block of a kind."""

    def __init__(self, first: FirstBlock, tracer: Any) -> None:
        super().__init__(first, tracer)
        self._at = 0
        self._objects: dict[int, Tensor] = {}  # the tensors so far, by number
        self._numbers: dict[int, int] = {}  # the newest number of each, by id

    def call(self, mode: Any, func: Any, args: Any, kwargs: Any, trace: Callable[[], Any]) -> Any:
        calls = self._first.calls
        if self._at == len(calls) or mode.tracer is not self._tracer:
            raise NotEqual
        call = calls[self._at]
        gradients = torch.is_grad_enabled()
        with torch._C.DisableTorchFunction():
            if (
                call.target is not func
                or call.with_gradients != gradients
                or not self._equal(call.args, args)
                or not self._equal(call.kwargs, kwargs)
            ):
                raise NotEqual
        self._at += 1
        if len(self._first.results) <= self._count and call.metadata:
            results = func(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                self._keep(call, results)
                return results
        for was in call.same:
            own = self._first.results[self._count]
            tensor = self._objects[was] if was is not None else own
            assert tensor is not None
            self._see_result(tensor)
        return _filled(call.results, self._objects)

    def _keep(self, call: Call, results: Any) -> None:
        """Keep the results of a block, which later blocks reuse."""
        found = list(tensors_in(results))
        same = tuple(self._numbers.get(id(tensor)) for tensor in found)
        if same != call.same or tuple(map(metadata_of, found)) != call.metadata:
            raise NotEqual
        for tensor, was in zip(found, same, strict=True):
            self._first.results.append(tensor if was is None else None)
            self._see_result(tensor)

    def _see_result(self, tensor: Tensor) -> None:
        self._see(tensor, self._count)
        self._count += 1

    def _see(self, tensor: Tensor, number: int) -> None:
        self._numbers[id(tensor)] = number
        self._objects[number] = tensor

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = ~self._externals
            found = self._describe_external(tensor)
            if ~number >= len(self._first.externals) or self._first.externals[~number] != found:
                raise NotEqual
            self._see(tensor, number)
        return number

    def _equal(self, recorded: Any, value: Any) -> bool:
        if isinstance(recorded, TensorRef):
            return isinstance(value, Tensor) and self._number(value) == recorded.number
        if type(recorded) is not type(value):
            return False
        if isinstance(recorded, (tuple, list)):
            return len(recorded) == len(value) and all(map(self._equal, recorded, value))
        if isinstance(recorded, dict):
            return list(recorded) == list(value) and all(
                self._equal(part, value[name]) for name, part in recorded.items()
            )
        return _equal_constants(recorded, value)

    def finish(self, outputs: Any, index: int) -> tuple[Any, tuple[int, ...]]:
        """Add the block's node to the graph; return its outputs and their numbers."""
        complete = self._at == len(self._first.calls)
        if not complete or last_node(self._tracer) is not self._last:
            raise NotEqual
        externals = [self._objects[~place] for place in range(self._externals)]
        external = {id(tensor) for tensor in externals}
        returned: dict[int, Tensor] = {}
        # An operator that returns its argument gives this tensor a new node, also outside.
        for tensor in externals:
            if self._numbers[id(tensor)] >= 0:
                returned[self._numbers[id(tensor)]] = tensor
        leaves, structure = pytree.tree_flatten(outputs)
        with proxy_tensor.disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            for place, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor) or id(leaf) in external:
                    continue
                number = self._numbers.get(id(leaf))
                if number is not None:
                    if number not in returned:
                        returned[number] = self._fresh(leaf, returned)
                    leaves[place] = returned[number]
                elif get_proxy_slot(leaf, self._tracer, None) is None:
                    raise NotEqual
            self._add_node(externals, list(returned.values()), index)
        return pytree.tree_unflatten(leaves, structure), tuple(returned)

    def _fresh(self, result: Tensor, others: Mapping[int, Tensor]) -> Tensor:
        """Return a tensor like a result, for the code outside of the block."""
        storage = result.untyped_storage()
        whole = storage.nbytes() == result.numel() * result.element_size()
        taken = {storage_of(self._objects[number]) for number in others}
        if not whole or storage_of(result) in taken or storage_of(result) in self._storages:
            raise NotEqual
        fresh = result.clone()
        if metadata_of(fresh) != metadata_of(result):
            raise NotEqual
        return fresh

    def _add_node(self, externals: list[Tensor], outputs: list[Tensor], index: int) -> None:
        if not outputs:
            raise NotEqual
        tracer = self._tracer
        slots: list[Any] = [get_proxy_slot(tensor, tracer) for tensor in externals]
        proxy = tracer.create_proxy(
            "call_function",
            torch.ops.penstock.equal_block.default,
            ([slot.proxy for slot in slots],),
            {},
            name=EQUAL,
        )
        track_tensor_tree(outputs, proxy, constant=None, tracer=tracer)
        proxy.node.meta[EQUAL] = index


def _equal_constants(recorded: Any, value: Any) -> bool:
    """Compare two constants of one type; 0.0 and -0.0 differ."""
    if isinstance(recorded, float):
        signs = math.copysign(1.0, recorded) == math.copysign(1.0, value)
        return recorded == value and signs
    if isinstance(recorded, complex):
        return repr(recorded) == repr(value)
    return bool(recorded == value)


def _filled(tree: Any, objects: Mapping[int, Tensor]) -> Any:
    if isinstance(tree, TensorRef):
        return objects[tree.number]
    if type(tree) in (tuple, list):
        return type(tree)(_filled(part, objects) for part in tree)
    return tree


def forget_escaped(first: FirstBlock) -> None:
    """Forget the reused results if the block that has just ended has changed or kept one of them.

    The next block then computes results of its own, so that it can see no trace of another block.
    """
    described = [metadata for call in first.calls for metadata in call.metadata]
    for place, metadata in enumerate(described):
        tensor = first.results[place]
        if tensor is not None and (_is_kept(tensor) or metadata_of(tensor) != metadata):
            first.results = []
            return


def _is_kept(result: Tensor) -> bool:
    """Return whether more than this module refers to a result."""
    tensor: Any = result
    # All references from C++, of which PyTorch's autograd graph has some, count as one.
    inside = 1 if hasattr(tensor, "_use_count") and tensor._use_count() > 1 else 0
    del tensor
    # The list and the dict of the reused results, the caller, `result`, and getrefcount.
    return sys.getrefcount(result) - inside > 5
