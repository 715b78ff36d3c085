"""Runs with sparse weights in the simulated network: real stores and executors, a made-up model.

The engine has no model: its gradients are a formula of all weights, the rows and the micro-batch,
so that a stale weight, a wrong mask or another order of additions changes the result. What it must
be is computed by a loop over one store without shards or a network.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib

import numpy as np
import torch
from sharded_stores import rule_of, sharded_flash
from sparse_stores import mask_rule, policies, sharded_sparse, sparse_program, sparse_store
from store_programs import flash_store, random_weights

from penstock.collectives.tree_reduce import PartialSum, TreeReduction, partition
from penstock.distributed import run_spec
from penstock.distributed.protocol import (
    Coordinator,
    EngineNode,
    MessageType,
    RelayNode,
    RolledBackError,
    ShardNode,
    Timeouts,
    chunks,
    sparse_chunks,
)
from penstock.distributed.rpc.shard_storage import InProcessShard
from penstock.distributed.simulation import Faults, Links, Network
from penstock.distributed.worker.engine_executor import LocalEngineExecutor
from penstock.distributed.worker.shard_executor import LocalShardExecutor
from penstock.engine import compute
from penstock.sparsity import SparseWeight
from penstock.step.distributed import _TrainingStepRequest
from penstock.step.micro_batches import EngineRows
from penstock.step_schedule import StepSchedule
from penstock.store.flash import go_back

MICRO_BATCHES, STEPS, FIRST_ENGINE, FIRST_RELAY, SEED = 4, 6, 100, 1000, 7
SMALL_CHUNK = 4096  # bytes: several chunks of most weights


def trained_program(policy, stream_dtype=torch.float32):
    """Return a program whose stages return gradients."""
    program = sparse_program(policy, stream_dtype)
    stages = []
    for stage in program.stages:
        positions = tuple(range(len(stage.weights)))
        kind = dataclasses.replace(stage.kind, outputs_grad=(True,), backward_weights=positions)
        stages.append(dataclasses.replace(stage, kind=kind))
    return dataclasses.replace(program, stages=tuple(stages))


class FormulaBatches:
    """Rows of a step: one number per micro-batch."""

    micro_batches = MICRO_BATCHES

    def parts(self, step, engines):
        rows = np.random.default_rng([11, step]).standard_normal(MICRO_BATCHES).astype(np.float32)
        return [
            EngineRows(part, {"x": torch.from_numpy(rows[part.start : part.stop].copy())})
            for part in partition(MICRO_BATCHES, engines)
        ]

    def loss_scale(self, step, parts):
        return 1.0 / MICRO_BATCHES


class FormulaEngine:
    """Computes losses and gradients by a formula."""

    def __init__(self, program) -> None:
        self.program = program
        self.seen: list[tuple[str, int]] = []  # names and versions of masks
        self._loaded = {}

    def begin(self, batch) -> None:
        self._batch = batch
        self._values = [float(rows["x"][0]) for rows in batch.micro_batches]

    def load(self, stage, weights) -> None:
        self._loaded[stage] = dict(zip(self.program.stages[stage].weights, weights, strict=True))

    def forward(self, stage) -> None:
        for name, weight in self._loaded[stage].items():
            values = weight.values if isinstance(weight, SparseWeight) else weight
            if isinstance(weight, SparseWeight):
                self.seen.append((name, weight.version))
                assert weight.index.kept == values.numel()
            mean = float(values.double().mean()) if values.numel() else 0.0
            self._values = [float(np.tanh(value + mean)) for value in self._values]

    def turn(self, stage):
        self.forward(stage)
        return self.backward(stage)

    def backward(self, stage):
        total = TreeReduction(self._batch.total)
        for offset, value in enumerate(self._values):
            number = self._batch.first + offset
            made = tuple(
                self._gradient(name, weight, number, value)
                for name, weight in self._loaded[stage].items()
            )
            total.add(PartialSum(0, number, made))
        self._nodes = total.nodes()
        return self

    def _gradient(self, name, weight, number, value) -> torch.Tensor:
        spec = self.program.weights[name]
        key = [zlib.crc32(name.encode()), self._batch.step, number]
        noise = np.random.default_rng(key).standard_normal(spec.elements, dtype=np.float32)
        whole = torch.from_numpy(noise) * value
        if not isinstance(weight, SparseWeight):
            return (whole + weight.float().reshape(-1)).view(spec.shape)
        positions = torch.from_numpy(weight.index.positions())
        if not weight.dense_gradient:
            return whole[positions] + weight.values.float()
        whole[positions] += weight.values.float()
        return whole.view(spec.shape)

    def wait(self):
        return self._nodes

    def losses(self):
        return list(self._values)


def schedules_of(program, policy):
    """Return the schedules of a run."""
    return StepSchedule.by_step(program, (), policies()[policy])


def alone(policy, steps=STEPS, stream_dtype=torch.float32, **settings):
    """Return the store and the losses of every step without shards, engines or a network."""
    program = trained_program(policy, stream_dtype)
    precision = "bf16" if stream_dtype == torch.bfloat16 else "fp32"
    store = sparse_store(program, mask_rule(policy), precision, **settings)
    store.load(random_weights(program, 1).items())
    engine, batches, losses = FormulaEngine(program), FormulaBatches(), []
    schedules = schedules_of(program, policy)
    executor = LocalEngineExecutor(engine, program, schedules)
    for _ in range(steps):
        (part,) = batches.parts(store.step, 1)
        body = {"first": 0, "count": MICRO_BATCHES, "total": MICRO_BATCHES, "seed": 0, "scale": 1}
        executor.begin(store.step + 1, body, {k: v.numpy() for k, v in part.rows.items()})
        for operation in schedules(store.step + 1).operations:
            engine.load(operation.stage, store.fetch(operation.stage, operation.positions))
            pending = compute(engine, operation)
            if operation.gradients:
                (node,) = pending.wait()
                store.receive(operation.stage, list(node.tensors))
        losses.append(engine.losses())
        store.commit()
    return store, losses


class FlashStorage:
    """The store of a shard on flash, which can go back to a durable step.

    Args:
        stores: of all shards; that of this one is replaced when it is opened again.
        shard: the number of this one.
        opener: opens a store, given its part of the program and its folder.
    """

    def __init__(self, stores, shard, opener) -> None:
        self._stores, self._shard, self._opener = stores, shard, opener

    @property
    def store(self):
        return self._stores[self._shard]

    def held_steps(self):
        return sorted({*self.store.durable_steps, self.store.step})

    def roll_back(self, step) -> None:
        if self.store.step != step:
            self.store.close()
            go_back(self.store.folder, step)
            self._stores[self._shard] = self._opener(self.store.program, self.store.folder)
        assert self.store.step == step


class SparseCluster:
    """Shards, in memory or in `folder` on flash, and engines in a simulated network."""

    def __init__(
        self,
        policy,
        engines,
        shards,
        stream_dtype=torch.float32,
        faults: Faults | None = None,
        folder=None,
        relays=0,
        **settings,
    ) -> None:
        self.program = trained_program(policy, stream_dtype)
        precision = "bf16" if stream_dtype == torch.bfloat16 else "fp32"
        rule = mask_rule(policy)
        if folder is None:
            self.store = sharded_sparse(self.program, shards, rule, precision, **settings)
        else:
            flash = {"masks": rule, "dram_bytes": 2_000_000, **settings}
            self.store = sharded_flash(self.program, folder, shards, single=shards == 1, **flash)
        if folder is None or self.store.is_new:
            self.store.load(random_weights(self.program, 1).items())
        self.rule = rule_of(settings)
        self.schedules = schedules_of(self.program, policy)
        in_small = functools.partial(sparse_chunks, chunk_bytes=SMALL_CHUNK)
        in_larger = functools.partial(chunks, chunk_bytes=4 * SMALL_CHUNK)
        before = run_spec.sparse_chunks, run_spec.chunks
        run_spec.sparse_chunks, run_spec.chunks = in_small, in_larger
        try:
            self.plan = run_spec.transfers_by_step(self.program, self.schedules, shards)
        finally:
            run_spec.sparse_chunks, run_spec.chunks = before
        self.network = Network(Links(1e8, 1e-4), faults, cost=lambda number: 0.002)
        self.events = []
        self.coordinator = Coordinator(
            self.network.context(0),
            [[1 + shard] for shard in range(shards)],
            engines,
            Timeouts(silence=1.0, stall=2.0, job=20.0),
            self.events.append,
            can_replace_engine=lambda: True,
            relays=relays,
        )
        self.network.set_coordinator(self.coordinator)
        self.storage = [InProcessShard(store) for store in self.store.shards]
        if folder is not None:
            opener = functools.partial(flash_store, **flash)
            self.storage = [FlashStorage(self.store.shards, n, opener) for n in range(shards)]
        for shard, storage in enumerate(self.storage):
            work = LocalShardExecutor(storage, shard, self.schedules)
            context = self.network.context(1 + shard)
            self.network.add(1 + shard, ShardNode(1 + shard, shard, context, self.plan, work))
        self.engines: dict[int, FormulaEngine] = {}
        self.sent: list[tuple[int, int, object]] = []
        send = self.network.send

        def note(sender, to, message) -> None:
            self.sent.append((self.store.step, to, message))
            self.on_send(sender, to, message)
            if not self.loses(message):
                send(sender, to, message)

        self.network.send = note
        self.on_send = lambda sender, to, message: None
        self.loses = lambda message: False
        for _ in range(engines):
            self.join()
        for relay in range(FIRST_RELAY, FIRST_RELAY + relays):
            node = RelayNode(relay, self.network.context(relay), self.plan)
            self.network.add(relay, node)
            self.coordinator.relay_joined(relay)

    def join(self) -> int:
        """Let one more engine come."""
        number = FIRST_ENGINE + len(self.engines)
        engine = self.engines[number] = FormulaEngine(self.program)
        work = LocalEngineExecutor(engine, self.program, self.schedules)
        node = EngineNode(number, self.network.context(number), self.plan, work)
        self.network.add(number, node)
        self.coordinator.joined(number)
        return number

    def train(self, steps=STEPS) -> list[list[float]]:
        """Make steps; return their losses."""
        losses = []
        while self.store.step < steps:
            request = _TrainingStepRequest(
                self.program, self.rule, FormulaBatches(), self.store.step, SEED, self.store.masks
            )
            ended = []
            self.coordinator.start(request, ended.append)
            assert self.network.run(lambda ended=ended: bool(ended), self.network.now + 300)
            (outcome,) = ended
            if isinstance(outcome.error, RolledBackError):
                self.store.masks.forget()
                continue
            if outcome.error is not None:
                raise outcome.error
            self.store.masks.follow(request.commit.decision)
            losses.append(list(outcome.losses))
        return losses

    def bytes_of_weights(self, step) -> int:
        """Return the bytes of weights that were sent in a step, after so many commits."""
        return self._bytes_of(MessageType.WEIGHTS, step)

    def bytes_of_gradients(self, step) -> int:
        """Return the bytes of gradients that were sent in a step, after so many commits."""
        return self._bytes_of(MessageType.GRADIENT, step)

    def _bytes_of(self, kind, step) -> int:
        return sum(m.size for at, _, m in self.sent if at == step and m.kind is kind)
