"""What the nodes of a simulated cluster work: engines and shards that only know how long it takes.

What an operation takes comes from the program that Penstock makes of the model: its arithmetic at
the rate of the engine, its weights and optimizer state at the rate of the store's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.collectives import PartialSum
from penstock.distributed.protocol import (
    GRADIENT_WIDTH,
    Chunk,
    EngineInput,
    Message,
    TransferOperation,
    TransferSchedule,
    WithoutMasks,
)
from penstock.step_schedule import StepSchedule
from simulated_cluster.machines import Machine

UPDATE_BYTES = 32  # AdamW reads and writes three float32 numbers, reads a gradient, writes weights


class Engine:
    """Computes nothing, and knows how long that takes.

    `sequences` of 0 take no time.
    """

    def __init__(self, schedule: StepSchedule, machine: Machine, sequences: int) -> None:
        rate = machine.flops / sequences if sequences else math.inf
        self._seconds = [operation.flops / rate for operation in schedule.operations]
        self.seconds, self._first = 0.0, 0

    def begin(self, step: int, part: Mapping[str, float], rows: Mapping[str, np.ndarray]) -> None:
        self._first, self.seconds = int(part["first"]), 0.0

    def place(self, operation: TransferOperation, piece: Chunk, payload: np.ndarray | None) -> None:
        """The bytes were left out."""

    def compute(self, operation: TransferOperation) -> list[PartialSum]:
        self.seconds = self._seconds[operation.number]
        if operation.sweep == "forward":
            return []
        elements = max((piece.end for piece in operation.gradients), default=0)
        return [PartialSum(0, self._first, (torch.empty(elements, device="meta"),))]

    def losses(self) -> list[float]:
        return [0.0]


class Shard:
    """Holds nothing, and knows how long reading and updating it takes."""

    def __init__(self, machine: Machine, transfers: TransferSchedule, shard: int) -> None:
        self._rate, self._shard, self._step = machine.store_bytes_per_second, shard, 0
        self._transfers, self.seconds = transfers, 0.0

    def held_steps(self) -> list[int]:
        return [self._step]

    def roll_back(self, step: int) -> None:
        self.seconds = 0.0

    def settle(self) -> None:
        """Nothing is awaited."""

    def enter(self) -> None:
        """No mask is sent."""

    def begin(self, step: int) -> None:
        self.seconds = 0.0

    def fetch(self, operation: TransferOperation) -> list[None]:
        numbers = operation.of_shard(self._shard)
        pieces = [operation.weights[number] for number in numbers]
        size = sum(piece.size for piece in pieces)
        if operation.sweep != "backward":  # the update of the step before comes first
            size += sum(piece.end - piece.begin for piece in pieces) * UPDATE_BYTES
        self.seconds = size / self._rate
        return [None] * len(numbers)

    def receive(self, operation: TransferOperation, gradients: Mapping[int, object]) -> None:
        pieces = [operation.gradients[number] for number in gradients]
        self.seconds = (
            sum(piece.end - piece.begin for piece in pieces) * GRADIENT_WIDTH / self._rate
        )

    def prepare(self) -> dict:
        self.seconds = 0.0
        return {}

    def commit(
        self, step: int, decision: Mapping[str, object], masks: np.ndarray | None = None
    ) -> dict:
        self._step, self.seconds = step, 0.0
        return {}


@dataclass
class Order(WithoutMasks):
    """A step in which every engine has one micro-batch: sums of more stay on the engine."""

    step: int
    micro_batches: int
    row_bytes: int

    def parts(self, engines: int) -> list[EngineInput]:
        rows = {"x": np.zeros(self.row_bytes, np.uint8)}
        body = {"total": engines, "seed": 0, "scale": 1.0}
        return [EngineInput({**body, "first": place}, rows) for place in range(engines)]

    def report(self, message: Message, shard: int) -> Mapping[str, Any]:
        return message.body

    def decide(self, losses: Sequence[float], reports: Sequence[Mapping]) -> dict:
        return {}

    def answer(self, message: Message) -> Mapping[str, Any]:
        return message.body
