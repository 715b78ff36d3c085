"""Replaces the device on which a captured graph creates tensors by the engine's device."""

from typing import Any

import torch
from torch import fx


def on_device(node: fx.Node, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a node's arguments, with every device replaced by the engine's."""

    def replaced(value: Any) -> Any:
        return torch.device(device) if isinstance(value, torch.device) else value

    return (
        tuple(map(replaced, node.args)),
        {name: replaced(value) for name, value in node.kwargs.items()},
    )


def move(node: fx.Node, device: str) -> None:
    """Make a node create its tensors on the engine's device."""
    if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
        node.args, node.kwargs = on_device(node, device)
