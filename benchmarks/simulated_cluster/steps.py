"""One step of a simulated cluster: what travels in it, how long it takes and what it moves."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence

from penstock.distributed.protocol import (
    CHUNK_BYTES,
    GRADIENT_WIDTH,
    Chunk,
    Coordinator,
    EngineNode,
    RelayNode,
    ShardNode,
    StepResult,
    Timeouts,
    TransferOperation,
    TransferSchedule,
    chunks as cut,
)
from penstock.distributed.simulation import Network
from penstock.program import Program
from penstock.step_schedule import ByStep, StepSchedule
from simulated_cluster.machines import Machine
from simulated_cluster.works import Engine, Order, Shard

# Of the operations at the ends of a step: nothing hides how a chunk goes down or up the tree.
CHUNKS_AT_ENDS, ENDS = 256, 2
ROW_BYTES = 4  # of a token, input and target: of a vocabulary of 2^16 they travel as two each
FIRST_ENGINE, FIRST_RELAY = 1000, 10_000
FEW_WEIGHTS = 64  # of a stage, in the step before the one that is measured
IDLE_SECONDS = 1.0  # between the two steps: what was sent ahead is there


def transfers_of(
    program: Program,
    machine: Machine,
    recompute: Collection[int],
    chunks: int,
    most: float = math.inf,
) -> TransferSchedule:
    """Return the operations of a step; a stage's weights lie one behind the other.

    Args:
        program: has the stages.
        machine: has shards, between which every stage is divided.
        recompute: the stages whose forward is made again.
        chunks: into how many an operation's bytes are cut, at most (`Load`).
        most: of every stage, no more than so many weights.
    """
    shards, schedule = machine.shards, StepSchedule.of(program, recompute).operations
    operations = []
    for operation in schedule:
        number, sweep = operation.number, operation.sweep
        is_end = min(number, len(schedule) - 1 - number) < ENDS
        parts = max(CHUNKS_AT_ENDS, chunks) if is_end else chunks
        specs = [program.weights[name] for name in operation.weights]
        widths = [spec.stream_dtype.itemsize for spec in specs]
        width = machine.weight_width or max(widths, default=1)
        weights = _pieces(sum(spec.elements for spec in specs), width, shards, parts, most)
        gradients: Sequence[Chunk] = ()
        if sweep != "forward":
            elements = sum(program.weights[name].elements for name in operation.gradients)
            gradients = _pieces(elements, GRADIENT_WIDTH, shards, parts, most)
        operations.append(
            TransferOperation(number, operation.stage, sweep, weights, tuple(gradients))
        )
    return TransferSchedule(tuple(operations), shards)


def _pieces(elements: int, width: int, shards: int, parts: int, most: float) -> tuple[Chunk, ...]:
    elements = int(min(most, elements))
    bounds = [elements * shard // shards for shard in range(shards + 1)]
    pieces = [Chunk(s, 0, bounds[s], bounds[s + 1], width) for s in range(shards)]
    return cut(pieces, max(CHUNK_BYTES, -(-elements // parts) * width))


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one step took and moved."""

    seconds: float
    store_sent: int
    store_taken: int
    most_sent: int  # by any engine
    most_taken: int


def measure(
    machine: Machine,
    program: Program,
    transfers: TransferSchedule,
    engines: int,
    sequences: int,
    length: int,
    recompute: Collection[int] = (),
    relays: int = 0,
) -> Measured:
    """Make two steps, and measure the second: its rows were sent ahead, as those of a third are in
    it. Next to no weights travel in the first.

    Args:
        machine: what every engine and every shard is.
        program: what is computed.
        transfers: what travels.
        engines: how many there are.
        sequences: how many each of them has; 0: nothing is computed.
        length: of a sequence, in tokens.
        recompute: the stages whose forward is made again.
        relays: how many there are between the shards and the engines.
    """
    shards = range(1, 1 + machine.shards)
    schedule = StepSchedule.of(program, recompute)
    first = transfers_of(program, machine, recompute, 1, FEW_WEIGHTS)
    by_step = ByStep(transfers, first, lambda step: step == 1)
    members = range(FIRST_ENGINE, FIRST_ENGINE + engines)
    works: dict[int, Engine | Shard] = {}
    network = Network(
        machine.links, cost=lambda number: works[number].seconds, heartbeat_seconds=1.0
    )
    timeouts = Timeouts(silence=1e3, stall=1e4, job=1e5)
    coordinator = Coordinator(
        network.context(0),
        [(n,) for n in shards],
        engines,
        timeouts,
        lambda event: None,
        relays=relays,
    )
    for place, number in enumerate(shards):
        shard = works[number] = Shard(machine, transfers, place)
        context = network.context(number)
        network.add(number, ShardNode(number, place, context, by_step, shard))
    for number in members:
        engine = works[number] = Engine(schedule, machine, sequences)
        network.add(number, EngineNode(number, network.context(number), by_step, engine))
        coordinator.joined(number)
    for number in range(FIRST_RELAY, FIRST_RELAY + relays):
        network.add(number, RelayNode(number, network.context(number), by_step))
        coordinator.relay_joined(number)
    network.set_coordinator(coordinator)
    rows = sequences * length * ROW_BYTES
    orders = [Order(step, engines, rows) for step in (1, 2, 3)]
    _make_step(network, coordinator, *orders[:2])
    network.run(functools.partial(_has_come, network, network.now + IDLE_SECONDS), math.inf)
    began, sent, taken = network.now, dict(network.sent_bytes), dict(network.taken_bytes)
    _make_step(network, coordinator, *orders[1:])
    return Measured(
        network.now - began,
        sum(network.sent_bytes[n] - sent.get(n, 0) for n in shards),
        sum(network.taken_bytes[n] - taken.get(n, 0) for n in shards),
        max(network.sent_bytes[n] - sent.get(n, 0) for n in members),
        max(network.taken_bytes[n] - taken.get(n, 0) for n in members),
    )


def _make_step(network: Network, coordinator: Coordinator, order: Order, following: Order) -> None:
    ended: list[StepResult] = []
    coordinator.start(order, ended.append, following)
    network.run(lambda: bool(ended), math.inf)
    if ended[0].error is not None:
        raise ended[0].error


def _has_come(network: Network, moment: float) -> bool:
    return network.now >= moment
