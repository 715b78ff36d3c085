"""Trace a stage's forward and its derivative into one graph, over fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.compiler.functional import without_writes
from penstock.compiler.matmul_backend import choose_products
from penstock.compiler.nodes import source_line
from penstock.compiler.product_libraries import Products
from penstock.compiler.tensors import storage_of
from penstock.compiler.unsupported import advice_on, first_line
from penstock.errors import CompileError, PenstockError
from penstock.program import SparseUse, TensorSpec

aten = torch.ops.aten


@dataclass(frozen=True)
class StageSignature:
    """The inputs of a stage's graph: weights, then inputs, then the dropout key.

    `sparse` are the sparse weights by position. `one_token` is whether the graph is one of
    incremental decoding. `repr` omits both, so that other kinds have the digests that they always
    had.
    """

    weights: tuple[TensorSpec, ...]
    trainable: tuple[bool, ...]
    inputs: tuple[TensorSpec, ...]
    inputs_grad: tuple[bool, ...]
    sparse: tuple[tuple[int, SparseUse], ...] = field(default=(), repr=False)
    one_token: bool = field(default=False, repr=False)

    @property
    def lines(self) -> list[str]:
        """The signature as text, for a digest."""
        sparse = (f"sparse {place} {use.capacity}" for place, use in self.sparse)
        return [repr(self), *sparse, *(["one token"] if self.one_token else [])]


def trace_joint(
    graph: fx.Graph, signature: StageSignature, device: str, products: Products
) -> tuple[fx.Graph, list[TensorSpec], list[bool]]:
    """Return the joint graph (*weights, *inputs, key, *tangents) -> (*outputs, *gradients)."""
    interpreter = _Interpreter(graph)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    grads = (*signature.trainable, *signature.inputs_grad)

    def leaves(flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t.detach().requires_grad_(g) for t, g in zip(flat, grads, strict=True)]

    with mode, _without_cudnn_attention():
        flat = [
            torch.empty(spec.shape, dtype=spec.dtype, device=device)
            for spec in (*signature.weights, *signature.inputs)
        ]
        key = torch.empty(2, dtype=torch.int64)  # stays on the host: it is read as numbers
        with torch.enable_grad():
            outs = _dense(interpreter.run(*leaves(flat), key))
        outputs = [TensorSpec(tuple(o.shape), o.dtype) for o in outs]
        outputs_grad = _take_gradients(outs, signature)
        tangents = [
            torch.empty(o.shape, dtype=o.dtype, device=device)
            for o, takes in zip(outs, outputs_grad, strict=True)
            if takes
        ]

        def joint(*args: torch.Tensor) -> tuple[Any, ...]:
            given = leaves(args[: len(flat)])
            with torch.enable_grad():
                results = _dense(interpreter.run(*given, args[len(flat)]))
                results = _off_weights(results, given[: len(signature.weights)])
            wanted = [t for t, g in zip(given, grads, strict=True) if g]
            roots = [r for r in results if r.requires_grad]
            found: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if roots and wanted:
                found = _gradients(roots, wanted, list(args[len(flat) + 1 :]))
            weight_grads = found[: sum(signature.trainable)]
            input_grads = found[sum(signature.trainable) :]
            others = [*args, *results, *input_grads]
            return (*results, *_dense(input_grads), *_own(_dense(weight_grads), others))

        traced = without_writes(make_fx(joint)(*flat, key, *tangents).graph)
    leave_device_open(traced)
    _simplify(traced)
    choose_products(traced, products, one_token=signature.one_token)
    return traced, outputs, outputs_grad


def _take_gradients(outs: Sequence[torch.Tensor], signature: StageSignature) -> list[bool]:
    """Return which outputs of a stage take a gradient.

    A stage with trained weights sends gradients in every step. If all its outputs are detached, the
    smallest one takes a gradient that nothing reads, and the stage sends None for each weight.
    """
    found = [o.requires_grad for o in outs]
    if any(signature.trainable) and not any(found):
        sizes = [o.numel() for o in outs]
        found[sizes.index(min(sizes))] = True
    return found


class _Interpreter(fx.Interpreter):
    """Runs a graph; an operator that fails is named with its source in the user's code."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except PenstockError:
            raise
        except Exception as error:  # any error of an operator must be explained
            raise CompileError(
                f"{source_line(n)} calls {n.target}, which cannot be traced with its derivative: "
                f"{first_line(error)}. {advice_on(error)}"
            ) from error


def _gradients(
    roots: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tangents: list[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    try:
        return torch.autograd.grad(roots, wanted, tangents, allow_unused=True)
    except (NotImplementedError, RuntimeError) as error:
        raise CompileError(
            f"PyTorch has no derivative for an operator of the model: {first_line(error)}. Compute "
            "the result from tensors that need no gradient (.detach()), or write it with other "
            "operators."
        ) from error


@contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    """Let PyTorch choose another attention than cuDNN's, whose backward has no fixed order of
    sums."""
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def leave_device_open(graph: fx.Graph) -> None:
    """Replace the traced device by the current device in nodes that create tensors.

    One kind then serves all devices of its type on a host.
    """

    def opened(value: Any) -> Any:
        is_one = isinstance(value, torch.device) and value.index is not None
        return torch.device(value.type) if is_one else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, opened)
        node.kwargs = fx.node.map_aggregate(node.kwargs, opened)


def _dense(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return contiguous tensors: a value that crosses stages is traced there by its shape alone."""
    return [None if t is None else t.contiguous() for t in tensors]


def _off_weights(results: Sequence[Any], weights: Sequence[torch.Tensor]) -> list[Any]:
    """Return results that are not views of a weight, which is gone when the next stage reads
    them."""
    weight_storages = {storage_of(weight) for weight in weights}
    return [r.clone() if storage_of(r) in weight_storages else r for r in results]


def _own(
    gradients: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return gradients that share no memory: micro-batches add to them in place."""
    taken = {storage_of(t) for t in others if t is not None}
    owned: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is not None and storage_of(gradient) in taken:
            gradient = gradient.clone()
        if gradient is not None:
            taken.add(storage_of(gradient))
        owned.append(gradient)
    return owned


_IDENTITIES = {aten.detach.default, aten.alias.default}


def _simplify(graph: fx.Graph) -> None:
    """Remove nodes that change no value: detaches, views to the same shape, contiguous on
    contiguous."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        same_shape = (
            node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default)
            and isinstance(source, fx.Node)
            and source.meta["val"].shape == node.meta["val"].shape
            and source.meta["val"].stride() == node.meta["val"].stride()
        )
        if node.target in _IDENTITIES or same_shape:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()
