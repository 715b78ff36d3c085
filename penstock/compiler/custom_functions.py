"""Trace the forward and the backward of every `torch.autograd.Function` that a model calls.

An export traces only the forward, so the backward of a custom function would be lost without an
error. Inside `custom_functions_traced`, a call runs the function's forward and then its backward on
the exporter's tensors, and marks both for `custom_gradients.py`. The surrounding work of PyTorch
(which outputs are differentiable, the attributes of `ctx`, which gradients are accepted) is done
here as in `torch/csrc/autograd/python_function.cpp`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function as autograd_function
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from penstock.compiler.custom_gradients import WITHIN_FUNCTION
from penstock.compiler.tensors import may_need_gradient
from penstock.compiler.unsupported import Unsupported

_ops = torch.ops.penstock
_Function = type[torch.autograd.Function]
# It keeps the arguments of a checkpoint with `use_reentrant=False`, in PyTorch 2.11. Without a
# gradient function of its result, the checkpoint keeps and recomputes nothing.
_KEEPS_ARGUMENTS: Any = getattr(checkpoint, "_NoopSaveInputs", None)


class Context(autograd_function.FunctionCtx):
    """The `ctx` of a traced call; the user may set attributes."""

    to_save: tuple[Tensor, ...] = ()
    dirty_tensors: tuple[Tensor, ...] = ()
    non_differentiable: tuple[Tensor, ...] = ()
    materialize_grads = True

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.to_save


@contextmanager
def custom_functions_traced(complete_graph: Callable[[], None]) -> Iterator[None]:
    """Context in which an export also traces the backward of custom functions.

    **Arguments:** `complete_graph` adds the nodes of all operator calls so far to the graph. The
    nodes of a function's code are those that come after it.
    """
    # `Function.apply` ends in that of its base class, even if a model bound it to a name of its own
    # (`round_through = RoundThrough.apply`) before.
    base: Any = autograd_function._SingleLevelFunction
    module: Any = autograd_function
    numbers = itertools.count()

    def apply(cls: _Function, *args: Any, **kwargs: Any) -> Any:
        # The inside of an operator is not traced, only the operator.
        if get_proxy_mode() is None or not torch.is_grad_enabled():
            return super(base, cls).apply(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            return _checkpointed(*args)
        if cls is _KEEPS_ARGUMENTS:
            return cls.forward(*args)
        if cls is BackwardHookFunction:
            raise Unsupported(
                "a backward hook of a module is active",
                "Remove it, or write what it does as a torch.autograd.Function.",
            )
        complete_graph()
        return _traced(cls, args, kwargs, numbers)

    transformed = module.custom_function_call

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is None:
            return transformed(*args, **kwargs)
        raise Unsupported(
            "a torch.autograd.Function is called under a transform of torch.func",
            "Call it outside of torch.func.vmap and similar transforms.",
        )

    base.apply = classmethod(apply)
    module.custom_function_call = refuse
    try:
        yield
    finally:
        del base.apply
        module.custom_function_call = transformed


def _checkpointed(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Run a function under `torch.utils.checkpoint` with `use_reentrant=True`.

    The checkpoint only decides which values are kept, which the engine's plan decides here.
    However, if no argument requires a gradient, no value inside gets a gradient.
    """
    if any(isinstance(value, Tensor) and value.requires_grad for value in args):
        return function(*args)
    with torch.no_grad():
        return function(*args)


def _traced(
    cls: _Function, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Iterator[int]
) -> Any:
    """Call a function, trace its backward, and return its outputs, connected to its inputs."""
    inputs = [*args, *kwargs.values()]
    context = Context(tuple(isinstance(v, Tensor) and v.requires_grad for v in inputs))
    with _apart():
        result = _forward(cls, context, inputs, args, kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        connected = _connected_outputs(cls, context, outputs)
        if connected:
            call = next(numbers)
            given = [_ops.output_gradient(outputs[place], call) for place in connected]
            found = _gradients(
                cls, context, inputs, outputs, dict(zip(connected, given, strict=True))
            )
    returned = [value.detach() if isinstance(value, Tensor) else value for value in outputs]
    if connected:
        places = [place for place, needed in enumerate(context.needs_input_grad) if needed]
        results = _ops.custom_gradient(
            [inputs[place] for place in places],
            [outputs[place] for place in connected],
            [found[place] for place in places],
            given,
            call,
        )
        for place, output in zip(connected, results, strict=True):
            returned[place] = output
    return tuple(returned) if isinstance(result, tuple) else returned[0]


@contextmanager
def _apart() -> Iterator[None]:
    """Run a function's code without gradients, and mark the nodes that it adds to the graph.

    The exporter would create a region for every change of the gradient mode, which takes time
    proportional to the whole graph. `custom_gradients.py` detaches the values that leave the code
    instead.
    """
    mode = get_proxy_mode()
    assert mode is not None
    graph = mode.tracer.graph
    last = next(iter(reversed(graph.nodes)), None)
    with _GradModeUnrecorded(), torch.no_grad():
        yield
    for node in reversed(graph.nodes):
        if node is last:
            break
        node.meta[WITHIN_FUNCTION] = True


class _GradModeUnrecorded(TorchFunctionMode):
    """Keeps changes of the gradient mode out of the recorded graph."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            with torch._C.DisableTorchFunction():
                return func(*args)
        return func(*args, **(kwargs or {}))


def _forward(
    cls: _Function,
    context: Context,
    inputs: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    versions = list(map(_version, inputs))
    if autograd_function._is_setup_context_defined(cls.setup_context):
        result = cls.forward(*args, **kwargs)
        cls.setup_context(context, args, result)
    else:
        result = cls.forward(context, *args, **kwargs)
    written = [v for v, was in zip(inputs, versions, strict=True) if _version(v) != was]
    if written or context.dirty_tensors:
        raise Unsupported(
            f"the forward of {cls.__name__} writes one of its inputs in place",
            "Write to a clone of the input, and remove ctx.mark_dirty.",
        )
    return result


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _connected_outputs(cls: _Function, context: Context, outputs: Sequence[Any]) -> list[int]:
    """Return the indices of the outputs that require a gradient."""
    if not any(context.needs_input_grad):
        return []
    fixed = {id(tensor) for tensor in context.non_differentiable}
    connected = [
        place
        for place, value in enumerate(outputs)
        if may_need_gradient(value) and id(value) not in fixed
    ]
    if len(connected) > 1 and not context.materialize_grads:
        raise Unsupported(
            f"{cls.__name__} has {len(connected)} differentiable outputs and calls "
            "ctx.set_materialize_grads(False): which gradients are None depends on the rest of "
            "the model, and its backward is traced separately",
            "Remove ctx.set_materialize_grads(False), or return one differentiable output.",
        )
    return connected


def _gradients(
    cls: _Function,
    context: Context,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    given: dict[int, Tensor],
) -> list[Tensor | None]:
    """Run a function's backward; return a gradient or None per input, validated as in PyTorch."""
    gradients: list[Any] = []
    for place, output in enumerate(outputs):
        zero = isinstance(output, Tensor) and context.materialize_grads and place not in given
        gradients.append(torch.zeros_like(output) if zero else given.get(place))
    own = cls.backward is not torch.autograd.Function.backward
    backward: Callable[..., Any] = cls.backward if own else cls.vjp
    boxed = getattr(cls, "boxed_grads_call", False)
    found = backward(context, gradients) if boxed else backward(context, *gradients)
    found = list(found) if isinstance(found, tuple) else [found]
    name = f"the backward of {cls.__name__}"
    advice = "Check that the module trains with these inputs in plain PyTorch."
    if len(found) < len(inputs) or any(extra is not None for extra in found[len(inputs) :]):
        raise Unsupported(
            f"{name} returns {len(found)} gradients, its forward takes {len(inputs)} inputs", advice
        )
    checked: list[Tensor | None] = []
    for place, (value, gradient) in enumerate(zip(inputs, found, strict=False)):
        if gradient is not None and not (
            isinstance(gradient, Tensor) and isinstance(value, Tensor)
        ):
            raise Unsupported(
                f"{name} returns {_kind(gradient)} as the gradient of input {place}, which is "
                f"{_kind(value)}",
                advice,
            )
        if gradient is not None and context.needs_input_grad[place]:
            gradient = _like(value, gradient, f"{name} returns, for input {place},", advice)
        checked.append(gradient if context.needs_input_grad[place] else None)
    return checked


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def _like(value: Tensor, gradient: Tensor, what: str, advice: str) -> Tensor:
    """Return a gradient in the shape and type of its input, as in the autograd engine."""
    if gradient.shape != value.shape:
        try:
            gradient = gradient.sum_to_size(value.shape)
        except RuntimeError:
            raise Unsupported(
                f"{what} a gradient of shape {tuple(gradient.shape)}; the input has shape "
                f"{tuple(value.shape)}",
                advice,
            ) from None
    return gradient if gradient.dtype == value.dtype else gradient.to(value.dtype)
