"""What an engine's process hands on is its own, whatever the device does with its buffers."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from penstock.collectives.tree_reduce import PartialSum
from penstock.distributed.protocol.transfer_schedule import Chunk, TransferOperation
from penstock.distributed.worker.engine_executor import LocalEngineExecutor
from penstock.step_schedule import ByStep, Operation, StepSchedule


class RingEngine:
    """An engine whose gradients come in one buffer, used again and again, as a GPU's do."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(3)

    def load(self, stage, weights) -> None:
        pass

    def backward(self, stage):
        self.buffer += 1
        return self

    def wait(self):
        return [PartialSum(0, 0, (self.buffer, None))]


NO_WEIGHTS = SimpleNamespace(stages=(SimpleNamespace(name="only", weights=()),), weights={})


def test_gpu_gradients_are_copied_before_buffer_reuse(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    operation = TransferOperation(0, 0, "backward", (), (Chunk(0, 0, 0, 3, 4),))
    schedule = StepSchedule((Operation(0, 0, "backward", (), (), ("weight",), 0, 0),))
    work = LocalEngineExecutor(RingEngine(), NO_WEIGHTS, ByStep.always(schedule), "cuda")
    first, second = work.compute(operation), work.compute(operation)
    assert first[0].tensors[0].tolist() == [1, 1, 1]
    assert second[0].tensors[0].tolist() == [2, 2, 2]
    assert first[0].tensors[1] is None
