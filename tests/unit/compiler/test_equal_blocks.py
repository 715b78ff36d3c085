"""Equal blocks are traced once, and the graph is the one that tracing every block gives."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_modules import RandomModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from views_and_writes import ROWS, WIDTH as COLUMNS

from penstock.compiler import capture as capturing
from penstock.compiler.capture import Capture, Precision, capture
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
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.loss(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def loss(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[BlockTracing]:
    """The attempts of the captures of a test."""
    attempts: list[BlockTracing] = []

    class Kept(BlockTracing):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            attempts.append(self)

    monkeypatch.setattr(capturing, "BlockTracing", Kept)
    return attempts


def compare(
    module: nn.Module,
    traced: list[BlockTracing],
    inputs: dict[str, Tensor] | None = None,
    precision: Precision = "fp32",
    training: bool = True,
) -> int:
    """Compare a capture with one without equal blocks; return how many blocks were not traced."""
    inputs = inputs or {"x": torch.randn(2, 3, WIDTH)}
    captured = capture_repeatable(module, inputs, precision, training)
    equal = len(traced[-1].equal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "_FEWEST_BLOCKS", 1 << 30)
        expected = capture_repeatable(module, inputs, precision, training)
    assert not traced[-1].equal
    assert graph_digest(captured) == graph_digest(expected)
    assert described(captured) == described(expected)
    assert captured.weights == expected.weights
    assert captured.differentiable == expected.differentiable
    return equal


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
            )
            for value in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(value, Tensor)
        ]
        modules = list(node.meta.get("nn_module_stack", {}).items())
        found.append((node.target, modules, node.meta.get("stack_trace"), values))
    return [entry if isinstance(entry[0], str) is False else entry[1:] for entry in found]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("training", [True, False])
def test_equal_blocks_are_traced_once(
    traced: list[BlockTracing], precision: Precision, training: bool
) -> None:
    assert compare(Model(), traced, precision=precision, training=training) == BLOCKS - 1
    assert len(traced) == 2


def test_input_of_the_first_block_without_a_gradient(traced: list[BlockTracing]) -> None:
    class Plain(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.loss(x)

    assert compare(Plain(), traced) == BLOCKS - 2


def test_two_blocks_are_both_traced(traced: list[BlockTracing]) -> None:
    assert compare(Model(blocks=2), traced) == 0


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
        ({"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32}, 4),
        ({"model_type": "gpt_neox"}, 4),
        ({"model_type": "smollm3", "num_key_value_heads": 2}, 0),  # positions in three of four
        ({"model_type": "bloom", "n_layer": 5, "n_head": 4}, 0),  # creates tensors
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_library_models(
    config: dict[str, Any], equal: int, precision: Precision, traced: list[BlockTracing]
) -> None:
    own = config["model_type"] in ("gpt2", "bloom")
    fields = config if own else SIZES | config
    if config["model_type"] == "gemma2":
        fields = {**fields, "num_hidden_layers": 6, "sliding_window": 4}
        equal = 4
    source = ModelSource.from_hf_config(fields)
    inputs = dict(source.example_inputs(2, 8))
    assert compare(source.module, traced, inputs, precision) == equal


def test_one_block_that_branches_on_its_index(traced: list[BlockTracing]) -> None:
    class Branching(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return y.relu() if self.index == 3 else y.sigmoid()

    assert compare(Model(Branching), traced) == 0


@pytest.mark.parametrize(
    "number", [0.1, -0.0, 1, True], ids=["other", "sign of zero", "integer", "bool"]
)
def test_one_block_with_another_constant(traced: list[BlockTracing], number: float) -> None:
    class Scaled(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return y * (number if self.index == 4 else 1.0 if number else 0.0)

    captured = compare(Model(Scaled), traced)
    assert captured == 0


def test_dropout_of_another_probability(traced: list[BlockTracing]) -> None:
    class Dropping(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.dropout(y, 0.1 * self.index, self.training)

    assert compare(Model(Dropping), traced) == 0


def test_equal_dropout(traced: list[BlockTracing]) -> None:
    class Dropping(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.dropout(y, 0.1, self.training)

    assert compare(Model(Dropping), traced) == BLOCKS - 1


def test_operators_that_return_their_argument(traced: list[BlockTracing]) -> None:
    class Contiguous(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return x.contiguous() + y.to(torch.float32).contiguous().float()

    assert compare(Model(Contiguous), traced) == BLOCKS - 1


def test_an_input_that_gets_a_new_node_within_the_block(traced: list[BlockTracing]) -> None:
    class Contiguous(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            x.contiguous()
            return y

    class Residual(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x) + x.contiguous()

    assert compare(Residual(Contiguous), traced) == BLOCKS - 1


def test_views_and_several_results(traced: list[BlockTracing]) -> None:
    class Split(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            left, right = y.chunk(2, -1)
            values, _ = right.max(-1, keepdim=True)
            return torch.cat([left.transpose(0, 1).transpose(0, 1), values, left[..., 1:]], -1)

    assert compare(Model(Split), traced) == BLOCKS - 1


def test_results_that_share_memory_leave_the_block(traced: list[BlockTracing]) -> None:
    class Halves(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return y.chunk(2, -1)

    class Joined(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            left, right = block(x)
            return torch.cat([right, left], -1)

    assert compare(Joined(Halves), traced) == 0


def test_a_view_of_the_input_leaves_the_block(traced: list[BlockTracing]) -> None:
    class Viewed(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return y, x.transpose(0, 1)

    class Joined(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y, turned = block(x)
            return y + turned.transpose(0, 1)

    assert compare(Joined(Viewed), traced) == 0


def test_results_in_a_dictionary_beside_an_argument(traced: list[BlockTracing]) -> None:
    class Named(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return {"given": x, "hidden": (y, self.index), "mean": y.mean()}

    class Summed(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            found = block(x)
            assert found["given"] is x
            return found["hidden"][0] + found["mean"] * found["hidden"][1]

    assert compare(Summed(Named), traced) == BLOCKS - 1


def test_a_result_that_only_some_callers_use(traced: list[BlockTracing]) -> None:
    class Pair(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            return y, y.std(-1, keepdim=True)

    class Uses(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y, spread = block(x)
            return y + spread if block.index in (1, 4) else y

    assert compare(Uses(Pair), traced) == BLOCKS - 1


def test_a_loss_that_each_block_keeps(traced: list[BlockTracing]) -> None:
    class Losing(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            self.extra = y.square().mean()
            return y

    class Summed(Model):
        def loss(self, x: Tensor) -> Tensor:
            return x.mean() + sum(block.extra for block in self.blocks)

    assert compare(Summed(Losing), traced) == 0


def test_a_list_that_blocks_extend(traced: list[BlockTracing]) -> None:
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

    assert compare(Summed(Listing), traced) == 0


@pytest.mark.parametrize("first", [1, 2, 3])
def test_values_of_an_earlier_block_are_not_taken_for_own_ones(
    traced: list[BlockTracing], first: int
) -> None:
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

    assert compare(Sequence(Sharing), traced) == 0


def test_a_tensor_that_the_block_marks(traced: list[BlockTracing]) -> None:
    class Marking(Block):
        def change(self, x: Tensor, y: Tensor) -> Any:
            part: Any = y.tanh()
            seen = hasattr(part, "marked")
            part.marked = True
            return part.sigmoid() if seen else part.relu()

    assert compare(Model(Marking), traced) == BLOCKS - 1


def test_blocks_that_write_in_place(traced: list[BlockTracing]) -> None:
    class Writing(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            y.add_(1.0)
            return y

    assert compare(Model(Writing), traced) == 0


def test_results_that_the_caller_writes_in_place(traced: list[BlockTracing]) -> None:
    class Caller(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            y = block(x)
            y += x
            y[:, 0].mul_(2.0)
            return y

    assert compare(Caller(), traced) == BLOCKS - 1


def test_blocks_that_create_tensors(traced: list[BlockTracing]) -> None:
    class Creating(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.maximum(y, torch.full((), -1.0)) + torch.arange(WIDTH)

    assert compare(Model(Creating), traced) == 0


def test_frozen_blocks(traced: list[BlockTracing]) -> None:
    class Frozen(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.requires_grad_(index >= 3)

    assert compare(Model(Frozen, 6), traced) == 4  # two kinds of three


def test_half_of_the_blocks_without_gradients(traced: list[BlockTracing]) -> None:
    class Halved(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(block.index >= 2):
                return block(x)

    compare(Halved(), traced)


def test_gradient_mode_within_blocks(traced: list[BlockTracing]) -> None:
    class Partly(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                scale = y.abs().mean()
            return y / scale

    assert compare(Model(Partly), traced) == 0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 3 * gradient


def test_custom_functions_in_blocks(traced: list[BlockTracing]) -> None:
    class Custom(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return Doubled.apply(y)

    assert compare(Model(Custom), traced) == 0


def test_blocks_that_share_a_weight(traced: list[BlockTracing]) -> None:
    model = Model()
    model.blocks[3].up.weight = model.blocks[1].up.weight
    assert compare(model, traced) == BLOCKS - 1


def test_a_block_whose_weights_are_tied_within_it(traced: list[BlockTracing]) -> None:
    class Square(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            if index == 3:
                self.two.weight = self.one.weight

        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return self.two(self.one(y))

    assert compare(Model(Square), traced) == 0


def test_inputs_of_other_strides(traced: list[BlockTracing]) -> None:
    class Turning(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            if block.index != 3:
                return block(x)
            return block(x.transpose(0, 1).contiguous().transpose(0, 1))

    assert compare(Turning(), traced) == 0


def test_a_difference_that_the_model_catches(traced: list[BlockTracing]) -> None:
    class Caught(Model):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            try:
                return block(x)
            except Exception:
                return x

    class Branching(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            return y.relu() if self.index == 3 else y.sigmoid()

    assert compare(Caught(Branching), traced) == 0


def test_next_attempt_finds_the_attributes_of_the_first(traced: list[BlockTracing]) -> None:
    class Branching(Block):
        ready = False

        def change(self, x: Tensor, y: Tensor) -> Tensor:
            if not self.ready and self.index == 4:
                self.ready = True
                return y.relu()
            return y.sigmoid()

    with pytest.raises(CompileError, match=r"changes blocks.4.ready and computes something else"):
        compare(Model(Branching), traced)
    assert traced[0].differing


def test_an_error_in_a_later_block_is_explained_as_always(traced: list[BlockTracing]) -> None:
    class Failing(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            if self.index == 3:
                raise ValueError("no such block")
            return y

    with pytest.raises(CompileError, match=r"cannot capture blocks.3 .*no such block"):
        capture(Model(Failing), {"x": torch.randn(2, 3, WIDTH)})


def test_tensors_outside_of_the_blocks(traced: list[BlockTracing]) -> None:
    class Masked(Block):
        def forward(self, x: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
            return self.body(x) * mask + (0.0 if positions is None else positions)

    class Given(Model):
        def __init__(self) -> None:
            super().__init__(Masked)
            self.register_buffer("positions", torch.randn(3, WIDTH))

        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x, x.detach() > 0, positions=self.positions)

    assert compare(Given(), traced) == BLOCKS - 1


class Repeated(RandomModule):
    """A random module of five equal blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        block = self.blocks[seed % len(self.blocks)]
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(BLOCKS))


def check_repeated(seed: int, traced: list[BlockTracing], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(recording, "_FEWEST_CALLS", 1)
    inputs = {name: torch.zeros(ROWS, COLUMNS) for name in ("x", "z")}
    precision: Precision = ("fp32", "bf16")[seed % 2]
    refused = None
    try:
        return compare(Repeated(seed), traced, inputs, precision)
    except CompileError as error:
        refused = str(error)
    monkeypatch.setattr(tracing, "_FEWEST_BLOCKS", 1 << 30)
    with pytest.raises(CompileError) as expected:
        compare(Repeated(seed), traced, inputs, precision)
    assert str(expected.value) == refused
    return 0


@pytest.mark.parametrize("seed", range(30))
def test_random_blocks(
    seed: int, traced: list[BlockTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_repeated(seed, traced, monkeypatch)


@pytest.mark.long
def test_many_random_blocks(traced: list[BlockTracing], monkeypatch: pytest.MonkeyPatch) -> None:
    equal = [check_repeated(seed, traced, monkeypatch) for seed in range(30, 230)]
    assert sum(map(bool, equal)) >= 10
