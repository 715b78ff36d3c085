"""Rejects hooks on gradients, and backward passes within a forward, by name.

PyTorch calls a hook while its engine traverses the graph that one process has recorded. A program
has no such traversal: each stage's backward is compiled before the first step and runs where and as
often as the engine's plan requires. A hook would be ignored without an error, so it is rejected.
Hooks on a module's forward are ordinary code and are captured.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import autograd, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as every_module
from torch.utils import checkpoint

from penstock.compiler.unsupported import Unsupported
from penstock.errors import CompileError

_CHANGE = (
    "To change a gradient, apply a torch.autograd.Function with that backward in the forward; a "
    "hook that only reads a gradient must be removed."
)
_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__
_Hooks = Mapping[int, Callable[..., Any]] | None


def refuse_gradient_hooks(module: nn.Module, prefix: str = "") -> None:
    """Reject a module that has hooks on the gradients of its parameters or of itself.

    **Arguments:** `prefix` is removed from names that begin with it.

    **Raises:** `CompileError` naming the parameter or module, the hook and where it is defined.
    """
    for kind, hooks in (
        ("backward hook", every_module._global_backward_hooks),
        ("backward pre-hook", every_module._global_backward_pre_hooks),
    ):
        _refuse(f"torch.nn has a {kind} for all modules", hooks)
    for path, child in module.named_modules():
        owner = f"{path.removeprefix(prefix) or 'the model'} ({type(child).__name__}) has a"
        full = "full " if child._is_full_backward_hook else ""
        _refuse(f"{owner} {full}backward hook", child._backward_hooks)
        _refuse(f"{owner} full backward pre-hook", child._backward_pre_hooks)
    for name, parameter in module.named_parameters():
        owner = f"parameter {name.removeprefix(prefix)} has a"
        _refuse(f"{owner} hook on its gradient (register_hook)", parameter._backward_hooks)
        after = parameter._post_accumulate_grad_hooks
        _refuse(f"{owner} hook (register_post_accumulate_grad_hook)", after)


def _refuse(what: str, hooks: _Hooks) -> None:
    if not hooks:
        return
    hook: Any = next(iter(hooks.values()))
    while isinstance(hook, functools.partial) or hasattr(hook, "__wrapped__"):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__wrapped__
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__name__)
    place = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
    raise CompileError(f"{what}, {name}{place}, which no compiled program calls. {_CHANGE}")


_REFUSED_METHODS = {
    "register_hook": "registers a hook on the gradient of a tensor",
    "register_post_accumulate_grad_hook": "registers a hook on a gradient",
    "retain_grad": "asks to keep the gradient of a tensor (retain_grad)",
}


@contextmanager
def _no_tensor_hooks() -> Iterator[None]:
    """Replace the methods of tensors that hook a gradient, and the attribute `grad_fn`.

    A `TorchFunctionMode` would see the same calls, but every other call of the export would pass
    through it too.
    """
    thread = threading.get_ident()
    before = {name: vars(torch.Tensor).get(name) for name in (*_REFUSED_METHODS, "grad_fn")}

    def refused(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(self, *args, **kwargs)
            raise Unsupported(
                f"it {_REFUSED_METHODS[name]}, which no compiled program calls", _CHANGE
            )

        return method

    def grad_fn(self: torch.Tensor) -> Any:
        if threading.get_ident() == thread and _asked_by_the_model(sys._getframe(1)):
            raise Unsupported(
                "it reads grad_fn, which has no counterpart in a compiled program",
                f"To know whether a tensor takes part in training, read requires_grad. {_CHANGE}",
            )
        return _GRAD_FN(self)

    for name in _REFUSED_METHODS:
        setattr(torch.Tensor, name, refused(name))
    torch.Tensor.grad_fn = property(grad_fn)  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:  # inherited
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, value)


def _asked_by_the_model(frame: FrameType) -> bool:
    """Return whether the reader is outside PyTorch, or where PyTorch registers hooks with it."""
    file = frame.f_code.co_filename.replace("\\", "/")
    return "/torch/" not in file or file.endswith("/autograd/graph.py")


@contextmanager
def gradient_hooks_refused() -> Iterator[None]:
    """Context in which an exported forward may neither hook gradients nor compute them."""
    engine: Any = autograd
    saving: Any = saved_tensors_hooks
    run, enter, leave = engine._engine_run_backward, saving.__enter__, saving.__exit__
    passing: list[saved_tensors_hooks] = []

    def refuse_backward(*args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is None:
            return run(*args, **kwargs)
        raise Unsupported(
            "it computes gradients itself (backward, torch.autograd.grad or torch.func)",
            "A program's backward is that of its loss alone: write the derivative as a formula, "
            "or remove it from the forward; the engine decides whether activations are kept or "
            "recomputed (engine.memory).",
        )

    def pass_or_refuse(self: saved_tensors_hooks) -> None:
        if get_proxy_mode() is None:
            enter(self)
            return
        # Keeping or recomputing saved values changes no value.
        if not isinstance(self, (save_on_cpu, checkpoint._checkpoint_hook)):
            raise Unsupported("it enters torch.autograd.graph.saved_tensors_hooks", _CHANGE)
        passing.append(self)

    def pass_out(self: saved_tensors_hooks, *args: object) -> None:
        if self in passing:
            passing.remove(self)
        else:
            leave(self, *args)

    engine._engine_run_backward = refuse_backward
    saving.__enter__, saving.__exit__ = pass_or_refuse, pass_out
    try:
        with _no_tensor_hooks():
            yield
    finally:
        engine._engine_run_backward = run
        saving.__enter__, saving.__exit__ = enter, leave
