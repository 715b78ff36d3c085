"""Finds the blocks of a model while it is exported."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import proxy_tensor
from torch.nn.parameter import is_lazy

from penstock.compiler.equal_blocks.calls import BlockCalls
from penstock.compiler.equal_blocks.comparison import BlockComparison
from penstock.compiler.equal_blocks.recording import BlockRecording
from penstock.compiler.equal_blocks.records import BlockRecord, EqualBlock, is_autocast_enabled
from penstock.compiler.equal_blocks.reused_results import ReusedResults

FEWEST_BLOCKS = 3  # the results of the second are computed, so that two would gain nothing


@dataclass(eq=False)
class _BlockGroup:
    """Blocks that may be equal.

    `record` is that of the first block, once it has run. If it cannot be compared with others,
    `is_traced` is true, and every block of the group is traced.
    """

    record: BlockRecord | None = None
    reused: ReusedResults = field(default_factory=ReusedResults)
    is_traced: bool = False


class BlockTracing:
    """The equal blocks of one export; `equal` are those that were not traced."""

    def __init__(self, module: nn.Module) -> None:
        self._groups = _block_groups(module)
        self._thread = threading.get_ident()
        self._calls: BlockCalls | None = None  # of the block that is running
        self._records = 0
        self.equal: list[EqualBlock] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context of an export whose equal blocks are compared instead of traced."""
        tracer: Any = proxy_tensor._ModuleStackTracer
        module: Any = proxy_tensor
        call_module, create_node = tracer.call_module, tracer.create_node
        proxy_call = module.proxy_call

        def call_block(self: Any, owner: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            group = blocks._group_of(self, owner)
            if group is None:
                return call_module(self, owner, forward, args, kwargs)

            # Not `forward`: a line of a function of that name is one of the model's code.
            def run_block(*args: Any, **kwargs: Any) -> Any:
                return blocks._run(group, owner, self, lambda: forward(*args, **kwargs))

            return call_module(self, owner, run_block, args, kwargs)

        def call_operator(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
            def trace() -> Any:
                with blocks._outside():  # the inside of an operator is not part of the block
                    return proxy_call(mode, func, pre_dispatch, args, kwargs)

            calls = blocks._calls
            if calls is None or threading.get_ident() != blocks._thread:
                return proxy_call(mode, func, pre_dispatch, args, kwargs)
            return calls.call(mode, func, args, kwargs, trace)

        def create(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == blocks._thread:
                blocks.trace_running_block()  # a node that no operator call makes
            return create_node(self, *args, **kwargs)

        blocks = self
        tracer.call_module, tracer.create_node = call_block, create
        module.proxy_call = call_operator
        try:
            yield
        finally:
            tracer.call_module, tracer.create_node = call_module, create_node
            module.proxy_call = proxy_call
            self._calls = None

    @contextmanager
    def _outside(self) -> Iterator[None]:
        calls, self._calls = self._calls, None
        try:
            yield
        finally:
            self._calls = calls

    def trace_running_block(self) -> None:
        """Trace a block that is being compared from here on, so that the graph is complete."""
        if isinstance(self._calls, BlockComparison) and self._calls.is_equal:
            self._calls.trace_from_here()

    def _group_of(self, tracer: Any, owner: nn.Module) -> _BlockGroup | None:
        """Return the group of a module if it is a block that is recorded or compared."""
        group = self._groups.get(id(owner))
        if (
            group is None
            or group.is_traced
            or self._calls is not None
            or tracer.enable_attr_proxy
            or threading.get_ident() != self._thread
        ):
            return None
        return group

    def _run(
        self, group: _BlockGroup, owner: nn.Module, tracer: Any, forward: Callable[[], Any]
    ) -> Any:
        """Run the forward of a block."""
        if next(reversed(tracer.module_stack)) != tracer.path_of_module(owner):
            return forward()  # called again, or as a part of a compiled module
        if not torch.is_grad_enabled():
            # The nodes of a region without gradients, or of a custom function, have marks.
            return forward()
        if group.record is None:
            return self._record(group, tracer, forward)
        if group.record.autocast != is_autocast_enabled():
            return forward()
        return self._compare(group, group.record, tracer, forward)

    def _record(self, group: _BlockGroup, tracer: Any, forward: Callable[[], Any]) -> Any:
        record = BlockRecord(self._records, is_autocast_enabled())
        self._records += 1
        recording = self._calls = BlockRecording(record, tracer)
        try:
            outputs = forward()
        finally:
            self._calls = None
        group.is_traced = not recording.is_usable()
        group.record = None if group.is_traced else record
        return outputs

    def _compare(
        self, group: _BlockGroup, record: BlockRecord, tracer: Any, forward: Callable[[], Any]
    ) -> Any:
        comparison = self._calls = BlockComparison(record, group.reused, tracer)
        try:
            outputs = forward()
        except BaseException:
            self._calls = None
            if comparison.is_equal:
                comparison.trace_from_here()
            raise
        self._calls = None
        returned = comparison.finish(outputs, len(self.equal))
        if returned is not None:
            self.equal.append(EqualBlock(record, returned))
        elif not any(block.record is record for block in self.equal):
            # The first block was the odd one, perhaps because its input needs no gradient.
            group.record, group.reused = None, ReusedResults()
        return outputs


def _block_groups(module: nn.Module) -> dict[int, _BlockGroup]:
    """Return the groups of the modules that may be equal blocks, by the modules' ids.

    Blocks of a group have one parent, one class, weights and buffers of the same shapes, and equal
    flags and texts as attributes. Numbers are left out: many blocks know their own index.
    """
    groups: dict[int, _BlockGroup] = {}
    for parent in module.modules():
        classes: dict[type, list[nn.Module]] = defaultdict(list)
        for child in parent.children():
            classes[type(child)].append(child)
        for children in classes.values():
            if len(children) < FEWEST_BLOCKS:
                continue
            alike: dict[Any, list[nn.Module]] = defaultdict(list)
            for child in children:
                alike[_description(child)].append(child)
            for members in alike.values():
                if len(members) >= FEWEST_BLOCKS:
                    group = _BlockGroup()
                    groups.update((id(member), group) for member in members)
    return groups


def _description(block: nn.Module) -> tuple[Any, ...]:
    parts: list[Any] = []
    for path, owner in block.named_modules():
        attributes = tuple(
            (name, value) for name, value in vars(owner).items() if type(value) in (bool, str)
        )
        tensors = tuple(
            (name, value.dtype, None if is_lazy(value) else tuple(value.shape), value.requires_grad)
            for held in (owner._parameters, owner._buffers)
            for name, value in held.items()
            if value is not None
        )
        parts.append((path, type(owner), attributes, tensors))
    return tuple(parts)
