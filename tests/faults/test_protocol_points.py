"""One fault at every point of the step protocol: after each message of a run that has none.

Every message that is sent is in turn lost, repeated, held back, damaged, or the moment at which its
link is cut; every message that is delivered is in turn the moment at which an engine or a shard is
killed, or stands still until it has counted as lost and then goes on as a zombie.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from toy_cluster import FIRST_ENGINE, ToyCluster
from toy_model import reference

from penstock.distributed.protocol.messages import MessageType
from penstock.distributed.simulation import Faults
from penstock.distributed.simulation.faults import Rates

ENGINES, SHARDS, STEPS = 3, 2, 2
LOSSES, WEIGHTS = reference(STEPS + 1)
IN_FLIGHT = ["lost", "repeated", "delayed", "flipped", "cut"]
NODES = [1, 2, FIRST_ENGINE, FIRST_ENGINE + 1, FIRST_ENGINE + 2]
AT_ONCE = [f"{what} {node}" for what in ("kill", "zombie") for node in NODES]
SPREAD = 12  # points of each fault that `make test` tries


class OneFault(Faults):
    """Something that happens to the message of one number and to no other; beats do not count."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(number, None if what == "cut" else Rates(**{what: 1.0}))
        self.number, self.what, self.sent = number, what, 0

    def carry(self, now, sender, to, message):
        is_it = message.kind is not MessageType.HEARTBEAT and self.sent == self.number
        self.sent += message.kind is not MessageType.HEARTBEAT
        if is_it and self.what == "cut":
            self._cuts = {(min(sender, to), max(sender, to)): (now, now + 5.0)}
        self._until = float("inf") if is_it else now
        return super().carry(now, sender, to, message)


@functools.cache
def messages() -> tuple[int, int]:
    """How many messages a run without faults sends, beats aside, and how many it delivers."""
    faults = OneFault(-1, "cut")
    cluster = ToyCluster(ENGINES, SHARDS, faults)
    cluster.train(STEPS)
    return faults.sent, cluster.network.delivered


def survive(point: int, what: str) -> None:
    """Make the run with one fault, and another step when whatever was late has come."""
    faults = OneFault(point, what) if what in IN_FLIGHT else None
    cluster = ToyCluster(ENGINES, SHARDS, faults)
    if faults is None:
        cluster.strike_at(point, what)
    try:
        # One engine may be all that is left while others come back.
        cluster.network.after(20.0, cluster.join)
        outcomes = cluster.train(STEPS)
        cluster.network.run(lambda: False, cluster.network.now + 3)
        # Who was lost at the very end is found out by the next step, which may go back.
        outcomes += cluster.train(STEPS + 1, first=STEPS + 1)
        assert faults is None or faults.counts[what], "nothing went wrong"
        assert [list(outcome.losses) for outcome in outcomes] == LOSSES
        for made, wanted in zip(cluster.weights(), WEIGHTS, strict=True):
            np.testing.assert_array_equal(made, wanted)
    except BaseException:
        print(f"{what} at message {point}: {cluster.happened}")
        raise


@pytest.mark.parametrize("what", [*IN_FLIGHT, *AT_ONCE])
def test_one_fault_at_many_points_does_not_change_bits(what):
    count = messages()[what not in IN_FLIGHT]
    offset = sum(map(ord, what)) % (count // SPREAD)
    for point in range(offset, count, count // SPREAD):
        survive(point, what)


@pytest.mark.slow
@pytest.mark.parametrize("what", [*IN_FLIGHT, *AT_ONCE])
def test_one_fault_at_every_point_does_not_change_bits(what):
    for point in range(messages()[what not in IN_FLIGHT]):
        survive(point, what)
