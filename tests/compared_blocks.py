"""Models of equal blocks, and captures of them with and without `equal_blocks`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.compiler import capture as capturing
from penstock.compiler.capture import Capture, Precision
from penstock.compiler.custom_gradients import WITHIN_FUNCTION
from penstock.compiler.equal_blocks import BlockTracing, tracing
from penstock.compiler.forward_state import capture_repeatable
from penstock.compiler.graph_digest import graph_digest
from penstock.compiler.tensors import storage_of, tensors_in

WIDTH, BLOCKS = 8, 5


class Block(nn.Module):
    """A feed-forward block of ten operators, which tests change."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, hidden]
        return self.change(x, self.body(x))

    def body(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        gated = hidden * torch.sigmoid(hidden).mean(-1, keepdim=True)
        return self.down(gated).mul(0.5) + x.tanh()

    def change(self, x: Tensor, y: Tensor) -> Tensor:
        return y


class Model(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module] = Block, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(index) for index in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + 1.0
        for block in self.blocks:
            x = self.run(block, x)
        return self.loss(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def loss(self, x: Tensor) -> Tensor:
        return x.square().mean()


def captured_with(
    fewest: int, module: nn.Module, inputs: dict[str, Tensor], precision: Precision, training: bool
) -> tuple[Capture, BlockTracing]:
    """Capture a module whose equal blocks are compared from a number of blocks on."""
    exports: list[BlockTracing] = []

    class Observed(BlockTracing):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            exports.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "BlockTracing", Observed)
        patch.setattr(tracing, "FEWEST_BLOCKS", fewest)
        captured = capture_repeatable(module, inputs, precision, training)
    return captured, exports[0]


def compare(
    module: nn.Module,
    inputs: dict[str, Tensor] | None = None,
    precision: Precision = "fp32",
    training: bool = True,
) -> int:
    """Compare a capture with one that traces every block; return the number of equal blocks."""
    inputs = inputs or {"x": torch.randn(2, 3, WIDTH)}
    captured, blocks = captured_with(3, module, inputs, precision, training)
    expected, none = captured_with(1 << 30, module, inputs, precision, training)
    assert not none.equal
    assert graph_digest(captured) == graph_digest(expected)
    assert described(captured) == described(expected)
    assert captured.weights == expected.weights
    assert captured.buffers == expected.buffers
    assert captured.inputs == expected.inputs
    assert [*captured.constants] == [*expected.constants]
    assert captured.differentiable == expected.differentiable
    return len(blocks.equal)


def described(captured: Capture) -> list[Any]:
    """Return operator, module, line and results of every node; results name their storages by
    number."""
    storages: dict[int, int] = {}
    return [
        (
            node.target if node.op == "call_function" else node.op,
            list(node.meta.get("nn_module_stack", {}).items()),
            node.meta.get("stack_trace"),
            node.meta.get(WITHIN_FUNCTION, False),
            [
                (
                    storages.setdefault(storage_of(value), len(storages)),
                    value.untyped_storage().nbytes(),
                    (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype),
                    (value.requires_grad, value.is_leaf, value.is_conj()),
                )
                for value in tensors_in(node.meta.get("val"))
            ],
        )
        for node in captured.graph.nodes
    ]
