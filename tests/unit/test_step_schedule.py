"""The schedule of a step: which operations there are, what each fetches, returns and costs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from store_programs import make_program

from penstock.program import Program, SparseUse, largest_stage
from penstock.sparsity import RigL, SparseEvolutionaryTraining, StaticMasks, exchanging
from penstock.step_schedule import ByStep, StepSchedule, sweep_order
from penstock.weight_formats import format_of

LAYERS = (
    {"embed": (4, 2), "position": (3, 2)},
    {"one.weight": (2, 2), "one.bias": (2,)},
    {"two.weight": (2, 2), "two.bias": (2,)},
    {"norm": (2,), "embed": (4, 2)},
)


def program_of(
    reads=((), (0,), (0,), (0, 1)), gradients=(0, 1, 2, 3), frozen=("position",)
) -> Program:
    """Return a program of four stages.

    Args:
        reads: per stage, the positions of the weights that its backward reads.
        gradients: the stages whose outputs have a gradient.
    """
    program = make_program(LAYERS, frozen=frozen)
    stages = []
    for stage in program.stages:
        weight = 10**stage.index
        kind = dataclasses.replace(
            stage.kind,
            backward_weights=reads[stage.index],
            outputs_grad=(stage.index in gradients,),
            forward_flops=weight,
            backward_flops=2 * weight,
            forward_transient_bytes=3 * weight,
            backward_transient_bytes=4 * weight,
            recompute_transient_bytes=5 * weight,
            turn_transient_bytes=6 * weight,
        )
        stages.append(dataclasses.replace(stage, kind=kind))
    return dataclasses.replace(program, stages=tuple(stages))


def test_training_step_is_forward_turn_backward():
    operations = StepSchedule.of(program_of()).operations
    assert [(each.number, each.stage, each.sweep) for each in operations] == [
        (0, 0, "forward"),
        (1, 1, "forward"),
        (2, 2, "forward"),
        (3, 3, "turn"),
        (4, 2, "backward"),
        (5, 1, "backward"),
        (6, 0, "backward"),
    ]


def test_a_program_of_one_stage_only_turns():
    assert sweep_order(1) == [(0, "turn")]


def test_backward_fetches_the_weights_it_reads_or_all_with_recomputation():
    operations = StepSchedule.of(program_of(), recompute={1}).operations
    assert [each.positions for each in operations] == [
        (0, 1),
        (0, 1),
        (0, 1),
        (0, 1),
        (0,),  # kept: only what the backward reads
        (0, 1),  # made again
        (),  # the gradient of an embedding reads no weight
    ]
    assert [each.weights for each in operations[4:]] == [
        ("two.weight",),
        ("one.weight", "one.bias"),
        (),
    ]


def test_gradients_return_from_the_turn_on_for_weights_that_train():
    operations = StepSchedule.of(program_of()).operations
    assert [each.gradients for each in operations] == [
        (),
        (),
        (),
        ("norm", "embed"),
        ("two.weight", "two.bias"),
        ("one.weight", "one.bias"),
        ("embed",),
    ]


def test_stages_below_the_first_trained_weight_return_no_gradients():
    frozen = ("embed", "position", "one.weight", "one.bias")
    schedule = StepSchedule.of(
        program_of(reads=((), (), (0,), (0,)), gradients=(2, 3), frozen=frozen)
    )
    below = [each for each in schedule.operations[4:] if each.stage < 2]
    assert [(each.stage, each.weights, each.gradients) for each in below] == [
        (1, (), ()),
        (0, (), ()),
    ]
    assert schedule.operations[3].gradients == ("norm",)


def test_stage_without_output_gradient_returns_no_weight_gradients():
    schedule = StepSchedule.of(program_of(gradients=(1, 2, 3)))
    assert schedule.operations[-1].gradients == ()


def test_operations_cost_what_their_sweep_computes():
    operations = StepSchedule.of(program_of(), recompute={2}).operations
    assert [each.flops for each in operations] == [1, 10, 100, 3000, 300, 20, 2]
    assert [each.transient_bytes for each in operations] == [3, 30, 300, 6000, 500, 40, 4]


def sparse(program: Program, dtype: torch.dtype) -> Program:
    """Return the program with 3 entries of `one.weight` and 2 of `two.weight`, which 5 and 7 tokens
    of a micro-batch read."""
    weights, stages = dict(program.weights), list(program.stages)
    for stage, name, capacity, tokens in ((1, "one.weight", 3, 5), (2, "two.weight", 2, 7)):
        weights[name] = dataclasses.replace(
            weights[name], format=format_of(dtype, is_sparse=True), capacity=capacity
        )
        kind = dataclasses.replace(
            stages[stage].kind, sparse={0: SparseUse(capacity, product_tokens=(tokens,))}
        )
        stages[stage] = dataclasses.replace(stages[stage], kind=kind)
    return dataclasses.replace(program, weights=weights, stages=tuple(stages))


@pytest.mark.parametrize(("dtype", "rounded"), [(torch.float32, 0), (torch.bfloat16, 2)])
def test_dense_gradients_cost_more_where_gradients_return(dtype, rounded):
    program = sparse(program_of(), dtype)
    policy = exchanging(RigL, 9, begin=3, end=9, every=3)
    schedules = StepSchedule.by_step(program, {1}, policy)
    usual, dense = schedules(1).operations, schedules(3).operations
    assert usual == schedules(2).operations == StepSchedule.of(program, {1}).operations
    assert [each.dense_gradients for each in usual] == [()] * 7
    assert [each.dense_gradients for each in dense] == [
        *[()] * 4,
        ("two.weight",),
        ("one.weight",),
        (),
    ]
    more = {
        4: (2 * 7 * 2, 4 * 2 + 4 * rounded, 4 * 2),  # 2 of 4 elements are absent
        5: (2 * 5 * 1, 4 * 1 + 4 * rounded, 4 * 1),
    }
    for number, (one, other) in enumerate(zip(usual, dense, strict=True)):
        flops, transient, gradient = more.get(number, (0, 0, 0))
        assert other.flops - one.flops == flops
        assert other.transient_bytes - one.transient_bytes == transient
        assert other.gradient_bytes - one.gradient_bytes == gradient
        assert other.weights == one.weights
        assert other.gradients == one.gradients
    assert [each.gradient_bytes for each in usual] == [0, 0, 0, 40, 4 * (2 + 2), 4 * (3 + 2), 32]


def test_only_a_policy_that_grows_by_gradients_has_a_second_schedule():
    program = sparse(program_of(), torch.float32)
    policy = exchanging(SparseEvolutionaryTraining, 9, begin=3, end=9, every=3)
    for each in (None, StaticMasks(), policy):
        schedules = StepSchedule.by_step(program, (), each)
        assert schedules.dense is schedules.usual == StepSchedule.of(program)


def test_frozen_sparse_weights_have_no_dense_gradients():
    program = sparse(program_of(frozen=("one.weight",)), torch.float32)
    operations = StepSchedule.of(program, dense_gradients=True).operations
    assert {name for each in operations for name in each.dense_gradients} == {"two.weight"}


def test_a_value_of_each_step_is_mapped_once_per_schedule():
    made = []

    def double(value):
        made.append(value)
        return 2 * value

    values = ByStep(1, 5, lambda step: step == 2).map(double)
    assert [values(step) for step in (1, 2, 3)] == [2, 10, 2]
    always = ByStep.always(7).map(double)
    assert [always(step) for step in (1, 2)] == [14, 14]
    assert made == [1, 5, 7]


def test_a_forward_sweep_infers_every_stage_with_all_its_weights():
    schedule = StepSchedule.forward_only(program_of())
    assert {each.sweep for each in schedule.operations} == {"infer"}
    assert [each.stage for each in schedule.operations] == [0, 1, 2, 3]
    assert [each.weights for each in schedule.operations] == [tuple(layer) for layer in LAYERS]
    assert {each.gradients for each in schedule.operations} == {()}


def test_the_turn_is_between_the_sweeps():
    sweeps = [each.sweep for each in StepSchedule.of(program_of()).operations]
    assert sweeps == 3 * ["forward"] + ["turn"] + 3 * ["backward"]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (lambda weight: weight.elements, ("stage0", 14)),
        (lambda weight: weight.stream_bytes, ("stage0", 28)),
        (lambda weight: 1 if "o." in weight.name else 0, ("stage2", 2)),
    ],
)
def test_largest_stage_by_the_given_measure(size, expected):
    assert largest_stage(make_program(LAYERS, stream_dtype=torch.bfloat16), size) == expected
