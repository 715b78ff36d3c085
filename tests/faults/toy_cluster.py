"""A run of a few shards and engines in the simulated network, small enough for thousands of them.

The model is that of `toy_model.py`. Shards store steps as the store on flash does: the last two,
one behind the commit; or they are in memory and hold none but the present. A shard may have several
nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import xxhash
from toy_model import (
    MICRO_BATCHES,
    STAGES,
    STEPS,
    WEIGHTS,
    backward,
    initial,
    norm_of,
    rows_of,
    squares_of,
    updated,
)

from penstock.collectives.tree_reduce import PartialSum, TreeReduction, partition
from penstock.distributed.protocol import (
    WINDOW,
    Coordinator,
    EngineInput,
    EngineNode,
    ProtocolEvent,
    RelayNode,
    RolledBackError,
    ShardNode,
    StepResult,
    Timeouts,
    UnrecoverableError,
    WithoutMasks,
)
from penstock.distributed.protocol.transfer_schedule import (
    Chunk,
    TransferOperation,
    TransferSchedule,
    chunks,
)
from penstock.distributed.simulation import Faults, Links, Network
from penstock.step_schedule import ByStep

HELD = 2 * STAGES  # arrays of a shard, and steps until all of them have been compared
FIRST_ENGINE = 100  # numbers from here on are engines, 1, 2 ... are shards
FIRST_RELAY = 10_000


def transfers(shards: int, chunk_bytes: int = 32) -> TransferSchedule:
    bounds = [WEIGHTS * s // shards for s in range(shards + 1)]
    pieces = [Chunk(s, 0, bounds[s], bounds[s + 1], 4) for s in range(shards)]
    cut = chunks(pieces, chunk_bytes)
    order = [(s, "forward") for s in range(STAGES - 1)] + [(STAGES - 1, "turn")]
    order += [(s, "backward") for s in reversed(range(STAGES - 1))]
    return TransferSchedule(
        tuple(
            TransferOperation(n, stage, sweep, cut, () if sweep == "forward" else cut)
            for n, (stage, sweep) in enumerate(order)
        ),
        shards,
    )


class ToyEngine:
    """Keeps two operations' weights, as an engine with two slots does."""

    def __init__(self) -> None:
        self.slots = [np.full(WEIGHTS, np.nan, np.float32) for _ in range(2)]

    def begin(self, step, part, rows) -> None:
        self.first, self.total = int(part["first"]), int(part["total"])
        self.values = [[row] for row in rows["x"]]
        self.grads = [np.ones(WEIGHTS, np.float32) for _ in self.values]

    def place(self, operation, piece, payload) -> None:
        slot = self.slots[operation.number % 2]
        slot[piece.begin : piece.end] = payload.view(np.float32)

    def compute(self, operation) -> list[PartialSum]:
        weight = self.slots[operation.number % 2].copy()
        self.slots[operation.number % 2][:] = np.nan  # what is used after this shows
        if operation.sweep != "backward":
            for values in self.values:
                values.append(np.tanh(values[-1] * weight + np.float32(0.1)))
        if operation.sweep == "forward":
            return []
        total = TreeReduction(self.total)
        for offset, values in enumerate(self.values):
            own, self.grads[offset] = backward(
                weight, values[operation.stage], values[operation.stage + 1], self.grads[offset]
            )
            total.add(PartialSum(0, self.first + offset, (torch.from_numpy(own),)))
        return total.nodes()

    def losses(self) -> list[float]:
        return [float(values[-1].sum()) for values in self.values]


class ToyShard:
    """A shard's pieces of every weight; refuses whatever a real store would refuse.

    `weights` are those of all stages, and behind them a moment of each: the sum of the squares of
    its gradients, on which nothing else depends.

    What it hands out lies in memory that it soon uses again, as a store on flash does: whatever is
    read later than `ShardWork.fetch` allows has another operation's weights.
    """

    def __init__(
        self, shard: int, plan: TransferSchedule, durable=None, on_flash: bool = True
    ) -> None:
        self.shard, self.plan, self.on_flash = shard, plan, on_flash
        moments = [np.zeros(WEIGHTS, np.float32) for _ in range(STAGES)]
        self.durable = durable or {0: [*initial(), *moments]}  # by step, what a crash leaves
        self.step = max(self.durable)
        self.weights = self.durable[self.step]
        self.gradients: dict[int, np.ndarray] = {}
        self.squares: dict[str, str] = {}
        self.handed_out = [np.empty(WEIGHTS, np.float32) for _ in range(WINDOW)]

    def reopened(self) -> ToyShard:
        """What another process finds of this shard."""
        assert self.on_flash, "nobody else has what was in memory"
        return ToyShard(self.shard, self.plan, dict(self.durable))

    def empty(self) -> ToyShard:
        """What a learner has of this shard before it is given a copy: nothing."""
        return ToyShard(self.shard, self.plan, {-1: []}, self.on_flash)

    def copied(self) -> tuple[int, list[np.ndarray]]:
        """The step at which it stands, and the weights after it."""
        return self.step, [weight.copy() for weight in self.weights]

    def restore(self, step: int, weights: list[np.ndarray]) -> None:
        """Hold what another node holds, and store it."""
        self.step, self.weights, self.durable = step, weights, {step: weights}
        self._forget()

    def held_steps(self) -> list[int]:
        return sorted(self.durable) if self.on_flash else [self.step]

    def roll_back(self, step) -> None:
        assert self.on_flash or step == self.step
        if not self.on_flash:
            return
        self.durable = {k: v for k, v in self.durable.items() if k <= step}
        self.step, self.weights = step, self.durable[step]
        self._forget()

    def enter(self) -> None:
        """Nothing was sent to the engines of an epoch before this one."""

    def begin(self, step) -> None:
        assert step == self.step + 1
        self._forget()

    def settle(self) -> None:
        if (self.step + self.shard) % 2 == 0:
            self._make_durable()

    def _forget(self) -> None:
        self.gradients.clear()
        self.squares.clear()

    def _make_durable(self) -> None:
        newest = sorted({*self.durable, self.step})[-2:]
        self.durable = {**self.durable, self.step: self.weights}
        self.durable = {k: v for k, v in self.durable.items() if k in newest}

    def fetch(self, operation) -> list[np.ndarray]:
        if operation.sweep == "turn" and (self.step + self.shard) % 2:
            self._make_durable()  # this disk keeps up; another step or shard is slower
        memory = self.handed_out[operation.number % len(self.handed_out)]
        memory[:] = self.weights[operation.stage]
        pieces = [operation.weights[n] for n in operation.of_shard(self.shard)]
        return [memory[p.begin : p.end] for p in pieces]

    def receive(self, operation, gradients) -> None:
        assert operation.stage not in self.gradients, "a stage's gradients came twice"
        assert all(operation.stage < stage for stage in self.gradients), "not the sweep's order"
        mine = self.gradients[operation.stage] = np.full(WEIGHTS, np.nan, np.float32)
        for number, gradient in gradients.items():
            piece = operation.gradients[number]
            mine[piece.begin : piece.end] = gradient
            self.squares |= squares_of(operation.stage, piece, gradient)

    def prepare(self) -> dict:
        assert len(self.gradients) == STAGES
        return {"squares": dict(self.squares), "held": self.compared()}

    def compared(self) -> list[str]:
        """What is compared with a replica: one array after the other, by the step."""
        turn = self.step % HELD
        what = f"the {'moment' if turn >= STAGES else 'weights'} of stage {turn % STAGES}"
        return [what, xxhash.xxh3_64_hexdigest(self.weights[turn].tobytes())]

    def flip(self, turn: int, element: int, bit: int) -> None:
        """Let a bit of an array flip in memory, and nobody notice."""
        self.weights = [array.copy() for array in self.weights]
        self.weights[turn].view(np.uint32)[element] ^= np.uint32(1 << bit)

    def commit(self, step, decision, masks) -> dict:
        assert step == self.step + 1, "a step is committed twice, or left out"
        self._make_durable()  # the step before, at the latest now
        new = list(self.weights)
        for stage, gradient in self.gradients.items():
            mine = ~np.isnan(gradient)
            new[stage] = np.where(
                mine, updated(new[stage], gradient, decision["scale"]), new[stage]
            )
            moment = new[STAGES + stage]
            new[STAGES + stage] = np.where(mine, moment + gradient * gradient, moment)
        self.step, self.weights = step, new
        self._forget()
        return {"step": step}


class ToyOrder(WithoutMasks):
    """One step, as the coordinator has it made."""

    micro_batches = MICRO_BATCHES

    def __init__(self, step: int) -> None:
        self.step = step

    def parts(self, engines: int) -> list[EngineInput]:
        return [
            EngineInput(
                {"first": part.start, "total": MICRO_BATCHES, "seed": 0, "scale": 1.0},
                {"x": rows_of(self.step)[part.start : part.stop]},
            )
            for part in partition(MICRO_BATCHES, engines)
        ]

    def report(self, message, shard) -> dict:
        return dict(message.body)

    def answer(self, message) -> dict:
        return dict(message.body)

    def difference(self, first, other) -> str | None:
        if first["squares"] != other["squares"]:
            return "a step's gradients"
        return first["held"][0] if first["held"] != other["held"] else None

    def decide(self, losses, prepared) -> dict:
        squares = {k: float.fromhex(x) for body in prepared for k, x in body["squares"].items()}
        assert len(squares) == STAGES * WEIGHTS
        return {"scale": min(1.0, 1.0 / norm_of(squares))}


class ToyCluster:
    """Shards, engines and a coordinator in a simulated network, and who brings back what is lost.

    Relays and rows that are sent ahead are there if a test wants them. `cost` says the seconds of a
    job; by default longer than a message takes, so that faults fall between any two of these. Node
    1 + s + r * shards is the r-th of the first nodes of shard s.
    """

    def __init__(
        self,
        engines: int,
        shards: int,
        faults: Faults | None = None,
        wanted: int | None = None,
        notice: float | None = 0.02,
        cost: Callable[[], float] = lambda: 0.002,
        replicas: int = 1,
        on_flash: bool = True,
        relays: int = 0,
        sends_ahead: bool = False,
        plan: TransferSchedule | None = None,
    ) -> None:
        self.plan = plan or transfers(shards)
        self.sends_ahead = sends_ahead
        self.network = Network(Links(1e6, 1e-4), faults, cost=lambda number: cost(), notice=notice)
        self.happened: list[ProtocolEvent] = []
        self.stores: dict[int, ToyShard] = {}  # of every node that ever was a shard's
        self.nodes: dict[int, ShardNode | EngineNode | RelayNode] = {}
        numbers = [[1 + s + r * shards for r in range(replicas)] for s in range(shards)]
        for s, number in ((s, number) for s, some in enumerate(numbers) for number in some):
            self._add_shard(number, ToyShard(s, self.plan, on_flash=on_flash))
        self.coordinator = Coordinator(
            self.network.context(0),
            numbers,
            wanted or engines,
            Timeouts(silence=1.0, stall=2.0, job=20.0),
            self._tell,
            can_replace_engine=lambda: self.can_replace_engine,
            relays=relays,
        )
        self.network.set_coordinator(self.coordinator)
        self.can_replace_engine = True  # whether the coordinator may count on other engines
        self._lost: set[int] = set()  # the last nodes of shards, that have been lost
        self._zombies: dict[int, float] = {}
        self.engine: Callable[[int], ToyEngine] = lambda number: ToyEngine()
        self.watch: Callable[[], object] = lambda: None  # is called between any two events
        self._next_shard = 1 + shards * replicas
        self._next, self._next_relay = FIRST_ENGINE, FIRST_RELAY
        for _ in range(engines):
            self.join()
        for _ in range(relays):
            self.join_relay()

    def _add(self, number: int, node) -> None:
        self.nodes[number] = node
        self.network.add(number, node)

    def _add_shard(self, number: int, store: ToyShard) -> None:
        self.stores[number], context = store, self.network.context(number)
        self._add(number, ShardNode(number, store.shard, context, ByStep.always(self.plan), store))

    @property
    def shards(self) -> list[ToyShard]:
        """What the nodes of all shards hold."""
        return [self.stores[node] for nodes in self.coordinator.holders for node in nodes]

    def _tell(self, happened: ProtocolEvent) -> None:
        self.happened.append(happened)
        if happened.node in self._zombies:
            self.network.after(self._zombies.pop(happened.node), self.network.resume, happened.node)
        is_dead = self.network.is_dead(happened.node) and not self.network.is_cut_off(happened.node)
        if happened.kind == "engine lost" and not is_dead:
            # Its link is closed, so it comes back, by another number; the old one is a zombie.
            self.network.after(0.5, self.join)
        if happened.kind == "relay lost" and not is_dead:
            self.network.after(0.5, self.join_relay)
        if happened.kind == "shard lost":
            self._lost.add(happened.node)
            self.network.after(0.3, self.bring_back, happened.node)
        if happened.kind == "replica lost":
            self.network.after(0.3, self.join_replica, happened.node)

    def strike_at(self, point: int, fate: str) -> None:
        """When so many messages have been delivered, kill a node or stop it: "kill 2"."""
        verb, number = fate.split()

        def watch() -> None:
            if self.network.delivered >= point:
                self.watch = lambda: None
                if verb == "kill":
                    self.network.kill(int(number))
                else:
                    self.stop_until_lost(int(number), 0.002 * (point % 20))

        self.watch = watch

    def stop_until_lost(self, number: int, delay: float) -> None:
        """Stop a node, and let it go on as a zombie so long after it has counted as lost."""
        self.network.stop(number)
        self._zombies[number] = delay

    def bring_back(self, lost: int) -> None:
        """Let another process open what a lost shard has stored; the old one may be a zombie."""
        number, self._next_shard = self._next_shard, self._next_shard + 1
        store = self.stores[lost].reopened()
        self._add_shard(number, store)
        self.coordinator.shard_joined(store.shard, number)

    def join_replica(self, lost: int) -> None:
        """Let another process come for a node that was lost while others of its shard were left."""
        number, self._next_shard = self._next_shard, self._next_shard + 1
        store = self.stores[lost].empty()
        self._add_shard(number, store)
        self.coordinator.learner_joined(store.shard, number)

    def _copy_to_learners(self, seconds: float = 0.01) -> None:
        """Give learners what they are to hold; it takes time, in which anybody may be lost."""
        learners = list(self.coordinator.learners)
        if learners and not self._make_durable():
            return
        for number in learners:
            holders = self.coordinator.holders[self.stores[number].shard]
            if not holders or not self._is_there(number) or not self._is_there(holders[0]):
                continue
            state = self.stores[holders[0]].copied()
            self.network.run(lambda: self.watch(), self.network.now + seconds)
            still = self.coordinator.holders[self.stores[number].shard]
            if holders[0] in still and self._is_there(number) and self._is_there(holders[0]):
                self.stores[number].restore(*state)
                self.coordinator.promote(number)

    def _make_durable(self) -> bool:
        """Have all shards store the step at which they stand; return whether they could."""
        if not self.coordinator.is_agreed:
            return False
        for nodes in self.coordinator.holders:
            alive = [node for node in nodes if not self.network.is_dead(node)]
            for node in alive:
                self.stores[node]._make_durable()
            if not alive:
                return False
        return True

    def _is_there(self, number: int) -> bool:
        return not self.network.is_dead(number) and not self.network.is_stopped(number)

    def join(self) -> int:
        """Let one more engine come."""
        number, self._next = self._next, self._next + 1
        context = self.network.context(number)
        plan = ByStep.always(self.plan)
        self._add(number, EngineNode(number, context, plan, self.engine(number)))
        self.coordinator.joined(number)
        return number

    def join_relay(self) -> int:
        """Let one more relay come."""
        number, self._next_relay = self._next_relay, self._next_relay + 1
        context = self.network.context(number)
        self._add(number, RelayNode(number, context, ByStep.always(self.plan)))
        self.coordinator.relay_joined(number)
        return number

    def train(self, steps: int = STEPS, first: int = 1, limit: float = 300.0) -> list[StepResult]:
        """Make the steps from the first on, and return how each ended."""
        outcomes: dict[int, StepResult] = {}
        step, following = first, None
        while step <= steps:
            self._copy_to_learners()
            ended: list[StepResult] = []
            order = following if following and following.step == step else ToyOrder(step)
            following = ToyOrder(step + 1) if self.sends_ahead and step < steps else None
            self.coordinator.start(order, ended.append, following)
            came = self.network.run(lambda ended=ended: bool(self.watch() or ended), limit)
            assert came, f"step {step} hangs at {self.network.now:.1f} s: {self.coordinator.phase}"
            (outcome,) = ended
            match outcome.error:
                case None:
                    before = outcomes.setdefault(step, outcome)
                    assert before.losses == outcome.losses, "a step gives other losses again"
                    step += 1
                case RolledBackError():
                    assert outcome.error.step < step
                    step = outcome.error.step + 1
                case UnrecoverableError(node=node) if node in self._lost:
                    pass  # a shard is lost, and comes back
                case _:
                    raise outcome.error
        return [outcomes[step] for step in range(first, steps + 1)]

    def weights(self) -> list[np.ndarray]:
        """The weights of all shards put together."""
        count = self.plan.shards
        bounds = [WEIGHTS * s // count for s in range(count + 1)]
        firsts = [self.stores[nodes[0]] for nodes in self.coordinator.holders]
        whole = []
        for stage in range(STAGES):
            parts = [s.weights[stage][bounds[n] : bounds[n + 1]] for n, s in enumerate(firsts)]
            whole.append(np.concatenate(parts))
        for store in self.shards:  # what every other node holds is the same
            here = slice(bounds[store.shard], bounds[store.shard + 1])
            for stage in range(STAGES):
                np.testing.assert_array_equal(store.weights[stage][here], whole[stage][here])
            for mine, first in zip(store.weights, firsts[store.shard].weights, strict=True):
                np.testing.assert_array_equal(mine, first)  # moments too
        return whole
