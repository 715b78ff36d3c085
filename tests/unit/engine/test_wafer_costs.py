"""Costs of a stage's operators with the masks of a step, against costs compiled for these masks."""

from __future__ import annotations

import pytest
import torch
from sweeps import compiled
from torch import nn

from penstock.engine import MaskState, WaferPlan, costs_at, plan_wafer, stage_cycles_of
from penstock.engine.wafer_plan import head_size_of, tokens_of
from penstock.errors import BudgetError
from penstock.wafer import SIM, Mesh, WaferOptions

ROWS = {"x": torch.ones(6, 8)}
WEIGHT = "first.weight"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


def kind_with(capacity):
    program = compiled(Net(), ROWS, sparse={WEIGHT: capacity})
    return program, next(stage.kind for stage in program.stages if stage.kind.sparse)


@pytest.mark.parametrize("executable", ["forward", "backward", "recompute", "turn"])
@pytest.mark.parametrize("kept", [20, 77, 150])
def test_costs_with_fewer_entries_are_those_of_a_smaller_mask(executable, kept):
    _, kind = kind_with(150)
    _, wanted = kind_with(kept)
    [position] = kind.sparse
    found = costs_at(kind, executable, 6, {position: MaskState(kept)})
    assert found == wanted.costs[executable]


def test_gradient_of_every_element_is_a_dense_product_over_tokens():
    _, kind = kind_with(40)
    [position] = kind.sparse
    usual = costs_at(kind, "turn", 6, {position: MaskState(40)})
    dense = costs_at(kind, "turn", 6, {position: MaskState(40, dense_gradient=True)})
    changed = [(a, b) for a, b in zip(usual, dense, strict=True) if a != b]
    [(before, after)] = changed
    assert before.name == "sparse_weight_gradient"
    assert (after.work, after.layout, after.flops) == ("product", "tokens", 2 * 6 * 8 * 24)


def test_dense_kinds_have_the_costs_of_the_compiler():
    program = compiled(Net(), ROWS)
    kind = program.stages[-1].kind
    assert costs_at(kind, "turn", 6, {}) == kind.costs["turn"]


def test_tokens_are_the_rows_with_which_products_have_whole_weights():
    program = compiled(Net(), ROWS)
    assert {tokens_of(stage.kind) for stage in program.stages} == {6}
    assert {head_size_of(stage.kind) for stage in program.stages} == {64}  # no attention


class Attending(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size, self.joined = size, nn.Linear(8, 6 * size)

    def forward(self, x):
        heads = self.joined(x).view(*x.shape[:2], 2, 3 * self.size).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(*heads.split(self.size, -1)).sum()


@pytest.mark.parametrize("size", [32, 12])  # computed by a kernel of Penstock, and by PyTorch
def test_head_size_is_that_of_the_attention_in_a_stage(size):
    program = compiled(Attending(size), {"x": torch.randn(1, 5, 8)})
    assert head_size_of(program.stages[-1].kind) == size


def test_stages_of_a_program_are_placed_by_kind():
    program = compiled(Net(), ROWS)
    plan = plan_wafer(program, WaferOptions(Mesh(4, 4), SIM))
    assert isinstance(plan, WaferPlan)
    assert set(plan.kinds) == {stage.kind.digest for stage in program.stages}
    kind = program.stages[-1].kind
    both = stage_cycles_of(kind, "turn", plan).cycles
    assert both > stage_cycles_of(kind, "infer", plan).cycles > 0


@pytest.mark.parametrize("cycles", ["closed_form", "simulated"])
def test_stage_beyond_the_cores_memory_is_named(cycles):
    program = compiled(Net(), {"x": torch.ones(4096, 8)})
    name = next(s.name for s in program.stages if any("first" in w for w in s.weights))
    with pytest.raises(BudgetError) as refused:
        plan_wafer(program, WaferOptions(Mesh(2, 2), SIM, cycles))
    text = str(refused.value)
    assert text.startswith(f"engine.mesh: stage {name}: 24 x 8 with 4096 tokens on 2x2 cores needs")
    assert text.endswith("give fewer tokens (a smaller batch.micro) or take a larger mesh")
