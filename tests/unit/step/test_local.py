"""Steps of this process and of others follow the schedule, whichever a step is given."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from store_programs import make_program, random_weights, training_store

from penstock.collectives import LocalFabric
from penstock.collectives.tree_reduce import PartialSum
from penstock.distributed.run_spec import placement_of, transfers_of
from penstock.distributed.worker.engine_executor import LocalEngineExecutor
from penstock.distributed.worker.shard_executor import LocalShardExecutor
from penstock.engine.slots import Arrived
from penstock.errors import NoTrainingError
from penstock.planning.step_flops import StepFlops
from penstock.step.local import StepRunner
from penstock.step_schedule import ByStep, StepSchedule

LAYERS = (
    {"embed": (40, 3), "position": (7, 3)},
    {"one.weight": (5, 3), "one.bias": (5,)},
    {"two.weight": (4, 4), "two.bias": (4,)},
    {"norm": (3,), "head": (6, 3)},
)
READS = ((), (0,), (0, 1), (0, 1))  # by the backward of each stage


def program():
    made = make_program(LAYERS, frozen=("position",))
    stages = [
        dataclasses.replace(
            stage,
            kind=dataclasses.replace(
                stage.kind, backward_weights=READS[stage.index], outputs_grad=(True,)
            ),
        )
        for stage in made.stages
    ]
    return dataclasses.replace(made, stages=tuple(stages))


PROGRAM = program()
RECOMPUTE = (1,)
ALL = [
    ("embed", "position"),
    ("one.weight", "one.bias"),
    ("two.weight", "two.bias"),
    ("norm", "head"),
]
EXPECTED = [
    ("load", 0, ALL[0]),
    ("forward", 0),
    ("load", 1, ALL[1]),
    ("forward", 1),
    ("load", 2, ALL[2]),
    ("forward", 2),
    ("load", 3, ALL[3]),
    ("turn", 3),
    ("load", 2, ALL[2]),
    ("backward", 2),
    ("load", 1, ALL[1]),  # all, since its forward is made again
    ("backward", 1),
    ("load", 0, ()),
    ("backward", 0),
]
"""One step with `RECOMPUTE`, written out."""


class RecordingEngine:
    """Computes nothing: notes what it is asked for, and knows weights by their values."""

    memory = SimpleNamespace(peak_bytes=0)

    def __init__(self, weights, stages_ahead=0) -> None:
        self.weights, self.stages_ahead = weights, stages_ahead
        self.calls: list[tuple] = []

    def begin(self, batch) -> None:
        self.total = batch.total

    def load(self, stage, weights) -> None:
        names = tuple(
            name
            for given in weights
            for name in LAYERS[stage]
            if torch.equal(given, self.weights[name])
        )
        assert len(names) == len(weights)
        self.calls.append(("load", stage, names))

    def forward(self, stage) -> None:
        self.calls.append(("forward", stage))

    def turn(self, stage):
        return self._gradients("turn", stage)

    def backward(self, stage):
        return self._gradients("backward", stage)

    def _gradients(self, sweep, stage):
        self.calls.append((sweep, stage))
        kind = PROGRAM.stages[stage].kind
        specs = [w for w, trains in zip(kind.weights, kind.trainable, strict=True) if trains]
        made = tuple(torch.full(spec.shape, 1.0 + stage) for spec in specs)
        return Arrived([PartialSum(0, 0, made)])

    def losses(self):
        return [1.5]


def store():
    made = training_store(PROGRAM)
    made.load(random_weights(PROGRAM, 3).items())
    return made


def weights_of(made):
    return {name: made.master(name) for name in PROGRAM.weights}


def runner(made, engine, schedule_of):
    layout = SimpleNamespace(
        program=PROGRAM,
        micro_batches=1,
        schedule_of=schedule_of,
        flops=StepFlops(PROGRAM, 1),
        sparse=None,
        plan=SimpleNamespace(wafer=None),
    )
    part = SimpleNamespace(rows={"x": torch.zeros(1, 2)}, numbers=range(1))
    batches = SimpleNamespace(
        micro_batches=1, parts=lambda step, engines: [part], loss_scale=lambda step, parts: 1.0
    )
    return StepRunner(layout, made, LocalFabric(1), [engine], batches, seed=0, tokens=2)


def test_local_step_follows_the_schedule():
    made = store()
    engine = RecordingEngine(weights_of(made))
    done = runner(made, engine, lambda step: StepSchedule.of(PROGRAM, RECOMPUTE)).run()
    assert engine.calls == EXPECTED
    assert (done.step, done.loss) == (1, 1.5)


def test_weights_load_one_operation_ahead():
    """Where they are there."""
    made = store()
    engine = RecordingEngine(weights_of(made), stages_ahead=1)
    steps = runner(made, engine, lambda step: StepSchedule.of(PROGRAM, RECOMPUTE))
    steps._fetches.is_ready = lambda: True
    steps.run()
    assert sorted(engine.calls) == sorted(EXPECTED)
    loads = [
        call[1] for call in engine.calls[: engine.calls.index(("turn", 3))] if call[0] == "load"
    ]
    assert loads == [0, 1, 2, 3, 2]
    assert engine.calls[:3] == [EXPECTED[0], EXPECTED[2], EXPECTED[1]]


def test_weights_that_would_be_waited_for_are_loaded_when_they_are_needed():
    made = store()
    engine = RecordingEngine(weights_of(made), stages_ahead=2)
    steps = runner(made, engine, lambda step: StepSchedule.of(PROGRAM, RECOMPUTE))
    steps._fetches.is_ready = lambda: False
    steps.run()
    backward = engine.calls.index(("forward", 2)) + 1
    assert engine.calls[:backward] == EXPECTED[:backward]
    assert sorted(engine.calls) == sorted(EXPECTED)
    assert engine.calls.index(("load", 1, ALL[1])) < engine.calls.index(("turn", 3))


@pytest.mark.parametrize("stages_ahead", [0, 1])
def test_losses_are_read_when_the_operation_after_the_turn_has_been_queued(stages_ahead):
    """So that a GPU does not wait for the host in between."""
    made = store()
    engine = RecordingEngine(weights_of(made), stages_ahead)
    losses = engine.losses
    engine.losses = lambda: engine.calls.append(("losses",)) or losses()
    runner(made, engine, lambda step: StepSchedule.of(PROGRAM, RECOMPUTE)).run()
    without_loads = [call[:2] for call in engine.calls if call[0] != "load"]
    assert without_loads[2:6] == [("forward", 2), ("turn", 3), ("backward", 2), ("losses",)]


@pytest.mark.parametrize("recompute", [(), (1,), (0, 1, 2)])
def test_distributed_step_equals_local_step(recompute):
    schedule = StepSchedule.of(PROGRAM, recompute)
    here = store()
    local = RecordingEngine(weights_of(here))
    runner(here, local, lambda step: schedule).run()

    there = store()
    engine = RecordingEngine(weights_of(there))
    shard = LocalShardExecutor(SimpleNamespace(store=there), 0, ByStep.always(schedule))
    work = LocalEngineExecutor(engine, PROGRAM, ByStep.always(schedule))
    transfers = transfers_of(PROGRAM, schedule, placement_of(PROGRAM, 1), 1)
    shard.begin(1)
    part = {"first": 0, "total": 1, "count": 1, "seed": 0, "scale": 1.0}
    work.begin(1, part, {"x": np.zeros((1, 2), np.float32)})
    for operation in transfers.operations:
        for piece, payload in zip(operation.weights, shard.fetch(operation), strict=True):
            work.place(operation, piece, payload)
        nodes = work.compute(operation)
        if operation.gradients:
            (node,) = nodes
            flat = {
                number: node.tensors[piece.tensor].view(-1)[piece.begin : piece.end].numpy()
                for number, piece in enumerate(operation.gradients)
            }
            shard.receive(operation, flat)
    there.commit()
    assert engine.calls == local.calls
    assert there.content_hash() == here.content_hash()


def test_each_step_follows_the_schedule_of_its_number():
    """A schedule that asks for other gradients at step 2: those of stage 1 do not return."""
    whole, asked = StepSchedule.of(PROGRAM), []
    without = StepSchedule(
        tuple(
            dataclasses.replace(each, gradients=() if each.stage == 1 else each.gradients)
            for each in whole.operations
        )
    )

    def schedule_of(step: int) -> StepSchedule:
        asked.append(step)
        return without if step == 2 else whole

    made = store()
    engine = RecordingEngine({})
    engine.load = lambda stage, weights: None  # they change from step to step
    steps = runner(made, engine, schedule_of)
    assert steps.run().step == 1
    with pytest.raises(
        NoTrainingError, match="step 2: no gradients were received from stage stage1"
    ):
        steps.run()
    assert asked == [1, 2]
    assert made.step == 1
