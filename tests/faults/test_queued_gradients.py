"""An engine whose links are slower than it computes: what waits in its memory stays bounded."""

from __future__ import annotations

import pytest
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

    def settle(self) -> None:
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

    def difference(self, first, other) -> None:
        return None


BETWEEN_ENGINES = (FIRST_ENGINE + 1, FIRST_ENGINE + 2)
REPLICA = 2
TO_REPLICA = (FIRST_ENGINE + 2, REPLICA)


class Lines(Network):
    """A line of its own between any two nodes, as sockets are, of which one is slow.

    Over that one only gradients go. Between engines: of four the second sends its sums to the
    third, while weights come to both from others, and room is given back to others. To a replica
    that does not stream: the third engine makes the sums over all.
    """

    def __init__(self, slow: tuple[int, int] = BETWEEN_ENGINES, seconds: float = 0.0) -> None:
        super().__init__(cost=lambda number: seconds if number == REPLICA else 0.0)
        self.slow = slow
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


def step(
    stages: int, gradients: int, network: Lines | None = None, replicas: int = 1
) -> tuple[float, float]:
    """Make a step; return the most that waited to leave an engine or to be stored by a replica that
    does not stream, and how long the step took."""
    network = network or Lines()
    plan, most = ByStep.always(transfers(stages)), 0.0
    numbers = [*range(1, 1 + replicas)]
    for number in numbers:
        context = network.context(number)
        network.add(number, ShardNode(number, 0, context, plan, NoShard(), gradients=gradients))
    timeouts = Timeouts(silence=100.0, stall=100.0)
    coordinator = Coordinator(network.context(0), [numbers], 4, timeouts, lambda happened: None)
    network.set_coordinator(coordinator)
    for number in range(FIRST_ENGINE, FIRST_ENGINE + 4):
        network.add(number, EngineNode(number, network.context(number), plan, NoEngine()))
        coordinator.joined(number)
    ended: list = []

    def look() -> bool:
        nonlocal most
        most = max(most, network.waiting_bytes(), GRADIENT_BYTES * len(network._jobs[REPLICA]))
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


@pytest.mark.parametrize("what", ["connection", "store"])
def test_queued_gradients_of_slow_replica_are_bounded(what):
    """Of one that does not stream: behind its slow connection, and before its slow store."""

    def slow() -> Lines:
        return Lines(TO_REPLICA) if what == "connection" else Lines((0, 0), seconds=0.1)

    bound = GRADIENTS * GRADIENT_BYTES + 8000
    for stages in (10, 40):
        waiting, seconds = step(stages, GRADIENTS, slow(), replicas=2)
        assert 0 < waiting <= bound
        freely, at_best = step(stages, 1000, slow(), replicas=2)
        assert seconds < 1.02 * at_best
    assert freely > 5 * bound


def test_loss_of_slow_replica_does_not_stop_the_step():
    network = Lines(TO_REPLICA)
    network.after(0.1, network.kill, REPLICA)
    _, seconds = step(40, GRADIENTS, network, replicas=2)
    assert 0.1 < seconds < 0.5, "the others go on at once, without the stall's time limit"
