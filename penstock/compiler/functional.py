"""Replaces in-place writes by new values, so that a graph can be cut into stages.

A stage may not write its inputs, and a value that crosses stages shares no memory with another
value. PyTorch's own functionalisation, which `torch.export` also uses, replaces the writes: the
graph runs once more, before autograd, and every view of a written tensor is recreated from that
tensor. Composite operators (a linear layer, attention) are kept.

Functionalisation preserves values, but autograd must also find the same history in the new graph.
The graph therefore first runs on fake tensors with autograd on, and two kinds of writes are
rejected: a write to a tensor that lives longer than a step, and a write that autograd does not see
to a tensor that needs a gradient.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.compiler.capture import Capture, refused_buffer_write
from penstock.compiler.nodes import insert_call, source_line
from penstock.compiler.regions import detach_read, detach_reads, records_gradients
from penstock.compiler.strides import index_instead_of_strides, refuse_strides_of_others
from penstock.compiler.tensors import storage_of, tensors_in
from penstock.compiler.unsupported import first_line
from penstock.errors import CompileError

aten = torch.ops.aten


# These return views of real tensors and copies of fake ones.
_VIEWS_NOT_FOLLOWED = {
    aten.broadcast_tensors.default,
    aten.meshgrid.default,
    aten.meshgrid.indexing,
}


def functionalise(captured: Capture) -> Capture:
    """Return the capture with every in-place write replaced, and detached reads made explicit.

    **Raises:** `CompileError` naming the weight, buffer or attribute that the forward writes, or
    the line whose write autograd does not see.
    """
    graph = captured.graph
    refuse_strides_of_others(graph)
    if not any(writes(node) for node in graph.nodes):
        index_instead_of_strides(graph)
        detach_reads(graph, captured.weights)
        return captured
    run = _EagerRun(captured)
    run.run()
    for reader, source in run.detached_reads:
        detach_read(graph, reader, source)
    _drop_in_place_detaches(graph, run.detached)
    return replace(captured, graph=_retraced(graph))


def without_writes(joint: fx.Graph) -> fx.Graph:
    """Return a graph with the same function, in operators without writes, for a graph that autograd
    has been traced into.

    Operators that autograd runs write in place inside, also through views: the derivative of `rfft`
    fills a part of zeros. Only the writes that a result depends on by its arguments would stay in a
    part of the graph.

    **Raises:** `CompileError` if PyTorch cannot replace a write.
    """
    if not any(writes(node) for node in joint.nodes):
        return joint
    values = [node.meta["val"] for node in joint.find_nodes(op="placeholder")]

    def run(*given: torch.Tensor) -> list[Any]:
        return _replayed(joint, given, FunctionalTensorMode())

    with values[0].fake_mode, torch.no_grad(), _explained(joint):
        return make_fx(run)(*values).graph


def writes(node: fx.Node) -> bool:
    """Return whether a node is an operator that writes one of its arguments."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


class _EagerRun(fx.Interpreter):
    """Runs a graph on fake tensors with autograd on, and checks every write.

    `detached_reads` are pairs (reader, source) of a reader under `torch.no_grad()` and a source
    that needs a gradient. `detached` are the nodes that `detach_` has cut off from a gradient.
    """

    def __init__(self, captured: Capture) -> None:
        super().__init__(nn.Module(), garbage_collect_values=False, graph=captured.graph)
        self.extra_traceback = False  # our errors need no traceback of the graph
        self.detached_reads: list[tuple[fx.Node, fx.Node]] = []
        self.detached: set[fx.Node] = set()
        self._captured = captured
        self._aliases: dict[int, list[torch.Tensor]] = {}  # by storage; keeps the tensors alive
        # By storage, nodes whose operator returns a view without declaring it in its schema, such
        # as `einsum`: functionalisation treats the results as separate tensors.
        self._unannounced: dict[int, fx.Node] = {}
        self._owners: dict[int, str] = {}  # name of the placeholder, by storage

    def run(self) -> None:  # type: ignore[override]
        """Run the graph on its placeholders' fake tensors."""
        placeholders = self.graph.find_nodes(op="placeholder")
        with placeholders[0].meta["val"].fake_mode, torch.enable_grad(), _explained(self.graph):
            super().run(*(self._leaf(node) for node in placeholders), enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and reject its write if it cannot be preserved."""
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        args, kwargs = self._arguments(n)
        if n.target is aten.detach_.default:
            result = self._detach(n, args[0])
        else:
            written = list(_written(n, args, kwargs))
            for tensor in written:
                if storage_of(tensor) in self._owners:
                    raise _refused_write(n, self._owners[storage_of(tensor)], self._captured)
                if storage_of(tensor) in self._unannounced:
                    raise _refused_view(self._unannounced[storage_of(tensor)], n)
            result = n.target(*args, **kwargs)  # type: ignore[operator]
            for tensor in written:
                self._refuse_unseen(n, tensor)
        storages = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        if n.target in _VIEWS_NOT_FOLLOWED:
            self._unannounced.update(dict.fromkeys(storages, n))
        for tensor in tensors_in(result):
            if storage_of(tensor) in storages and not _announces_views(n):
                self._unannounced[storage_of(tensor)] = n
            self._aliases.setdefault(storage_of(tensor), []).append(tensor)
        if n.target is torch.ops.penstock.custom_gradient.default:
            # To its caller, a custom function returns the result of its forward, which may be a
            # view.
            for made, returned in zip(args[1], result, strict=True):
                self._aliases[storage_of(made)].append(returned)
        return result

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a node's arguments, detached if the node records no gradients."""
        blind = not records_gradients(node) and node.target is not operator.getitem

        def value(source: fx.Node) -> Any:
            found = self.env[source]
            if blind and isinstance(found, torch.Tensor) and found.requires_grad:
                self.detached_reads.append((node, source))
                return found.detach()
            return found

        return fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)

    def _detach(self, node: fx.Node, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        self.detached.add(node)
        return tensor.detach()

    def _leaf(self, node: fx.Node) -> torch.Tensor:
        leaf = node.meta["val"].detach().clone()
        leaf.requires_grad_(node.name in self._captured.differentiable)
        if node.name not in self._captured.inputs:
            self._owners[storage_of(leaf)] = node.name
        self._aliases[storage_of(leaf)] = [leaf]
        return leaf

    def _refuse_unseen(self, node: fx.Node, written: torch.Tensor) -> None:
        """Reject a write that changes the value of a tensor but not that tensor's history.

        A tensor and its views share one history; a detached view of it has another.
        """
        for alias in self._aliases.get(storage_of(written), ()):
            if _history(alias) is _history(written):
                continue
            if alias.requires_grad or written.requires_grad:
                raise CompileError(
                    f"{source_line(node)} writes in place ({node.target}) to a tensor that needs "
                    "a gradient, through a detached view of it or under torch.no_grad(): autograd "
                    "does not see that write. Write to a copy (.clone()), or let autograd see it."
                )


def _written(
    node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes, according to its schema."""
    if not writes(node):
        return
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def _announces_views(node: fx.Node) -> bool:
    """Return whether a node's results may share memory with its arguments, according to its
    schema."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # operator.getitem, which returns a tensor of a tuple
    return any(argument.alias_info is not None for argument in target._schema.arguments)


def _refused_write(node: fx.Node, placeholder: str, captured: Capture) -> CompileError:
    if placeholder in captured.buffers:
        return refused_buffer_write(captured.buffers[placeholder])
    if placeholder in captured.weights:
        return CompileError(
            f"{source_line(node)} writes the weight {captured.weights[placeholder]!r} in place "
            f"({node.target}): only the optimizer changes weights. Write to a copy (.clone()), or "
            "remove the option that renormalises the weight (max_norm)."
        )
    return CompileError(
        f"{source_line(node)} writes a tensor in place ({node.target}) that exists before the "
        "forward begins (an attribute of a module, a global): an engine keeps no state between "
        "steps, so a replayed step would differ. Write to a copy (.clone())."
    )


def _refused_view(view: fx.Node, write: fx.Node) -> CompileError:
    return CompileError(
        f"{source_line(view)} makes a view ({view.target}) of a tensor that is written in place "
        f"later ({write.target}), and the write cannot be followed through that view: copy one of "
        "the two (.clone())."
    )


def _drop_in_place_detaches(graph: fx.Graph, detached: set[fx.Node]) -> None:
    """Replace `detach_` by an ordinary detach if it cuts off a gradient, and remove it
    otherwise."""
    for node in graph.find_nodes(op="call_function", target=aten.detach_.default):
        if node in detached:
            node.target = aten.detach.default
        else:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


@contextmanager
def _explained(graph: fx.Graph) -> Iterator[None]:
    """Convert errors of the body into a `CompileError`."""
    try:
        yield
    except CompileError:
        raise
    except Exception as error:  # any PyTorch error about the user's write must be explained
        first = next(node for node in graph.nodes if writes(node))
        reason = first_line(error)
        raise CompileError(
            f"{source_line(first)} writes in place ({first.target}), and the writes of this "
            f"forward cannot be replaced: {reason}. Use the operators' functional forms."
        ) from error


def _retraced(graph: fx.Graph) -> fx.Graph:
    """Return a graph with the same function, in operators without writes."""
    placeholders = graph.find_nodes(op="placeholder")
    functionalise_key = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)

    def run(*values: torch.Tensor) -> list[Any]:
        with torch._C._ExcludeDispatchKeyGuard(functionalise_key):
            mode = FunctionalTensorMode(pre_dispatch=True, export=True)
            return _replayed(graph, values, mode)

    values = [node.meta["val"] for node in placeholders]
    preserved = traceback.preserve_node_meta()
    with values[0].fake_mode, torch.no_grad(), preserved, _explained(graph):
        new = make_fx(run, pre_dispatch=True)(*values).graph
    refuse_strides_of_others(new)  # as_strided may be part of another operator
    for node, before in zip(new.find_nodes(op="placeholder"), placeholders, strict=True):
        node.name, node.target, node.meta = before.name, before.target, dict(before.meta)
    for node in new.find_nodes(op="call_function", target=aten.copy.default):
        _make_copy_differentiable(new, node)
    for node in new.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # strides may differ after the graph is cut
    index_instead_of_strides(new)
    new.eliminate_dead_code()
    return new


def _replayed(
    graph: fx.Graph, values: Sequence[torch.Tensor], mode: FunctionalTensorMode
) -> list[Any]:
    """Run a graph; PyTorch replaces its writes under `mode`."""
    replay = fx.Interpreter(nn.Module(), graph=graph)
    replay.extra_traceback = False
    with mode:
        given = [FunctionalTensor.to_functional(value) for value in values]
        results = replay.run(*given, enable_io_processing=False)
        return [_plain(result) for result in results]


def _make_copy_differentiable(graph: fx.Graph, copy: fx.Node) -> None:
    """Write `copy(to, source)`, whose derivative autograd does not know, with differentiable
    operators."""
    to, source = copy.args[:2]
    assert isinstance(to, fx.Node)
    assert isinstance(source, fx.Node)
    like = to.meta["val"]
    with graph.inserting_before(copy):
        value = insert_call(graph, copy, aten.to.dtype, (source, like.dtype))
        value = insert_call(graph, copy, aten.expand.default, (value, list(like.shape)))
        if like.is_contiguous():
            options = {"memory_format": torch.contiguous_format}
            value = insert_call(graph, copy, aten.clone.default, (value,), options)
        else:  # the result has the strides of `to`
            value = insert_call(graph, copy, aten.slice_scatter.default, (to, value))
    copy.replace_all_uses_with(value)
    graph.erase_node(copy)


def _plain(result: Any) -> Any:
    if not isinstance(result, FunctionalTensor):
        return result
    torch._sync(result)
    return torch._from_functional_tensor(result.elem)


def _history(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose autograd history a view belongs to."""
    base = tensor._base
    return tensor if base is None else base
