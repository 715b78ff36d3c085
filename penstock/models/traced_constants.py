"""The value of a traced tensor, if the graph alone determines it.

`torch.export` runs a forward on tensors without data and records every operator in a graph. A
tensor that depends on no placeholder (an input, a weight, a buffer) and on no random number has the
same value for all batches: `arange(16).unsqueeze(0)`, for example. Its operators are run here on
real tensors.
"""

from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes


def constant_value(tensor: torch.Tensor) -> np.ndarray | None:
    """Return the value of a traced tensor; None if it is not known to be constant."""
    node = _node_of(tensor)
    if node is None:
        return None
    ancestors = _ancestors(node)
    if not all(map(_is_deterministic, ancestors)) or _is_written(ancestors):
        return None
    values: dict[fx.Node, Any] = {}
    # Not under no_grad: an export records the change of the mode, and divides its graph there. No
    # operator makes a tensor require a gradient if no argument does.
    with _disable_current_modes():
        for each in ancestors:
            args, kwargs = fx.node.map_arg((each.args, each.kwargs), values.__getitem__)
            values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
        value = values[node].resolve_conj().resolve_neg()
        return None if value.dtype == torch.bfloat16 else value.numpy()


def _node_of(tensor: torch.Tensor) -> fx.Node | None:
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot = get_proxy_slot(tensor, mode.tracer, None)
    proxy = getattr(slot, "proxy", None)
    return proxy.node if isinstance(proxy, fx.Proxy) else None


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """Return a node and all nodes that it depends on, in the order of the graph."""
    found, waiting = set(), [node]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += each.all_input_nodes
    return sorted(found)


def _is_deterministic(node: fx.Node) -> bool:
    operator = node.target
    if node.op != "call_function" or not isinstance(operator, torch._ops.OpOverload):
        return False
    device = node.kwargs.get("device")
    return (
        torch.Tag.nondeterministic_seeded not in operator.tags
        and not operator._schema.is_mutable
        and (device is None or torch.device(str(device)).type == "cpu")
    )


def _is_written(nodes: list[fx.Node]) -> bool:
    """Whether an operator writes to one of these tensors in place, or to a view of one."""
    seen, waiting = set(nodes), list(nodes)
    while waiting:
        for user in waiting.pop().users:
            operator = user.target
            if user in seen or not isinstance(operator, torch._ops.OpOverload):
                continue
            if operator._schema.is_mutable:
                return True
            if any(argument.alias_info is not None for argument in operator._schema.arguments):
                seen.add(user)
                waiting.append(user)
    return False
