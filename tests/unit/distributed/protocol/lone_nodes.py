"""An engine and a shard alone, with a worker that works only when the test lets it."""

from __future__ import annotations

import time

import numpy as np
import torch

from penstock.collectives.tree_reduce import PartialSum
from penstock.distributed.protocol import COORDINATOR, EngineNode, Job, ShardNode
from penstock.distributed.protocol.messages import Message, MessageType, message_with, pack_arrays
from penstock.distributed.protocol.transfer_schedule import (
    Chunk,
    TransferOperation,
    TransferSchedule,
)
from penstock.step_schedule import ByStep

# Two stages of six weights on two shards; operations: forward of 0, turn of 1, backward of 0.
PIECES = (Chunk(0, 0, 0, 3, 4), Chunk(1, 0, 3, 6, 4))


PLAN = TransferSchedule(
    (
        TransferOperation(0, 0, "forward", PIECES, ()),
        TransferOperation(1, 1, "turn", PIECES, PIECES),
        TransferOperation(2, 0, "backward", PIECES, PIECES),
    ),
    shards=2,
)


SHARDS, ENGINES = [1, 2], [100, 101, 102]


class Runtime:
    """Keeps what is sent; jobs wait until the test has them done."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.jobs: list[Job] = []

    def send(self, to: int, message: Message) -> None:
        self.sent.append((to, message))

    clock = staticmethod(time.perf_counter)

    def work(self, job) -> None:
        self.jobs.append(job)

    def do(self, count: int = 1000) -> None:
        while self.jobs and count:
            job = self.jobs.pop(0)
            count -= 1
            try:
                with job.span:
                    result = job.run()
            except Exception as error:
                job.failed(error)
            else:
                job.then(result)

    def kinds(self) -> list[MessageType]:
        return [message.kind for _, message in self.sent]

    def errors(self) -> list[str]:
        return [m.body["error"] for _, m in self.sent if m.kind is MessageType.FAILURE]


class Engine:
    """Writes down what it is asked to do."""

    def __init__(self) -> None:
        self.done: list = []
        self.fails: Exception | None = None

    def begin(self, step, part, rows) -> None:
        self.done.append(("begin", step))

    def place(self, operation, piece, payload) -> None:
        self.done.append(("place", operation.number, piece.begin))

    def compute(self, operation):
        self.done.append(("compute", operation.number))
        if self.fails is not None:
            raise self.fails
        if operation.sweep == "forward":
            return []
        return [PartialSum(0, 0, (torch.ones(6),))]

    def losses(self) -> list[float]:
        return [1.0]


class Shard(Engine):
    """The same of a shard."""

    def settle(self) -> None:
        self.done.append(("settle",))

    def begin(self, step) -> None:
        self.done.append(("begin", step))

    def held_steps(self) -> list[int]:
        return [0, 1]

    def enter(self) -> None:
        self.done.append(("enter",))

    def roll_back(self, step) -> None:
        self.done.append(("go back", step))

    def fetch(self, operation) -> list[np.ndarray]:
        self.done.append(("fetch", operation.number))
        return [np.zeros(3, np.float32)]

    def receive(self, operation, gradients) -> None:
        self.done.append(("receive", operation.number))
        self.received = gradients

    def prepare(self) -> dict:
        return {"sum": 1}

    def histograms(self, selections) -> np.ndarray:
        self.done.append(("histograms", bytes(selections)))
        return np.frombuffer(b"histograms", np.uint8)

    def commit(self, step, decision, masks) -> dict:
        self.done.append(("commit", step))
        return {"step": step}


def view(epoch: int = 1, engines=ENGINES, shards=SHARDS) -> Message:
    body = {"shards": [[node] for node in shards], "engines": list(engines)}
    return Message(MessageType.VIEW, epoch, COORDINATOR, body=body)


def begin(step: int = 1, epoch: int = 1, **changes) -> Message:
    described, payload = pack_arrays({"x": np.zeros(2, np.float32)})
    body = {"first": 0, "total": 3, "seed": 0, "scale": 1.0, "rows": described} | changes
    fields = {"epoch": epoch, "sender": COORDINATOR, "step": step, "body": body}
    return message_with(payload, kind=MessageType.BEGIN, **fields)


def weights(op: int, chunk: int, epoch: int = 1, step: int = 1, **changes) -> Message:
    sender = changes.pop("sender", 1 + chunk)
    payload = changes.pop("payload", np.zeros(3, np.float32))
    fields = {"epoch": epoch, "sender": sender, "step": step, "op": op, "chunk": chunk}
    return message_with(payload, kind=MessageType.WEIGHTS, **fields | changes)


def gradient(op: int, chunk: int, level: int = 0, index: int = 0, **changes) -> Message:
    payload = changes.pop("payload", np.ones(3, np.float32))
    fields = {"epoch": 1, "sender": 101, "step": 1, "op": op, "chunk": chunk}
    fields |= {"level": level, "index": index}
    return message_with(payload, kind=MessageType.GRADIENT, **fields | changes)


def engine(number: int = 100, engines=ENGINES) -> tuple[EngineNode, Runtime, Engine]:
    context, work = Runtime(), Engine()
    node = EngineNode(number, context, ByStep.always(PLAN), work)
    node.handle(view(engines=engines))
    return node, context, work


def shard(place: int = 0) -> tuple[ShardNode, Runtime, Shard]:
    context, work = Runtime(), Shard()
    node = ShardNode(1 + place, place, context, ByStep.always(PLAN), work)
    node.handle(view())
    return node, context, work
