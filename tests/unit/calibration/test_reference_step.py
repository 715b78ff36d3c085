"""The reference step computes what its model does, and its ratios are those of the times given."""

import pytest
import torch

from penstock.calibration.reference_step import (
    ratios_in_step,
    reference_program,
    reference_step,
    times_alone,
)
from penstock.machines import EnginePart


def engine(**changes):
    rates = [
        {"work": "product", "rates": [1e11]},
        {"work": "product", "dtype": "bfloat16", "rates": [4e11]},
        {"work": "pointwise", "rates": [1e10]},
    ]
    given = {"is_host": True, "operator_seconds": 1e-6, "stage_seconds": 1e-5, "rates": rates}
    return EnginePart.model_validate({**given, **changes})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_runs_both_sweeps_and_gives_the_loss_of_an_untrained_model(dtype):
    run = reference_step(reference_program(dtype, "torch"))
    with torch.no_grad():
        losses = run()
    uniform = torch.tensor(4096.0).log().item()
    assert losses == pytest.approx([uniform] * 2, rel=0.02)
    assert losses[0] != losses[1]  # two micro-batches


def test_operators_of_both_types_are_counted_and_so_is_the_rest():
    alone = times_alone(reference_program("bfloat16", "torch"), engine())
    assert alone.operators["bfloat16"] > 0
    wide = times_alone(reference_program("float32", "torch"), engine())
    assert wide.operators["bfloat16"] == 0
    assert wide.operators["float32"] > 2 * alone.operators["bfloat16"]
    without_calls = engine(operator_seconds=0.0, stage_seconds=0.0)
    fewer = times_alone(reference_program("float32", "torch"), without_calls)
    assert fewer.operators == pytest.approx(wide.operators)
    assert fewer.besides < wide.besides


def test_ratios_are_those_that_give_the_seconds_of_the_steps():
    seconds = {}
    for dtype in ("float32", "bfloat16"):
        alone = times_alone(reference_program(dtype, "torch"), engine())
        seconds[dtype] = alone.besides + 0.9 * alone.operators["float32"]
        seconds[dtype] += 1.3 * alone.operators["bfloat16"]
    ratios = ratios_in_step(engine(), "torch", seconds)
    assert ratios == pytest.approx({"float32": 0.9, "bfloat16": 1.3})


def test_a_type_that_was_not_measured_has_no_ratio():
    assert ratios_in_step(engine(), "torch", {}) == {}


def test_a_step_that_is_shorter_than_its_calls_alone_gives_no_ratio():
    assert ratios_in_step(engine(operator_seconds=1.0), "torch", {"float32": 0.1}) == {}
