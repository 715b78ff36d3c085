"""What trying again does not mend: an engine's own errors, links that damage or lose everything."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import toy_cluster
from toy_cluster import FIRST_ENGINE, ToyCluster, ToyEngine, ToyOrder
from toy_model import reference

from penstock.distributed.protocol import EngineInput, UnrecoverableError
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.simulation import Faults
from penstock.errors import ClusterError

LOSSES, WEIGHTS = reference()
FIRST, SECOND, THIRD, FOURTH = range(FIRST_ENGINE, FIRST_ENGINE + 4)


def require_same(cluster: ToyCluster, outcomes) -> None:
    assert [list(outcome.losses) for outcome in outcomes] == LOSSES
    for made, wanted in zip(cluster.weights(), WEIGHTS, strict=True):
        np.testing.assert_array_equal(made, wanted)


class FailingEngine(ToyEngine):
    """Computes, unless `error_of(step, operation)` says what it runs into."""

    def __init__(self, error_of: Callable[[int, int], Exception | None]) -> None:
        super().__init__()
        self.error_of = error_of

    def begin(self, step, part, rows) -> None:
        self.step = step
        super().begin(step, part, rows)

    def compute(self, operation):
        error = self.error_of(self.step, operation.number)
        if error is not None:
            raise error
        return super().compute(operation)


def let_fail(cluster: ToyCluster, error_of: Callable[[int, int, int], Exception | None]) -> None:
    """Have engines, also those that come later, fail as `error_of(engine, step, operation)`."""

    def engine(number: int) -> ToyEngine:
        return FailingEngine(lambda step, operation: error_of(number, step, operation))

    cluster.engine = engine
    for number, node in cluster.nodes.items():
        if number >= FIRST_ENGINE:
            node._work = engine(number)


def lost(cluster: ToyCluster) -> list[int | None]:
    return [happened.node for happened in cluster.happened if happened.kind == "engine lost"]


@pytest.mark.parametrize("operation", [0, 2, 4])
@pytest.mark.parametrize("engines", [1, 3])
def test_failed_engine_is_evicted_without_changing_bits(engines, operation):
    cluster = ToyCluster(engines, 2)
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    let_fail(cluster, lambda e, step, op: broken if (e, op) == (FIRST, operation) else None)
    require_same(cluster, cluster.train())
    assert lost(cluster) == [FIRST]
    (text,) = [h.text for h in cluster.happened if h.kind == "engine lost"]
    assert text == f"engine {FIRST}: its work failed: RuntimeError: {broken}"


@pytest.mark.parametrize("engines", [1, 3])
def test_same_error_on_two_engines_ends_run(engines):
    cluster = ToyCluster(engines, 1)

    def error_of(engine: int, step: int, operation: int) -> Exception | None:
        if (step, operation) != (2, 3):
            return None
        return MemoryError(f"tried to take {engine} MiB, 0x{engine:x} has 1.5 GiB")

    let_fail(cluster, error_of)
    with pytest.raises(UnrecoverableError) as raised:
        cluster.train()
    first, second = lost(cluster)[0], raised.value.node
    assert lost(cluster) == [first] != [second]
    assert raised.value.kind == "MemoryError"
    assert str(raised.value) == (
        f"step 2: engines {first} and {second} failed with the same error, so the cause is not "
        f"one engine: MemoryError: tried to take {second} MiB, 0x{second:x} has 1.5 GiB"
    )


def test_three_engines_with_different_errors_end_run():
    cluster = ToyCluster(1, 1)
    ways = {FIRST: "one", SECOND: "two", THIRD: "three", FOURTH: "four"}
    let_fail(cluster, lambda engine, step, op: ValueError(ways[engine]))
    with pytest.raises(
        UnrecoverableError, match="3 engines failed with different errors; the last, engine 10"
    ):
        cluster.train()
    assert lost(cluster) == [FIRST, SECOND]


def test_failures_at_different_steps_do_not_add_up():
    cluster = ToyCluster(2, 1)
    let_fail(cluster, lambda e, step, op: ValueError() if e == FIRST_ENGINE + step - 1 else None)
    require_same(cluster, cluster.train())
    assert lost(cluster) == [FIRST, SECOND, THIRD]


def test_error_of_only_engine_ends_run():
    cluster = ToyCluster(1, 1)
    cluster.can_replace_engine = False
    let_fail(cluster, lambda engine, step, op: ValueError("broken"))
    with pytest.raises(UnrecoverableError, match="the only engine: ValueError: broken"):
        cluster.train()
    assert not lost(cluster)


class BadLinks(Faults):
    """On links of which this is so, every message of some kinds is lost or damaged."""

    def __init__(
        self, what: str, kinds: set[MessageType], is_bad: Callable[[int, int], bool]
    ) -> None:
        super().__init__(1)
        self.what, self.kinds, self.is_bad = what, kinds, is_bad

    def carry(self, now: float, sender: int, to: int, message: Message):
        if message.kind not in self.kinds or not self.is_bad(sender, to):
            return super().carry(now, sender, to, message)
        return [] if self.what == "lost" else [(0.0, self._flip(message))]


DATA = {MessageType.WEIGHTS, MessageType.GRADIENT}


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("what", ["lost", "flipped"])
def test_engine_with_bad_connections_is_evicted(what, engines):
    faults = BadLinks(what, DATA, lambda sender, to: FIRST in (sender, to))
    cluster = ToyCluster(engines, 2, faults)
    require_same(cluster, cluster.train())
    assert FIRST in lost(cluster)


@pytest.mark.parametrize("what", ["lost", "flipped"])
def test_bad_network_ends_run_with_counts(what):
    cluster = ToyCluster(1, 1, BadLinks(what, DATA, lambda sender, to: True))
    with pytest.raises(ClusterError, match="step 1 was retried 33 times: ") as raised:
        cluster.train(limit=1000.0)
    damaged, still = (33, 0) if what == "flipped" else (0, 33)
    text = str(raised.value)
    assert f"{damaged} times for a damaged frame, {still} times without progress" in text
    assert "Check that all hosts of the run can connect to each other on any port" in text


class LargeRows(ToyOrder):
    """A step with 3 MB of rows for each engine, which take 3 s on a card of 1 MB/s."""

    def parts(self, engines):
        large = {"large": np.zeros(3_000_000, np.uint8)}
        return [EngineInput(part.body, part.rows | large) for part in super().parts(engines)]


@pytest.mark.parametrize("sends_ahead", [False, True])
def test_message_that_arrives_longer_than_the_stall_restarts_no_step(monkeypatch, sends_ahead):
    """A step without progress for 2 s is restarted; bytes that arrive are progress."""
    monkeypatch.setattr(toy_cluster, "ToyOrder", LargeRows)
    cluster = ToyCluster(2, 1, sends_ahead=sends_ahead)
    require_same(cluster, cluster.train())
    assert not [h for h in cluster.happened if h.kind in ("retry", "engine lost")]


def test_step_is_restarted_after_a_long_message_whose_successor_is_lost(monkeypatch):
    """Two rows arrive in 6 s, the weights never: the second stall evicts the engine."""
    monkeypatch.setattr(toy_cluster, "ToyOrder", LargeRows)
    faults = BadLinks("lost", {MessageType.WEIGHTS}, lambda sender, to: to == FIRST)
    cluster = ToyCluster(2, 1, faults)
    require_same(cluster, cluster.train())
    assert lost(cluster) == [FIRST]
    assert [h.kind for h in cluster.happened].count("retry") == 1


def one_flipped(engines: int, kind: MessageType, is_at: Callable[[int, int], bool]) -> ToyCluster:
    """A cluster that has made its steps, in which one frame was damaged: the first that is so."""
    left = [True]

    def is_bad(sender: int, to: int) -> bool:
        return is_at(sender, to) and left.pop() if left else False

    cluster = ToyCluster(engines, 2, BadLinks("flipped", {kind}, is_bad))
    require_same(cluster, cluster.train())
    assert not left
    return cluster


@pytest.mark.parametrize(
    ("kind", "sender", "to", "loses"),
    [
        (MessageType.LOSSES, FIRST, 0, FIRST),
        (MessageType.HEARTBEAT, SECOND, 0, SECOND),
        (MessageType.BEGIN, 0, FIRST, FIRST),
        (MessageType.PREPARED, 1, 0, 1),
        (MessageType.COMMIT, 0, 2, 2),
    ],
)
def test_corrupt_frame_to_coordinator_evicts_node(kind, sender, to, loses):
    """The link ends with it, and with the link the place; another comes."""
    cluster = one_flipped(2, kind, lambda a, b: (a, b) == (sender, to))
    gone = [h.node for h in cluster.happened if h.kind in ("engine lost", "shard lost")]
    assert gone == [loses]
    assert cluster.network.is_cut_off(loses)


@pytest.mark.parametrize("kind", [MessageType.WEIGHTS, MessageType.GRADIENT])
def test_corrupt_frame_between_nodes_evicts_nobody(kind):
    cluster = one_flipped(2, kind, lambda a, b: 0 not in (a, b))
    assert not [h for h in cluster.happened if h.kind.endswith("lost")]
    assert cluster.coordinator.counts["damaged"] == 1


def test_shard_without_commit_acknowledgement_is_evicted():
    faults = BadLinks("lost", {MessageType.COMMIT}, lambda sender, to: to == 1)
    cluster = ToyCluster(1, 1, faults)
    require_same(cluster, cluster.train())
    (text,) = [h.text for h in cluster.happened if h.kind == "shard lost"]
    assert "it has not acknowledged the commit" in text
