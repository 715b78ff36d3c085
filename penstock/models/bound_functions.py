"""Rejects functions that are bound to their module and that a copy of the module would share.

A given module is copied with tensors without data. `copy.deepcopy` copies bound methods and
`functools.partial`, but not functions. A lambda or a hook with the module in its closure would
compute with the original module's tensors, which are constants for the copy, and in the original
module's mode.
"""

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from penstock.errors import CompileError, few


def refuse_bound_functions(module: nn.Module) -> None:
    """Raise if an attribute or hook is a function with the module in its closure.

    **Raises:** `CompileError` naming the attribute and where the function is defined.
    """
    own = _parts(module)
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            for function in _functions(value):
                if _holds(function, own, set()):
                    raise CompileError(
                        f"{'.'.join(filter(None, (path, name)))} is a function, "
                        f"{_place(function)}, that holds parts of the model in its closure: the "
                        "compiled copy would read the parts of the original. Make it a method, or "
                        "give the function that builds the model (ModelSource.from_factory)."
                    )


def refuse_bound_loss(module: nn.Module, loss: Any) -> None:
    """Raise if a loss has weights of its own, or parts of the model in its closure.

    **Raises:** `CompileError` naming the loss.
    """
    if isinstance(loss, nn.Module) and (own := [name for name, _ in loss.named_parameters()]):
        raise CompileError(
            f"the loss, {_place(loss)}, has weights of its own ({few(own)}): make the loss a part "
            "of the model; the model then takes the targets as inputs and returns its loss."
        )
    if _holds(loss, _parts(module), set()):
        raise CompileError(
            f"the loss, {_place(loss)}, holds parts of the model: these parts would get no "
            "gradient from the loss, and the loss would keep their first values. Compute what the "
            "loss needs of them in the model's forward, and return it with the output."
        )


def _parts(module: nn.Module) -> set[int]:
    """Return the identities of a module's modules, parameters and buffers."""
    parts = (*module.modules(), *module.parameters(), *module.buffers())
    return {id(part) for part in parts}


def _place(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name} at {code.co_filename}:{code.co_firstlineno}" if code else str(name)


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield functions that a copy shares: attributes, or items of mappings and lists in
    attributes."""
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, (dict, list, tuple)) else (value,):
        while isinstance(item, functools.partial):
            item = item.func
        if isinstance(item, FunctionType):
            yield item


def _holds(value: Any, own: set[int], seen: set[int]) -> bool:
    """Return whether a function's closure contains one of these objects, directly or in other
    functions."""
    if id(value) in own:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, MethodType):
        return _holds(value.__self__, own, seen)
    if isinstance(value, functools.partial):
        held: list[Any] = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        held += [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
    elif isinstance(value, (list, tuple)):
        held = list(value)
    elif isinstance(value, dict):
        held = list(value.values())
    else:
        return False
    return any(_holds(item, own, seen) for item in held)


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises where the variable has no value)
    except ValueError:
        return False
    return True
