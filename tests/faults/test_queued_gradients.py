"""An engine whose links are slower than it computes: what waits in its memory stays bounded."""

from __future__ import annotations

import torch
from toy_cluster import FIRST_ENGINE, ToyOrder

from penstock.collectives.tree_reduce import PartialSum, TreeReduction
from penstock.distributed.protocol import GRADIENTS, Coordinator, EngineNode, ShardNode, Timeouts
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.protocol.transfer_schedule import (
    Chunk,
    TransferOperation,
    TransferSchedule,
    chunks,
)
from penstock.distributed.simulation import Network
from penstock.step_schedule import ByStep

RATE = 1e6  # bytes per second between engines
ELEMENTS = 10_000  # of a stage; a weight has one byte, its gradient four
GRADIENT_BYTES = 4 * ELEMENTS


def transfers(stages: int) -> TransferSchedule:
    weights = chunks([Chunk(0, 0, 0, ELEMENTS, 1)], chunk_bytes=2000)
    gradients = chunks([Chunk(0, 0, 0, ELEMENTS, 4)], chunk_bytes=8000)
    order = [(s, "forward") for s in range(stages - 1)] + [(stages - 1, "turn")]
    order += [(s, "backward") for s in reversed(range(stages - 1))]
    return TransferSchedule(
        tuple(
            TransferOperation(n, stage, sweep, weights, () if sweep == "forward" else gradients)
            for n, (stage, sweep) in enumerate(order)
        ),
        1,
    )


class NoEngine:
    """Makes gradients without memory, in no time."""

    def begin(self, step, part, rows) -> None:
        self.first, self.total, self.count = int(part["first"]), int(part["total"]), len(rows["x"])

    def place(self, operation, piece, payload) -> None:
        pass

    def compute(self, operation) -> list[PartialSum]:
        total = TreeReduction(self.total)
        for number in range(self.first, self.first + self.count):
            total.add(PartialSum(0, number, (torch.empty(ELEMENTS, device="meta"),)))
        return total.nodes() if operation.gradients else []

    def losses(self) -> list[float]:
        return [0.0] * self.count


class NoShard:
    def __init__(self) -> None:
        self.received: list[int] = []

    def held_steps(self) -> list[int]:
        return [0]

    def roll_back(self, step) -> None:
        pass

    def enter(self) -> None:
        pass

    def begin(self, step) -> None:
        pass

    def fetch(self, operation) -> list[None]:
        return [None] * len(operation.weights)

    def receive(self, operation, gradients) -> None:
        self.received.append(operation.number)

    def prepare(self) -> dict:
        return {}

    def commit(self, step, decision, masks) -> dict:
        return {}


class Order(ToyOrder):
    def decide(self, losses, prepared) -> dict:
        return {}


class Lines(Network):
    """A line of its own between any two nodes, as sockets are, of which one is slow.

    Over that one only gradients go: of four engines the second sends its sums to the third, while
    weights come to both from others, and room is given back to others.
    """

    slow = (FIRST_ENGINE + 1, FIRST_ENGINE + 2)

    def __init__(self) -> None:
        super().__init__()
        self.free: dict[tuple[int, int], float] = {}  # when a line has taken what is on it

    def send(self, sender: int, to: int, message: Message) -> None:
        rate = RATE if (sender, to) == self.slow else 100 * RATE
        assert rate != RATE or message.kind in (MessageType.GRADIENT, MessageType.VIEW)
        begins = max(self.now, self.free.get((sender, to), 0.0))
        left = self.free[sender, to] = begins + (message.size + 50) / rate
        self._at(left + 1e-4, self._deliver, (sender, to, self.now, message))

    def waiting_bytes(self) -> float:
        """Return what waits to leave over the slow line."""
        return max(0.0, self.free.get(self.slow, 0.0) - self.now) * RATE


def step(stages: int, gradients: int) -> tuple[float, float]:
    """Make a step; return the most that waited to leave an engine, and how long the step took."""
    plan, network, most = ByStep.always(transfers(stages)), Lines(), 0.0
    shard = ShardNode(1, 0, network.context(1), plan, NoShard(), gradients=gradients)
    network.add(1, shard)
    timeouts = Timeouts(silence=100.0, stall=100.0)
    coordinator = Coordinator(network.context(0), [[1]], 4, timeouts, lambda happened: None)
    network.set_coordinator(coordinator)
    for number in range(FIRST_ENGINE, FIRST_ENGINE + 4):
        network.add(number, EngineNode(number, network.context(number), plan, NoEngine()))
        coordinator.joined(number)
    ended: list = []

    def look() -> bool:
        nonlocal most
        most = max(most, network.waiting_bytes())
        return bool(ended)

    coordinator.start(Order(1), ended.append)
    assert network.run(look, 1000.0)
    assert ended[0].error is None
    return most, network.now


def test_queued_gradients_of_engine_are_bounded():
    bound = GRADIENTS * GRADIENT_BYTES + 8000  # and the heads of the messages
    for stages in (10, 40):
        waiting, seconds = step(stages, GRADIENTS)
        assert 0 < waiting <= bound
        freely, at_best = step(stages, 1000)
        assert seconds < 1.02 * at_best  # the line is as busy as it can be
    assert freely > 5 * bound
