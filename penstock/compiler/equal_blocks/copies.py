"""Replaces the nodes of equal blocks by copies of the first block's nodes.

A copy has the operator and the constants of its original, the tensors of its own block, and the
metadata that tracing it would have given: fake results that share memory as the originals' do, and
the path of its own module.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from penstock.compiler.equal_blocks.records import (
    EQUAL,
    FIRST,
    Call,
    EqualBlock,
    NotEqual,
    TensorRef,
    storage_of,
    tensor_refs,
    tensors_in,
)
from penstock.compiler.equal_blocks.tracing import BlockTracing

_CHECK = torch.ops.aten._assert_tensor_metadata.default


def expand_equal_blocks(graph: fx.Graph, blocks: BlockTracing) -> None:
    """Replace every node of an equal block by copies of the first block's nodes, in place.

    Raises:
        NotEqual: the export has changed the first block's nodes.
    """
    if not blocks.equal:
        return
    originals = {node.meta[FIRST]: node for node in graph.nodes if FIRST in node.meta}
    for node in list(graph.nodes):
        if EQUAL in node.meta:
            _Expansion(graph, node, blocks.equal[node.meta[EQUAL]], originals).expand()


class _Expansion:
    """The copies of a block's nodes, in the place of its node `whole`."""

    def __init__(
        self,
        graph: fx.Graph,
        whole: fx.Node,
        block: EqualBlock,
        originals: dict[tuple[int, int], fx.Node],
    ) -> None:
        self._graph, self._whole, self._block = graph, whole, block
        self._originals = originals
        self._sources: dict[int, fx.Node] = {}  # nodes of the first block, by tensor number
        self._copies: dict[int, fx.Node] = {}  # nodes of this block
        self._storages: dict[int, Any] = {}  # of this block, by those of the first
        self._outputs: dict[int, fx.Node] = {}
        for user in whole.users:
            if user.target is not operator.getitem:
                raise NotEqual
            self._outputs[block.outputs[int(user.args[1])]] = user  # type: ignore[arg-type]
        for place, given in enumerate(whole.args[0]):  # type: ignore[arg-type]
            self._copies[~place] = given

    def expand(self) -> None:
        """Insert the copies, let readers of the block's node read them, and erase the node."""
        absent = []
        with self._graph.inserting_before(self._whole):
            for place, call in enumerate(self._block.first.calls):
                original = self._originals.get((self._block.first.index, place))
                if original is None or original.target is not call.target:
                    raise NotEqual
                absent += self._copy(call, original)
        for number, user in self._outputs.items():
            user.replace_all_uses_with(self._copies[number])
            self._graph.erase_node(user)
        self._graph.erase_node(self._whole)
        for node in absent:
            if not node.users:
                self._graph.erase_node(node)

    def _copy(self, call: Call, original: fx.Node) -> list[fx.Node]:
        """Copy a node and the nodes that take its results apart; return those without original."""
        numbers = (ref.number for ref in tensor_refs((call.args, call.kwargs)))

        def own(node: fx.Node) -> fx.Node:
            number = next(numbers, None)
            if number is None or self._source(number, node) is not node:
                raise NotEqual
            return self._copies[number]

        args = fx.node.map_arg(original.args, own)
        kwargs = fx.node.map_arg(original.kwargs, own)
        if next(numbers, None) is not None:
            raise NotEqual
        self._copy_check(original, args)
        made = self._graph.create_node(
            "call_function", original.target, args, kwargs, original.name
        )
        results = [ref.number for ref in tensor_refs(call.results)]
        self._take_storages(results, original)
        self._describe(made, original)
        if isinstance(call.results, TensorRef):
            self._sources[results[0]], self._copies[results[0]] = original, made
            return []
        sources = {user.args[1]: user for user in original.users if _is_part(user, original)}
        absent = []
        for place, part in enumerate(call.results):
            if part is not None:
                source = sources.get(place)
                own_part = self._part(place, part.number, made, source)
                absent += [own_part] if source is None else []
        return absent

    def _copy_check(self, original: fx.Node, args: tuple[Any, ...]) -> None:
        """Copy the check that the export has put in front of a conversion."""
        check = original.prev
        if check.target is not _CHECK or FIRST in check.meta:
            return
        if check.args != original.args[:1]:
            raise NotEqual
        made = self._graph.create_node(
            "call_function", _CHECK, args[:1], dict(check.kwargs), check.name
        )
        made.meta = {**check.meta, "nn_module_stack": self._module_stack(original)}

    def _part(self, place: int, number: int, made: fx.Node, source: fx.Node | None) -> fx.Node:
        """Add the node that takes one result of an operator."""
        part = self._graph.create_node("call_function", operator.getitem, (made, place), {})
        part.meta = {**made.meta, "val": made.meta["val"][place]}
        if source is not None:
            self._sources[number] = source
        self._copies[number] = part
        return part

    def _source(self, number: int, node: fx.Node) -> fx.Node | None:
        """Return the first block's node of a tensor; an external one is `node`, first read here."""
        if number < 0 and number not in self._sources:
            self._sources[number] = node
            self._pair(node.meta["val"], self._copies[number].meta["val"])
        return self._sources.get(number)

    def _take_storages(self, numbers: list[int], original: fx.Node) -> None:
        """Give the results that leave the block the memory that the code outside has seen."""
        for number, value in zip(numbers, tensors_in(original.meta["val"]), strict=True):
            if number in self._outputs:
                self._pair(value, self._outputs[number].meta["val"])

    def _pair(self, source: Any, own: Any) -> None:
        if isinstance(source, Tensor) and isinstance(own, Tensor):
            self._storages.setdefault(storage_of(source), own.untyped_storage())

    def _describe(self, made: fx.Node, original: fx.Node) -> None:
        meta = {key: value for key, value in original.meta.items() if key != FIRST}
        meta["val"] = self._values(original.meta["val"])
        meta["nn_module_stack"] = self._module_stack(original)
        made.meta = meta

    def _values(self, value: Any) -> Any:
        """Return fake tensors like the results of an operator of the first block."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._values, value))
        if not isinstance(value, FakeTensor):
            return value
        storage = self._storages.get(storage_of(value))
        if storage is None:
            size = value.untyped_storage().nbytes()
            storage = torch.UntypedStorage(size, device="meta")
            self._storages[storage_of(value)] = storage
        base = torch.empty(0, dtype=value.dtype, device="meta")
        base.set_(storage, value.storage_offset(), value.shape, value.stride())
        return FakeTensor(value.fake_mode, base, value.device)

    def _module_stack(self, original: fx.Node) -> dict[str, tuple[str, str]]:
        """Return the modules of a copy: those of the original, within this block."""
        stack: dict[str, tuple[str, str]] = dict(self._whole.meta["nn_module_stack"])
        inner = list(original.meta["nn_module_stack"].items())
        # Blocks of a kind have one parent, so the block itself is at one depth.
        first_key, (first_path, _) = inner[len(stack) - 1]
        key, (path, _) = list(stack.items())[-1]
        for below, (below_path, name) in inner[len(stack) :]:
            below_path = path + below_path.removeprefix(first_path)
            stack[key + below.removeprefix(first_key)] = (below_path, name)
        return stack


def _is_part(user: fx.Node, node: fx.Node) -> bool:
    return user.target is operator.getitem and user.args[0] is node
