"""Location of a non-finite loss: repeats the forward sweep for the micro-batch alone.

Dropout is keyed by step and micro-batch, so a repeated computation gives the same bits as the
first.
"""

import math
from collections.abc import Sequence
from typing import NoReturn

from penstock.engine import Batch, Engine, compute, micro_batches
from penstock.errors import NonFiniteError
from penstock.program import Program
from penstock.step.micro_batches import Batches
from penstock.step_schedule import StepSchedule
from penstock.store import Store


class NonFiniteLossError(NonFiniteError):
    """The loss of a micro-batch is not finite; the stage where this began is not known yet."""

    def __init__(self, step: int, number: int, loss: float) -> None:
        super().__init__(f"step {step}: the loss of micro-batch {number} is {loss}")
        self.step, self.number, self.loss = step, number, loss


def require_finite(step: int, losses: Sequence[float]) -> None:
    """Refuse the losses of a step if one is not finite.

    **Raises:** `NonFiniteLossError` for the first non-finite loss.
    """
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise NonFiniteLossError(step, number, loss)


def trace(
    error: NonFiniteLossError,
    program: Program,
    engines: Sequence[Engine],
    store: Store,
    batches: Batches,
    seed: int,
) -> NoReturn:
    """Find the first non-finite stage by another forward sweep, and raise an error that names it.

    Args:
        engines: run the sweep. All of them run the same sweep, since the engines of a group act
            together. They discard their step.
        store: at the step before the failed one; discards the step's gradients.

    Raises:
        NonFiniteError: with the name of the stage.
    """
    store.discard()
    done = store.step
    rows = micro_batches(batches.micro_batch(done, error.number), 1)
    for engine in engines:
        engine.begin(Batch(rows, error.number, batches.micro_batches, seed, done))
    found = None
    for operation in StepSchedule.forward_only(program).operations:
        stage = operation.stage
        weights = store.fetch(stage, operation.positions)
        for engine in engines:
            engine.load(stage, weights)
        for engine in engines:
            compute(engine, operation)
        finite = [engine.is_finite(stage) for engine in engines]
        if not all(finite):
            found = f"{program.stages[stage].name} is the first stage whose output is not finite"
            break
    if found is None:
        found = (
            "computed again here, the output of every stage is finite: check the hardware of the "
            "engine that computed it"
        )
    raise NonFiniteError(
        f"step {error.step}: the loss is {error.loss}; {found}. The step was not committed: the "
        f"weights are those of step {done}. Check the batch, or start a run with a lower "
        "optimizer.learning_rate in another run.dir."
    )
