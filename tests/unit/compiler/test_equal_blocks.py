"""Equal blocks are traced once, and the graph is the one that tracing every block gives."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compared_blocks import BLOCKS, WIDTH, Block, Model, captured_with, compare
from compared_programs import facts_of
from random_modules import RandomModule
from torch import Tensor, nn
from torch.nn import functional
from views_and_writes import ROWS, WIDTH as COLUMNS

from penstock.compiler import compile_module
from penstock.compiler.capture import Precision, capture
from penstock.compiler.equal_blocks import recording, tracing
from penstock.errors import CompileError
from penstock.models import ModelSource


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
    "num_hidden_layers": 6,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "fields", "equal"),
    [
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 6, "vocab_size": 64}, 5),
        ("llama", SIZES | {"num_key_value_heads": 2}, 5),
        # Attention of two widths in turns, so that there are two groups of three.
        ("gemma2", SIZES | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}, 4),
        ("bert", SIZES, 5),
        # The first block differs from the others: its input is no view.
        ("opt", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}, 3),
        ("gpt_neox", SIZES, 5),
        # Every fourth block has no positions.
        ("smollm3", SIZES | {"num_key_value_heads": 2}, 4),
        # Its blocks create tensors.
        ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 6, "n_head": 4}, 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_library_models(
    family: str, fields: dict[str, Any], equal: int, precision: Precision
) -> None:
    source = ModelSource.from_hf_config({"model_type": family, **fields})
    assert compare(source.module, dict(source.example_inputs(2, 8)), precision) == equal


@pytest.mark.parametrize("preset", ["gpt3-125m", "llama-7b", "bert-base"])
def test_program_is_the_one_of_tracing_every_block(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSource.from_preset(preset, {"num_hidden_layers": 5})

    def facts() -> dict[str, Any]:
        program = compile_module(source.module, dict(source.example_inputs(1, 8)), name=preset)
        found = facts_of(program)
        for named in ("values", "prelude", "prelude_outputs"):  # by nodes, whose names differ
            del found[named]
        found["stages"] = [(stage["name"], stage["kind"]) for stage in found["stages"]]
        return found

    shared = facts()
    monkeypatch.setattr(tracing, "FEWEST_BLOCKS", 1 << 30)
    assert shared == facts()


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


def test_blocks_that_write_in_place() -> None:
    class Writing(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            y.add_(1.0)
            return y

    assert compare(Model(Writing)) == 0


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


def test_blocks_of_complex_numbers() -> None:
    class Conjugated(Block):
        def change(self, x: Tensor, y: Tensor) -> Tensor:
            z = torch.complex(y, x).conj()
            return (z * z).real + z.imag

    assert compare(Model(Conjugated)) == 0


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


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        pytest.param(30, 80, marks=pytest.mark.long),
        pytest.param(80, 380, marks=pytest.mark.slow),
    ],
)
def test_many_random_blocks(begin: int, end: int) -> None:
    equal = [compare_repeated(seed) for seed in range(begin, end)]
    assert sum(map(bool, equal)) >= (end - begin) / 20
