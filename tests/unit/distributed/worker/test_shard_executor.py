"""A shard takes the gradients that the schedule of the step and its masks ask for."""

from __future__ import annotations

import numpy as np
import pytest
from sparse_cluster import trained_program
from sparse_stores import mask_rule, sharded_sparse
from store_programs import random_weights

from penstock.distributed.rpc.shard_storage import InProcessShard
from penstock.distributed.run_spec import transfers_by_step
from penstock.distributed.worker.shard_executor import LocalShardExecutor
from penstock.errors import ProtocolError
from penstock.step_schedule import ByStep, StepSchedule


@pytest.mark.parametrize(
    ("policy", "is_dense", "expected"),
    [
        ("set", True, "expects the gradient of its entries, got the dense gradient"),
        ("rigl", False, "expects the dense gradient, got the gradient of its entries"),
    ],
)
def test_gradients_of_another_schedule_are_refused(policy, is_dense, expected):
    program = trained_program(policy)
    store = sharded_sparse(program, 1, mask_rule(policy))
    store.load(random_weights(program, 1).items())
    schedules = ByStep.always(StepSchedule.of(program, dense_gradients=is_dense))
    work = LocalShardExecutor(InProcessShard(store.shards[0]), 0, schedules)
    work.begin(1)
    operation = transfers_by_step(program, schedules, 1)(1).operations[-1]
    gradients = {
        number: np.zeros(piece.end - piece.begin, np.float32)
        for number, piece in enumerate(operation.gradients)
    }
    with pytest.raises(ProtocolError, match=rf"^0\.weight: step 1 {expected}; do all nodes have"):
        work.receive(operation, gradients)
    assert store.step == 0
