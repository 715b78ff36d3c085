"""Equal blocks are traced once, and the graph is the one that tracing every block gives."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_modules import RandomModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from views_and_writes import ROWS, WIDTH as COLUMNS

from penstock.compiler import capture as capturing
from penstock.compiler.capture import Capture, Precision, capture
from penstock.compiler.custom_gradients import WITHIN_FUNCTION
from penstock.compiler.equal_blocks import BlockTracing, recording, tracing
from penstock.compiler.equal_blocks.records import storage_of
from penstock.compiler.forward_state import capture_repeatable
from penstock.compiler.graph_digest import graph_digest
from penstock.errors import CompileError
from penstock.models import ModelSource

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
        patch.setattr(tracing, "_FEWEST_BLOCKS", fewest)
        captured = capture_repeatable(module, inputs, precision, training)
    return captured, exports[0]


def compare(
    module: nn.Module,
    inputs: dict[str, Tensor] | None = None,
    precision: Precision = "fp32",
    training: bool = True,
    again: nn.Module | None = None,
) -> int:
    """Compare a capture with one that traces every block; return the number of equal blocks.

    `again` is the same module, for modules with a state of their own.
    """
    inputs = inputs or {"x": torch.randn(2, 3, WIDTH)}
    captured, blocks = captured_with(3, module, inputs, precision, training)
    expected, none = captured_with(1 << 30, again or module, inputs, precision, training)
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
    """Return module, line and results of every node, with the numbers of the results' storages."""
    storages: dict[int, int] = {}
    found: list[Any] = []
    for node in captured.graph.nodes:
        values = [
            (
                storages.setdefault(storage_of(value), len(storages)),
                value.untyped_storage().nbytes(),
                (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype),
                (value.requires_grad, value.is_leaf, value.is_conj()),
            )
            for value in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(value, Tensor)
        ]
        modules = list(node.meta.get("nn_module_stack", {}).items())
        within = node.meta.get(WITHIN_FUNCTION, False)
        found.append((node.target, modules, node.meta.get("stack_trace"), values, within))
    return [entry if callable(entry[0]) else entry[1:] for entry in found]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_equal_blocks_are_traced_once(precision: Precision) -> None:
    assert compare(Model(), precision=precision) == BLOCKS - 1


def test_without_gradients_every_block_is_traced() -> None:
    assert compare(Model(), training=False) == 0


def test_input_of_the_first_block_without_a_gradient() -> None:
    class Plain(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.loss(x)

    assert compare(Plain()) == BLOCKS - 3  # the record begins again with the third block


def test_two_blocks_are_both_traced() -> None:
    assert compare(Model(blocks=2)) == 0


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("config", "equal"),
    [
        ({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 5, "vocab_size": 64}, 4),
        ({"model_type": "llama", "num_key_value_heads": 2}, 4),
        ({"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 8}, 3),  # two kinds
        ({"model_type": "bert"}, 4),
        ({"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32}, 2),  # as above
        ({"model_type": "gpt_neox"}, 4),
        ({"model_type": "smollm3", "num_key_value_heads": 2}, 3),  # positions in three of four
        ({"model_type": "bloom", "n_layer": 5, "n_head": 4}, 0),  # creates tensors
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_library_models(config: dict[str, Any], equal: int, precision: Precision) -> None:
    own = config["model_type"] in ("gpt2", "bloom")
    fields = config if own else SIZES | config
    if config["model_type"] == "gemma2":
        fields = {**fields, "num_hidden_layers": 6, "sliding_window": 4}
        equal = 4
    source = ModelSource.from_hf_config(fields)
    inputs = dict(source.example_inputs(2, 8))
    assert compare(source.module, inputs, precision) == equal


def test_one_block_that_branches_on_its_index() -> None:
    class Branching(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return y.relu() if self.index == 3 else y.sigmoid()

    assert compare(Model(Branching)) == 3


@pytest.mark.parametrize(
    "number", [0.1, -0.0, 1, True], ids=["other", "sign of zero", "integer", "bool"]
)
def test_one_block_with_another_constant(number: float) -> None:
    class Scaled(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return y * (number if self.index == 4 else 1.0 if number else 0.0)

    assert compare(Model(Scaled)) == 3


def test_dropout_of_another_probability() -> None:
    class Dropping(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.dropout(y, 0.1 * self.index, self.training)

    assert compare(Model(Dropping)) == 0


def test_equal_dropout() -> None:
    class Dropping(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.dropout(y, 0.1, self.training)

    assert compare(Model(Dropping)) == BLOCKS - 1


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


def test_blocks_that_write_in_place() -> None:
    class Writing(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            y.add_(1.0)
            return y

    assert compare(Model(Writing)) == 0


def test_results_that_the_caller_writes_in_place() -> None:
    class Caller(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y = block(x)
            y += x
            y[:, 0].mul_(2.0)
            return y

    assert compare(Caller()) == BLOCKS - 1


@pytest.mark.parametrize(
    "create",
    [
        lambda y: torch.full((), -1.0) + torch.arange(WIDTH),
        lambda y: torch.zeros_like(y),
        lambda y: torch.full_like(y, 2.0, dtype=torch.float32),
        lambda y: y.new_ones(WIDTH),
        lambda y: torch.tensor(3.0),
    ],
    ids=["full", "zeros_like", "full_like", "new_ones", "tensor"],
)
def test_blocks_that_create_tensors(create: Callable[[Tensor], Tensor]) -> None:
    class Creating(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.maximum(y, create(y)) * create(y).cos()

    assert compare(Model(Creating)) == 0


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


def test_inputs_of_other_strides() -> None:
    class Turning(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            if block.index != 3:
                return block(x)
            return block(x.transpose(0, 1).contiguous().transpose(0, 1))

    assert compare(Turning()) == 3


def test_an_error_in_a_later_block_is_explained_as_always() -> None:
    class Failing(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            if self.index == 3:
                raise ValueError("no such block")
            return y

    with pytest.raises(CompileError, match=r"cannot capture blocks.3 .*no such block"):
        capture(Model(Failing), {"x": torch.randn(2, 3, WIDTH)})


def test_tensors_outside_of_the_blocks() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
            return self.body(x) * mask + (0.0 if positions is None else positions)

    class Given(Model):
        def __init__(self) -> None:
            super().__init__(Masked)
            self.register_buffer("positions", torch.randn(3, WIDTH))

        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x, x.detach() > 0, positions=self.positions)

    assert compare(Given()) == BLOCKS - 1


def test_state_of_the_model_changes_as_in_an_ordinary_export() -> None:
    class Counting(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.counts: list[int] = []

        def change(self, x: Tensor, y: Tensor) -> Tensor:
            self.counts.append(1)
            return y.relu() if self.index == 3 else y.sigmoid()

    class Scaled(Model):
        def loss(self, x: Tensor) -> Tensor:
            scale = sum(len(block.counts) for block in self.blocks)
            for block in self.blocks:
                block.counts.clear()
            return scale * x.mean()

    assert compare(Scaled(Counting)) == 3


def test_one_block_that_asks_for_a_gradient() -> None:
    class Asking(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            z = (y > 0).float()
            if self.index == 3:
                z.requires_grad_()
            return z.sigmoid()

    class Reading(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y = block(x)
            return (y.relu() if y.requires_grad else y.tanh()) + x

    assert compare(Reading(Asking)) == 3


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


def test_blocks_of_complex_numbers() -> None:
    class Conjugated(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            z = torch.complex(y, x).conj()
            return (z * z).real + z.imag

    assert compare(Model(Conjugated)) == 0


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


class Repeated(RandomModule):
    """A random module of five equal blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        block = self.blocks[seed % len(self.blocks)]
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(BLOCKS))


def compare_repeated(seed: int) -> int:
    inputs = {name: torch.zeros(ROWS, COLUMNS) for name in ("x", "z")}
    precision: Precision = ("fp32", "bf16")[seed % 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "_FEWEST_CALLS", 1)
        try:
            return compare(Repeated(seed), inputs, precision)
        except CompileError as error:
            refused = str(error)
    with pytest.raises(CompileError) as expected:
        captured_with(1 << 30, Repeated(seed), inputs, precision, training=True)
    assert str(expected.value) == refused
    return 0


@pytest.mark.parametrize("seed", range(30))
def test_random_blocks(seed: int) -> None:
    compare_repeated(seed)


@pytest.mark.long
def test_many_random_blocks() -> None:
    equal = [compare_repeated(seed) for seed in range(30, 230)]
    assert sum(map(bool, equal)) >= 10


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


def test_results_inside_of_blocks_are_reused() -> None:
    inputs = {"x": torch.randn(2, 3, WIDTH)}
    _, blocks = captured_with(3, Model(), inputs, "fp32", training=True)
    (kind,) = {id(kind): kind for kind in blocks._kinds.values()}.values()
    assert kind.record is not None
    results = sum(len(call.outputs) for call in kind.record.calls)
    assert len(kind.reused._results) == results - 1  # all but the one that the block returns
