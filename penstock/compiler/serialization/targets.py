"""The names of the functions that the nodes of a program's graphs call.

An operator is named `namespace::operator.overload`. Other functions are in a fixed table.
"""

import functools
import operator
import re
from typing import Any

import torch

# Importing these modules registers the penstock operators.
from penstock.compiler import (
    activation_calls,
    attention_calls,
    cached_attention,
    custom_gradients,  # noqa: F401
    ops,  # noqa: F401
    sparse_calls,
    sparse_ops,  # noqa: F401
)
from penstock.compiler.serialization.fields import MalformedError, NotSerializableError

_NAMESPACES = frozenset({"aten", "penstock", "prims", "transformers"})
_OPERATOR = re.compile(r"([a-z]+)::([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")
_REFUSED = frozenset({"aten::from_file"})  # opens a file that an argument names
_FUNCTIONS: dict[str, Any] = {
    "operator.getitem": operator.getitem,
    "attention": attention_calls.attention,
    "attention_backward": attention_calls.attention_backward,
    "gelu_tanh": activation_calls.gelu_tanh,
    "gelu_tanh_backward": activation_calls.gelu_tanh_backward,
    "write_row": cached_attention.write_row,
    "sparse_linear": sparse_calls.sparse_linear,
    "sparse_weight_gradient": sparse_calls.sparse_weight_gradient,
    "sparse_to_dense": sparse_calls.sparse_to_dense,
    "sparse_entries": sparse_calls.sparse_entries,
    "linear_cross_entropy": sparse_calls.linear_cross_entropy,
    "linear_cross_entropy_predictions": sparse_calls.linear_cross_entropy_predictions,
    "linear_cross_entropy_backward": sparse_calls.linear_cross_entropy_backward,
    "linear_cross_entropy_turn": sparse_calls.linear_cross_entropy_turn,
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}


def name_of(target: Any) -> str:
    """Return the name of a node's function.

    Raises:
        NotSerializableError: the function has no name here.
    """
    if isinstance(target, torch._ops.OpOverload):
        name = operator_name(target)
        try:
            if function_of(name) is target:
                return name
        except MalformedError:
            pass  # the error below names it
    elif target in _NAMES:
        return _NAMES[target]
    raise NotSerializableError(f"a node calls {target}")


@functools.cache
def function_of(name: str) -> Any:
    """Return the function of a name.

    Raises:
        MalformedError: no operator that a program may call has this name.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    overload = operator_of(name)
    if overload._schema.is_mutable:
        raise MalformedError(f"expected an operator without side effects, got {name!r}")
    return overload


def operator_of(name: str) -> torch._ops.OpOverload:
    """Return the operator of a name, which may write into its arguments.

    Raises:
        MalformedError: no operator has this name.
    """
    parts = _OPERATOR.fullmatch(name)
    if parts is None or parts[1] not in _NAMESPACES or f"{parts[1]}::{parts[2]}" in _REFUSED:
        raise MalformedError(f"expected an operator, got {name!r}")
    packet = getattr(getattr(torch.ops, parts[1]), parts[2], None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or parts[3] not in packet.overloads():
        raise MalformedError(f"this PyTorch has no operator {name!r}")
    return getattr(packet, parts[3])


def operator_name(operator: torch._ops.OpOverload) -> str:
    """Return the name of an operator."""
    return f"{operator._schema.name}.{operator._overloadname}"
