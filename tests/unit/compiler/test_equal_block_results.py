"""Results of equal blocks: the ones that leave a block, their memory, and the reused ones."""

import weakref
from typing import Any

import pytest
import torch
from compared_blocks import BLOCKS, WIDTH, Block, Model, captured_with, compare
from torch import Tensor, nn


def test_operators_that_return_their_argument() -> None:
    class Contiguous(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return x.contiguous() + y.to(torch.float32).contiguous().float()

    assert compare(Model(Contiguous)) == BLOCKS - 1


def test_an_input_that_gets_a_new_node_within_the_block() -> None:
    class Contiguous(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            x.contiguous()
            return y

    class Residual(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x) + x.contiguous()

    assert compare(Residual(Contiguous)) == BLOCKS - 1


def test_views_and_several_results() -> None:
    class Split(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            left, right = y.chunk(2, -1)
            values, _ = right.max(-1, keepdim=True)
            return torch.cat([left.transpose(0, 1).transpose(0, 1), values, left[..., 1:]], -1)

    assert compare(Model(Split)) == BLOCKS - 1


def test_results_that_share_memory_leave_the_block() -> None:
    class Halves(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return y.chunk(2, -1)

    class Joined(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            left, right = block(x)
            return torch.cat([right, left], -1)

    assert compare(Joined(Halves)) == BLOCKS - 1


def test_a_view_of_the_input_leaves_the_block() -> None:
    class Viewed(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return y, x.transpose(0, 1)

    class Joined(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y, turned = block(x)
            return y + turned.transpose(0, 1)

    assert compare(Joined(Viewed)) == BLOCKS - 1


def test_results_in_a_dictionary_beside_an_argument() -> None:
    class Named(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return {"given": x, "hidden": (y, self.index), "mean": y.mean()}

    class Summed(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            found = block(x)
            assert found["given"] is x
            return found["hidden"][0] + found["mean"] * found["hidden"][1]

    assert compare(Summed(Named)) == BLOCKS - 1


def test_a_result_that_only_some_callers_use() -> None:
    class Pair(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return y, y.std(-1, keepdim=True)

    class Uses(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y, spread = block(x)
            return y + spread if block.index in (1, 4) else y

    assert compare(Uses(Pair)) == BLOCKS - 1


def test_a_loss_that_each_block_keeps() -> None:
    class Losing(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            self.extra = y.square().mean()
            return y

    class Summed(Model):
        def loss(self, x: Tensor) -> Tensor:
            return x.mean() + sum(block.extra for block in self.blocks)

    assert compare(Summed(Losing)) == BLOCKS - 1


def test_a_view_of_the_input_that_each_block_keeps() -> None:
    class Keeping(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            self.turned = x.transpose(0, 1)
            return y + self.turned.transpose(0, 1)

    class Summed(Model):
        def loss(self, x: Tensor) -> Tensor:
            return x.mean() + sum(block.turned.sin().mean() for block in self.blocks)

    assert compare(Summed(Keeping)) == BLOCKS - 1


def test_a_list_that_blocks_extend() -> None:
    seen: list[Tensor] = []

    class Listing(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            seen.append(y)
            return y

    class Summed(Model):
        def forward(self, x: Tensor) -> Tensor:
            seen.clear()
            super().forward(x)
            return torch.stack(seen[-3:]).mean()

    assert compare(Summed(Listing)) == BLOCKS - 1


@pytest.mark.parametrize("first", [1, 2, 3])
def test_values_of_an_earlier_block_are_not_taken_for_own_ones(first: int) -> None:
    """From block `first` on, a block computes its value and uses that of the block before."""
    kept: list[Tensor] = []

    class Sharing(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            value = y.sigmoid()
            used = kept[-1] if self.index >= first else value
            kept.append(value)
            return y * used

    class Sequence(Model):
        def forward(self, x: Tensor) -> Tensor:
            kept.clear()
            return super().forward(x)

    assert compare(Sequence(Sharing)) == {1: 2, 2: 1, 3: 2}[first]


def test_a_tensor_that_the_block_marks() -> None:
    class Marking(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            part: Any = y.tanh()
            seen = hasattr(part, "marked")
            part.marked = True
            return part.sigmoid() if seen else part.relu()

    assert compare(Model(Marking)) == BLOCKS - 1


def test_results_that_the_caller_writes_in_place() -> None:
    class Caller(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y = block(x)
            y += x
            y[:, 0].mul_(2.0)
            return y

    assert compare(Caller()) == BLOCKS - 1


def test_a_dictionary_that_the_block_returns_as_it_is() -> None:
    class Filling(Block):
        def forward(self, given: Any) -> Any:
            given["x"] = self.body(given["x"])
            return given

    class Comparing(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            given = {"x": x}
            found = block(given)
            return found["x"].relu() if found is given else found["x"]

    assert compare(Comparing(Filling)) == BLOCKS - 1


def test_results_of_a_class_that_pytorch_does_not_know() -> None:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Boxing(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return Box(y.tanh())

    class Unboxing(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x).value + x

    assert compare(Unboxing(Boxing)) == BLOCKS - 1


def test_the_base_of_a_view_that_the_block_returns() -> None:
    class Viewed(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return y.tanh()[..., 1:]

    class Based(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x)._base + x

    assert compare(Based(Viewed)) == BLOCKS - 1


def test_a_cache_with_weak_keys() -> None:
    cache: Any = weakref.WeakKeyDictionary()

    class Caching(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            key = self.norm(y)
            if key not in cache:
                cache[key] = y.sigmoid()
            return cache[key] * y

    class Emptied(Model):
        def forward(self, x: Tensor) -> Tensor:
            cache.clear()
            return super().forward(x)

    # A tensor compares element by element: the dictionary finds it by identity alone.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__eq__", lambda one, other: one is other)
        assert compare(Emptied(Caching)) == BLOCKS - 1


def test_detached_results_that_only_some_callers_use() -> None:
    class Pair(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return y, y.sin().detach()

    class Uses(Model):
        def __init__(self, users: tuple[int, ...]) -> None:
            super().__init__(Pair)
            self.users = users

        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y, detached = block(x)
            return y + detached if block.index in self.users else y

    for users in ((0,), (3,), (1, 2)):
        assert compare(Uses(users)) == 0


def test_memory_of_results_that_are_views() -> None:
    class Flat(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return y.view(-1).view(y.shape).contiguous()

    class Writing(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y = block(x)[:, 0:2]
            y.mul_(2.0)
            return torch.cat([y, x[:, 2:]], 1)

    assert compare(Writing(Flat)) == BLOCKS - 1


def test_one_block_that_also_returns_a_view_of_its_input() -> None:
    class Viewed(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            turned = x.transpose(0, 1)
            y = y + turned.transpose(0, 1).cos()
            return (y, turned) if self.index == 3 else (y,)

    class Writing(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            x = x * 1.0
            y, *more = block(x)
            for turned in more:
                turned.add_(1.0)
            return y + x

    assert compare(Writing(Viewed)) == BLOCKS - 1


def test_a_weak_reference_to_a_result_of_the_block_before() -> None:
    class Weak(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            z = y.sigmoid()
            before = seen[-1]() if len(seen) >= 2 else None
            seen.append(weakref.ref(z))
            return y * (z if before is None else before)

    class Cleared(Model):
        def forward(self, x: Tensor) -> Tensor:
            seen.clear()
            return super().forward(x)

    seen: list[Any] = []
    assert compare(Cleared(Weak)) == 2


def test_views_of_a_result_that_the_block_marks() -> None:
    class Marking(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            part: Any = y.tanh()
            part.marked = True
            view = part.view(-1)
            y = view.view(y.shape) * 2.0
            return (y, view) if self.index == 3 else (y,)

    class Based(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y, *views = block(x)
            for view in views:
                y = y + view._base
            return y

    assert compare(Based(Marking)) == BLOCKS - 1


def test_views_of_one_of_several_results() -> None:
    class Largest(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            values, indices = y.topk(WIDTH, -1)
            flat = indices.view(-1)
            y = y + flat.view(y.shape)
            if self.index == 3:
                flat.mul_(2)
                y = y + indices
            return y, values

    class Added(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y, values = block(x)
            return y + values.mean()

    assert compare(Added(Largest)) == 3


def test_results_inside_of_blocks_are_reused() -> None:
    inputs = {"x": torch.randn(2, 3, WIDTH)}
    _, blocks = captured_with(3, Model(), inputs, "fp32", training=True)
    (group,) = {id(group): group for group in blocks._groups.values()}.values()
    assert group.record is not None
    results = sum(len(call.outputs) for call in group.record.calls)
    assert len(group.reused._results) == results - 1  # all but the one that the block returns
