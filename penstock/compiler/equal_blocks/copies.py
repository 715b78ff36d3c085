"""Replaces the nodes of equal blocks by copies of the first block's nodes.

A copy has the operator and the constants of its original, the tensors of its own block, and the
metadata that tracing it would have given: fake results that share memory as the originals' do, and
the path of its own module.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from penstock.compiler.equal_blocks.records import (
    BLOCK,
    CALL,
    EqualBlock,
    ExternalRef,
    OperatorCall,
    ResultRef,
    TensorRef,
    refs_in,
)
from penstock.compiler.equal_blocks.tracing import BlockTracing
from penstock.compiler.tensors import storage_of, tensors_in

_CHECK = torch.ops.aten._assert_tensor_metadata.default


def expand_equal_blocks(graph: fx.Graph, blocks: BlockTracing) -> None:
    """Replace every node of an equal block by copies of the first block's nodes, in place."""
    originals = {node.meta.pop(CALL): node for node in graph.nodes if CALL in node.meta}
    for node in list(graph.nodes):
        if BLOCK in node.meta:
            _Expansion(graph, node, blocks.equal[node.meta[BLOCK]], originals).expand()


class _Expansion:
    """The copies of a block's nodes, in the place of its node `block_node`.

    `_originals` are the nodes of the first block, `_copies` those of this one, by tensor.
    `_storages` has the memory of this block's results by the memory of the first block's.
    """

    def __init__(
        self,
        graph: fx.Graph,
        block_node: fx.Node,
        block: EqualBlock,
        call_nodes: Mapping[tuple[int, int], fx.Node],
    ) -> None:
        self._graph, self._block_node, self._record = graph, block_node, block.record
        self._call_nodes = call_nodes
        self._originals: dict[TensorRef, fx.Node] = {}
        self._copies: dict[TensorRef, fx.Node] = {}
        self._storages: dict[int, Any] = {}
        self._outputs: dict[TensorRef, fx.Node] = {}
        for user in block_node.users:
            assert user.target is operator.getitem
            self._outputs[block.outputs[int(user.args[1])]] = user  # type: ignore[arg-type]
        for number, given in enumerate(block_node.args[0]):  # type: ignore[arg-type]
            self._copies[ExternalRef(number)] = given

    def expand(self) -> None:
        """Insert the copies, let readers of the block's node read them, and erase the node."""
        originals = [
            self._call_nodes[self._record.index, place] for place in range(len(self._record.calls))
        ]
        calls = list(zip(self._record.calls, originals, strict=True))
        for call, original in calls:
            self._pair_storages(call, original)
        unread: list[fx.Node] = []
        with self._graph.inserting_before(self._block_node):
            for call, original in calls:
                unread += self._copy(call, original)
        for ref, user in self._outputs.items():
            user.replace_all_uses_with(self._copies[ref])
            self._graph.erase_node(user)
        self._graph.erase_node(self._block_node)
        for node in unread:
            if not node.users:
                self._graph.erase_node(node)

    def _pair_storages(self, call: OperatorCall, original: fx.Node) -> None:
        """Take the memory of the external tensors, and of results that code outside has seen."""
        refs = refs_in((call.args, call.kwargs))

        def pair(node: fx.Node) -> None:
            ref = next(refs)
            if isinstance(ref, ExternalRef) and ref not in self._originals:
                self._originals[ref] = node
                self._pair(node.meta["val"], self._copies[ref].meta["val"])

        fx.node.map_arg((original.args, original.kwargs), pair)
        values = tensors_in(original.meta["val"])
        for ref, value in zip(refs_in(call.results), values, strict=True):
            if ref in self._outputs:
                self._pair(value, self._outputs[ref].meta["val"])

    def _copy(self, call: OperatorCall, original: fx.Node) -> list[fx.Node]:
        """Copy a node and the nodes that take its results apart.

        Returns those of the latter that the first block has no more, since nothing read them.
        """
        refs = refs_in((call.args, call.kwargs))

        def own(node: fx.Node) -> fx.Node:
            ref = next(refs)
            assert self._originals[ref] is node
            return self._copies[ref]

        args = fx.node.map_arg(original.args, own)
        kwargs = fx.node.map_arg(original.kwargs, own)
        self._copy_check(call, original, args)
        copied = self._graph.create_node(
            "call_function", original.target, args, kwargs, original.name
        )
        copied.meta = {
            **original.meta,
            "val": self._copied_values(original.meta["val"]),
            "nn_module_stack": self._module_stack(call, original),
        }
        if isinstance(call.results, ResultRef):
            self._originals[call.results], self._copies[call.results] = original, copied
            return []
        return self._copy_items(call, original, copied)

    def _copy_items(self, call: OperatorCall, original: fx.Node, copied: fx.Node) -> list[fx.Node]:
        unread = []
        items = {n.args[1]: n for n in original.users if n.target is operator.getitem}
        for place, ref in enumerate(call.results):
            if ref is None:
                continue
            item = self._graph.create_node("call_function", operator.getitem, (copied, place), {})
            item.meta = {
                **items.get(place, copied).meta,
                "val": copied.meta["val"][place],
                "nn_module_stack": copied.meta["nn_module_stack"],
            }
            self._copies[ref] = item
            if place in items:
                self._originals[ref] = items[place]
            else:
                unread.append(item)
        return unread

    def _copy_check(self, call: OperatorCall, original: fx.Node, args: tuple[Any, ...]) -> None:
        """Copy the check that the export has put in front of a conversion."""
        check = original.prev
        if check.target is _CHECK and check.args == original.args[:1]:
            copied = self._graph.create_node(
                "call_function", _CHECK, args[:1], dict(check.kwargs), check.name
            )
            modules = self._module_stack(call, original)
            copied.meta = {**check.meta, "nn_module_stack": modules}

    def _pair(self, original: Any, own: Any) -> None:
        if isinstance(original, Tensor) and isinstance(own, Tensor):
            self._storages.setdefault(storage_of(original), own.untyped_storage())

    def _copied_values(self, value: Any) -> Any:
        """Return fake tensors like the results of an operator of the first block."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._copied_values, value))
        if not isinstance(value, FakeTensor):
            return value
        storage = self._storages.get(storage_of(value))
        if storage is None:
            storage = torch.UntypedStorage(value.untyped_storage().nbytes(), device="meta")
            self._storages[storage_of(value)] = storage
        base = torch.empty(0, dtype=value.dtype, device="meta")
        base.set_(storage, value.storage_offset(), value.shape, value.stride())
        return FakeTensor(value.fake_mode, base, value.device)

    def _module_stack(self, call: OperatorCall, original: fx.Node) -> dict[str, tuple[str, str]]:
        """Return the modules of a copy: this block, and below it those of the original."""
        stack: dict[str, tuple[str, str]] = dict(self._block_node.meta["nn_module_stack"])
        key, (path, _) = list(stack.items())[-1]
        names = list(original.meta["nn_module_stack"].values())
        for (below, below_path, _), (_, name) in zip(
            call.modules, names[len(names) - len(call.modules) :], strict=True
        ):
            stack[key + below] = (path + below_path, name)
        return stack
