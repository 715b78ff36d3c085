"""Equal blocks as modules: weights, hooks, gradient modes, and how they are called."""

from typing import Any

import pytest
import torch
from compared_blocks import BLOCKS, WIDTH, Block, Model, compare
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.compiler.capture import capture
from penstock.errors import CompileError


def test_frozen_blocks() -> None:
    class Frozen(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.requires_grad_(index >= 3)

    assert compare(Model(Frozen, 6)) == 4  # two kinds of three


def test_half_of_the_blocks_without_gradients() -> None:
    class Halved(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(block.index >= 5):
                return block(x)

    assert compare(Halved(blocks=10)) == 2


def test_gradient_mode_within_blocks() -> None:
    class Partly(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                scale = y.abs().mean()
            return y / scale

    assert compare(Model(Partly)) == 0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 3 * gradient


def test_custom_functions_in_blocks() -> None:
    class Custom(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return Doubled.apply(y)

    assert compare(Model(Custom)) == 0


def test_a_custom_function_in_one_block() -> None:
    class Custom(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return Doubled.apply(y) if self.index == 3 else 2 * y

    assert compare(Model(Custom)) == 3


def test_blocks_that_share_a_weight() -> None:
    model = Model()
    model.blocks[3].up.weight = model.blocks[1].up.weight
    assert compare(model) == BLOCKS - 1


def test_a_block_whose_weights_are_tied_within_it() -> None:
    class Square(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            if index == 3:
                self.two.weight = self.one.weight

        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return self.two(self.one(y))

    assert compare(Model(Square)) == 0


def test_a_block_that_another_block_calls() -> None:
    class Calling(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            if block.index == 1:
                return x
            if block.index == 0:
                return self.blocks[1](x)
            return block(x)

    assert compare(Calling()) == 3


def test_blocks_that_are_called_twice() -> None:
    class Twice(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(block(x))

    assert compare(Twice()) == BLOCKS - 1


class Nested(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block(number) for number in range(4))
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x) + self.index
        return x


def test_blocks_within_blocks_that_differ() -> None:
    assert compare(Model(Nested)) == 0
    assert compare(Model(Nested, 2)) == 2 * 3


class Called(nn.Module):
    """Calls blocks that belong to another module."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.held = blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.held[0](x)


def test_blocks_that_are_called_at_several_depths() -> None:
    class Deep(Model):
        def __init__(self) -> None:
            super().__init__()
            self.call = Called([self.blocks[0]])

        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            return self.call(x) if block.index == 0 else block(x)

    assert compare(Deep()) == BLOCKS - 1


def test_lines_of_blocks_that_are_called_from_several_places() -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(4):
                layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
                self.add_module(f"layer{index}", layer)
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) + 1.0
            x = self.layer0(x)
            x = self.layer1(x)
            x = self.layer2(x)
            return self.layer3(x).mean()

    assert compare(Unrolled()) == 0


def test_hooks_that_change_results() -> None:
    model = Model()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: (args[0] * 2.0,))
        block.register_forward_hook(lambda _, __, y: y - 1.0)
        block.up.register_forward_hook(lambda _, __, y: y.tanh())
    assert compare(model) == BLOCKS - 1
    model.blocks[3].up.register_forward_hook(lambda _, __, y: y.relu())
    assert compare(model) == BLOCKS - 2


def test_checkpointed_blocks() -> None:
    class Checkpointed(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(block, x, use_reentrant=block.index % 2 == 1)

    assert compare(Checkpointed()) == BLOCKS - 1


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks() -> None:
    class Compiled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(torch.compile(block) for block in self.blocks)

    assert compare(Compiled()) == 0


def test_blocks_that_call_modules_outside_of_themselves() -> None:
    class Calling(Block):
        outside: tuple[nn.Module, ...] = ()

        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return self.outside[self.index](y)

    class Experts(Model):
        def __init__(self) -> None:
            super().__init__(Calling)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
            for block in self.blocks:
                block.outside = tuple(self.experts)

    assert compare(Experts()) == 0


def test_blocks_of_lazy_modules_are_refused_as_always() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.LazyLinear(WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    with pytest.raises(CompileError, match="cannot capture"):
        capture(Lazy(), {"x": torch.randn(2, 3, WIDTH)})


def test_blocks_without_gradients_and_within_a_custom_function() -> None:
    class Within(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, *blocks: nn.Module) -> Tensor:
            ctx.save_for_backward(weight)
            for block in blocks:
                x = block(x)
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (weight,) = ctx.saved_tensors
            return None, (gradient * weight).sum(), None, None

    class Both(Model):
        def __init__(self) -> None:
            super().__init__(blocks=6)
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            blocks = self.blocks
            with torch.no_grad():
                x = blocks[1](blocks[0](x))
            x = Within.apply(x.detach(), self.weight, blocks[2], blocks[3])
            with torch.no_grad():
                x = blocks[5](blocks[4](x))
            return (x * self.weight).mean()

    assert compare(Both()) == 0
