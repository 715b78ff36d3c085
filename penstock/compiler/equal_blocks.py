"""Equal blocks of a model are traced once: later blocks are compared with the first.

An export spends most of its time on describing the results of operators and on recording nodes. A
model of many equal blocks repeats both for every block. Here the first block of a kind is traced as
usual, and its operator calls are recorded. The Python code of every further block still runs, so no
assumption is made about it. Its operator calls are only compared with the record: the operator, the
constants, which tensor each argument is, and the metadata of tensors from outside the block. The
calls return the results of one earlier block, and the graph gets one node for the block, which
`block_copies.py` replaces by copies of the first block's nodes.

Any difference raises `NotEqual`, and the model is captured again without its kind. Blocks that write
tensors in place, change the gradient mode or create constants are traced as usual.
"""

import itertools
import math
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor_tree
from torch.utils import _pytree as pytree

_FEWEST_BLOCKS = 3  # the second one is still computed, so that two would gain nothing
_FEWEST_CALLS = 8  # below, a node for the block and its copy cost as much as its operators
FIRST = "operator_of_block"  # meta key of a first block's node: its block and its call
EQUAL = "equal_block"  # meta key of the node of an equal block: its index in `BlockTracing.equal`
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


class NotEqual(Exception):
    """A block differs from the first one of its kind; the capture must begin again without it."""


@torch.library.custom_op("penstock::equal_block", mutates_args=())
def equal_block(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Stand for the operators of a block until they are copied; never run."""
    raise AssertionError("an equal block was not expanded")


@dataclass(frozen=True)
class TensorRef:
    """A tensor of a block: result `number`, or external tensor `~number` if it is negative."""

    number: int


@dataclass(frozen=True)
class Call:
    """An operator call of a block.

    Tensors in the arguments and results are `TensorRef`. `metadata` describes the results. `same`
    has, for each result, the number that this tensor object had before if the operator returned
    one of its arguments.
    """

    target: Any
    args: Any
    kwargs: Any
    results: Any
    metadata: tuple[Any, ...]
    same: tuple[int | None, ...]
    with_gradients: bool


@dataclass
class FirstBlock:
    """The record of the first block of a kind.

    `externals` describe the tensors from outside. `results` are the results of a later block, by
    number; the calls of all equal blocks return them.
    """

    index: int
    calls: list[Call] = field(default_factory=list)
    externals: list[tuple[Any, ...]] = field(default_factory=list)
    autocast: bool = False
    results: list[Tensor | None] = field(default_factory=list)


@dataclass(frozen=True)
class EqualBlock:
    """An equal block: its first block, and the numbers of the results that its node returns."""

    first: FirstBlock
    outputs: tuple[int, ...]


class BlockTracing:
    """The equal blocks of one capture.

    `first` are the records of first blocks, `equal` the blocks that were compared with them.
    """

    def __init__(self, module: nn.Module, excluded: Collection[Any] = ()) -> None:
        kinds = _kinds_of(module)
        self._kinds = {owner: kind for owner, kind in kinds.items() if kind not in excluded}
        self._records: dict[Any, FirstBlock | None] = {}
        self._run: _Run | None = None
        self._reused: dict[int, Tensor] = {}  # by id; the tensors are kept so that ids stay theirs
        self.first: list[FirstBlock] = []
        self.equal: list[EqualBlock] = []
        self.differing: set[Any] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context of an export whose equal blocks are compared instead of traced."""
        tracer: Any = proxy_tensor._ModuleStackTracer
        module: Any = proxy_tensor
        call_module, proxy_call = tracer.call_module, module.proxy_call

        def call_block(self: Any, owner: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            return call_module(self, owner, blocks._forward_of(self, owner, forward), args, kwargs)

        def call_operator(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
            run = blocks._run
            if run is None:
                blocks._refuse_reused(args, kwargs)
                return proxy_call(mode, func, pre_dispatch, args, kwargs)

            def trace() -> Any:
                blocks._run = None  # the inside of an operator is not part of the block
                try:
                    return proxy_call(mode, func, pre_dispatch, args, kwargs)
                finally:
                    blocks._run = run

            return run.call(mode, func, args, kwargs, trace)

        blocks = self
        tracer.call_module, module.proxy_call = call_block, call_operator
        try:
            yield
        finally:
            tracer.call_module, module.proxy_call = call_module, proxy_call
            self._run = None

    @property
    def kinds(self) -> set[Any]:
        """The kinds of blocks that may be equal."""
        return set(self._kinds.values())

    def require_equal(self) -> None:
        """Raise `NotEqual` if a block differed, even if the model's code caught that error."""
        if self.differing:
            raise NotEqual

    def _forward_of(self, tracer: Any, owner: nn.Module, forward: Any) -> Any:
        """Return the forward of a module, which may be that of a block."""
        kind = self._kinds.get(id(owner))
        if kind is None or self._run is not None or tracer.enable_attr_proxy:
            return forward
        if kind not in self._records:
            return lambda *args, **kwargs: self._record(kind, tracer, forward, args, kwargs)
        record = self._records[kind]
        if record is None:
            return forward
        return lambda *args, **kwargs: self._compare(kind, record, tracer, forward, args, kwargs)

    def _record(self, kind: Any, tracer: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        first = FirstBlock(len(self.first), autocast=_is_autocast_enabled())
        recording = self._run = _Recording(first, tracer)
        self._records[kind] = None
        try:
            outputs = forward(*args, **kwargs)
        finally:
            self._run = None
        if recording.is_usable():
            self._records[kind] = first
            self.first.append(first)
        return outputs

    def _compare(
        self, kind: Any, first: FirstBlock, tracer: Any, forward: Any, args: Any, kwargs: Any
    ) -> Any:
        if first.autocast != _is_autocast_enabled():
            return forward(*args, **kwargs)
        comparison = self._run = _Comparison(first, tracer)
        try:
            outputs = forward(*args, **kwargs)
            self._run = None
            outputs, numbers = comparison.finish(outputs, len(self.equal))
        except Exception:
            self.differing.add(kind)
            raise
        finally:
            self._run = None
        self.equal.append(EqualBlock(first, numbers))
        self._reused.update((id(t), t) for t in first.results if t is not None)
        del comparison
        _forget_escaped(first)
        return outputs

    def _refuse_reused(self, args: Any, kwargs: Any) -> None:
        """Refuse results that left their block in another way than being returned."""
        if self._reused and any(id(t) in self._reused for t in _tensors((args, kwargs))):
            self.differing.update(self._records)
            raise NotEqual


class _Run:
    """The calls of a block while its forward runs.

    `number` of a tensor: results of the block in the order of its calls, `~place` for the external
    tensors in the order in which the block reads them.
    """

    def __init__(self, first: FirstBlock, tracer: Any) -> None:
        self._first, self._tracer = first, tracer
        self._externals = 0
        self._storages: dict[int, int] = {}  # the first external tensor in each storage
        self._count = 0  # of results
        self._last = _last_node(tracer)

    def call(self, mode: Any, func: Any, args: Any, kwargs: Any, trace: Callable[[], Any]) -> Any:
        """Return the results of an operator."""
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
        return *_metadata(tensor), self._storages.setdefault(_storage(tensor), place)


class _Recording(_Run):
    """The first block: its calls are traced and recorded.

    Tensors are known by their nodes. A reference to a tensor would change what PyTorch does: the
    result of `torch.full` is copied if anything else refers to it.
    """

    def __init__(self, first: FirstBlock, tracer: Any) -> None:
        super().__init__(first, tracer)
        self._refused = False
        self._numbers: dict[fx.Node, int] = {}

    def is_usable(self) -> bool:
        """Return whether the record describes every node of the block."""
        complete = _last_node(self._tracer) is self._last
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
            or next(_tensors((args, kwargs)), None) is None  # creates a tensor
            or func is torch.ops.aten.lift_fresh.default
            or not _REFUSED_TAGS.isdisjoint(func.tags)
            or _last_node(self._tracer) is not self._last
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
        nodes = _nodes_after(self._tracer, self._last)
        self._last = _last_node(self._tracer)
        made = nodes[0] if nodes else None
        if (
            made is None
            or made.target is not func
            or any(n.args[:1] != (made,) or n.target is not operator.getitem for n in nodes[1:])
        ):
            raise NotEqual
        made.meta[FIRST] = (self._first.index, len(self._first.calls))
        given = [ref.number for ref in tensor_refs(encoded)]
        arguments = list(_tensors((args, kwargs)))
        found = list(_tensors(results))
        same = tuple(
            next((n for a, n in zip(arguments, given, strict=True) if a is tensor), None)
            for tensor in found
        )
        count = itertools.count(self._count)
        tree = pytree.tree_map_only(Tensor, lambda _: TensorRef(next(count)), results)
        for number, tensor in enumerate(found, self._count):
            self._numbers[self._node(tensor)] = number
        self._count += len(found)
        metadata = tuple(map(_metadata, found))
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
        return slot.proxy.node  # type: ignore[no-any-return]


class _Comparison(_Run):
    """A later block: its calls are compared with those of the first, and none is traced."""

    def __init__(self, first: FirstBlock, tracer: Any) -> None:
        super().__init__(first, tracer)
        self._at = 0
        self._numbers: dict[int, int] = {}  # of the tensors seen so far, by id
        self._objects: dict[int, Tensor] = {}

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
        found = list(_tensors(results))
        same = tuple(self._numbers.get(id(tensor)) for tensor in found)
        if same != call.same or tuple(map(_metadata, found)) != call.metadata:
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
        if not complete or _last_node(self._tracer) is not self._last:
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
        taken = {_storage(self._objects[number]) for number in others}
        if not whole or _storage(result) in taken or _storage(result) in self._storages:
            raise NotEqual
        fresh = result.clone()
        if _metadata(fresh) != _metadata(result):
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


def _kinds_of(module: nn.Module) -> dict[int, Any]:
    """Return the kinds of the modules that may be equal blocks, by the modules' ids.

    Blocks of a kind have one parent, one class, weights and buffers of the same shapes, and equal
    flags and texts as attributes. Numbers are left out: many blocks know their own index.
    """
    kinds: dict[int, Any] = {}
    for path, parent in module.named_modules():
        groups: dict[Any, list[nn.Module]] = defaultdict(list)
        for child in parent.children():
            groups[type(child)].append(child)
        for children in groups.values():
            if len(children) < _FEWEST_BLOCKS:
                continue
            alike: dict[Any, list[nn.Module]] = defaultdict(list)
            for child in children:
                alike[path, _description(child)].append(child)
            for kind, members in alike.items():
                if len(members) >= _FEWEST_BLOCKS:
                    kinds.update((id(member), kind) for member in members)
    return kinds


def _description(block: nn.Module) -> tuple[Any, ...]:
    parts: list[Any] = []
    for path, owner in block.named_modules():
        attributes = tuple(
            (name, value) for name, value in vars(owner).items() if type(value) in (bool, str)
        )
        tensors = tuple(
            (name, tuple(value.shape), value.dtype, value.requires_grad)
            for held in (owner._parameters, owner._buffers)
            for name, value in held.items()
            if value is not None
        )
        parts.append((path, type(owner), attributes, tensors))
    return tuple(parts)


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a shape rule or the model's code can read of a tensor without data."""
    return (
        type(tensor) is FakeTensor,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def tensor_refs(tree: Any) -> Iterator[TensorRef]:
    """Yield the tensors in the arguments or results of a call, in their order."""
    if isinstance(tree, TensorRef):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from tensor_refs(part)
    elif isinstance(tree, dict):
        yield from tensor_refs(tuple(tree.values()))


def _forget_escaped(first: FirstBlock) -> None:
    """Forget the reused results if one of them is still referenced after its block has ended.

    The model may have kept it. The next block then computes results of its own, so that a kept
    tensor and one of its own are never the same object.
    """
    results = first.results
    for place in range(len(results)):
        tensor = results[place]
        if tensor is None:
            continue
        inside = 1 if tensor._use_count() > 1 else 0  # the autograd graph, through C++
        # The two containers, `tensor`, and the argument of getrefcount.
        if sys.getrefcount(tensor) - inside > 4:
            first.results = []
            return


def _is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _last_node(tracer: Any) -> fx.Node | None:
    return next(reversed(tracer.graph.nodes), None)


def _nodes_after(tracer: Any, last: fx.Node | None) -> list[fx.Node]:
    nodes = list(itertools.takewhile(lambda n: n is not last, reversed(tracer.graph.nodes)))
    return nodes[::-1]
