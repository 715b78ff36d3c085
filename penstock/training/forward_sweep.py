"""A forward sweep of a program without a backward one, for evaluation and generation."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.engine import Engine, compute
from penstock.sparsity import StreamedWeight
from penstock.step_schedule import StepSchedule

FetchWeights = Callable[[Sequence[str]], Sequence[StreamedWeight]]

_Found = TypeVar("_Found")


def sweep_forward(
    engine: Engine,
    fetch: FetchWeights,
    settle: Callable[[], object],
    read: Callable[[], _Found],
) -> _Found:
    """Compute the forward sweep of a batch that has begun; return what `read` reads of it.

    A store on flash has memory for the pairs of stages that follow each other in training. So
    `settle`, the store's `flush`, is called before and after: a sweep begins without pending
    updates, and leaves no weights in use.

    **Arguments:** `fetch` returns weights by name. `read` is called after the last stage.
    """
    settle()
    try:
        for operation in StepSchedule.forward_only(engine.program).operations:
            engine.load(operation.stage, fetch(operation.weights))
            compute(engine, operation)
        return read()
    finally:
        settle()
