"""Stages with equal text share a kind; everything that decides a kind is in the text."""

import pytest
import torch
from torch import nn

from penstock.compiler import CompileOptions, compile_module
from penstock.compiler.build import _ProgramAssembly


class Block(nn.Module):
    def __init__(self, scale=2.0, dropout=0.0, width=8, own_bias=True):
        super().__init__()
        self.inner = nn.Linear(8, width, bias=own_bias)
        self.outer = nn.Linear(width, 8)
        self.scale, self.dropout = scale, nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.outer(torch.relu(self.inner(x)) * self.scale))


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def kinds_of_blocks(*blocks, **options):
    """Return the kinds of the blocks, each by the number of the first block that has it."""
    program = compile_module(Model(*blocks), {"x": torch.zeros(4, 8)}, CompileOptions(**options))
    stages = [stage for stage in program.stages if stage.weights]
    kinds = [stage.kind.digest for stage in stages]
    return [kinds.index(kind) for kind in kinds]


def test_equal_blocks_have_one_kind_but_the_first_and_the_last():
    kinds = kinds_of_blocks(*(Block() for _ in range(6)))
    assert kinds[1:-1] == [1, 1, 1, 1]  # the input of the first needs no gradient


@pytest.mark.parametrize(
    "odd",
    [
        lambda: Block(scale=3.0),
        lambda: Block(scale=2),
        lambda: Block(dropout=0.5),
        lambda: Block(width=16),
        lambda: Block(own_bias=False),
    ],
)
def test_block_that_differs_has_a_kind_of_its_own(odd):
    blocks = [Block(), Block(), odd(), Block(), Block()]
    assert kinds_of_blocks(*blocks)[1:4] == [1, 2, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"freeze": ("blocks.2.inner.weight",)},
        {"freeze": ("*.inner.*",), "bfloat16": frozenset({"blocks.2.inner.weight"})},
        {"sparse": {"blocks.2.inner.weight": 20}},
    ],
)
def test_block_whose_weight_is_treated_differently_has_a_kind_of_its_own(options):
    kinds = kinds_of_blocks(*(Block() for _ in range(5)), **options)
    assert kinds[1:4] == [1, 2, 1]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("sparse", [False, True])
def test_program_is_the_same_if_each_stage_has_a_graph(monkeypatch, dropout, sparse):
    model = Model(*(Block(dropout=dropout) for _ in range(4)), Block(scale=3.0))
    chosen = {f"blocks.{n}.outer.weight": 20 for n in range(4)} if sparse else {}

    def stages():
        program = compile_module(model, {"x": torch.zeros(4, 8)}, CompileOptions(sparse=chosen))
        return [
            (s.name, s.kind.digest, s.kind.name, s.weights, s.inputs, s.outputs, s.first_dropout)
            for s in program.stages
        ]

    found = stages()
    texts = iter(range(100))
    monkeypatch.setattr(_ProgramAssembly, "_stage_text", lambda *_: str(next(texts)))
    assert found == stages()
