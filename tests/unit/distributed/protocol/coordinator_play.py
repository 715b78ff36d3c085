"""A coordinator, and the nodes that it speaks to, which the tests play."""

from __future__ import annotations

import numpy as np

from penstock.distributed.protocol import (
    Coordinator,
    EngineInput,
    ProtocolEvent,
    StepResult,
    Timeouts,
    WithoutMasks,
    message_validation,
)
from penstock.distributed.protocol.messages import Message, MessageType

SHARDS, ENGINES = (1, 2), (100, 101, 102)


class Order(WithoutMasks):
    """A step of so many micro-batches, with rows of one number each."""

    def __init__(self, step: int, micro_batches: int = 8) -> None:
        self.step, self.micro_batches = step, micro_batches
        self.forbidden: Exception | None = None

    def parts(self, engines: int) -> list[EngineInput]:
        return [EngineInput({"total": self.micro_batches}, {"x": np.zeros(1)})] * engines

    def report(self, message, shard) -> dict:
        return self.answer(message)

    def answer(self, message) -> dict:
        message_validation.integer(message, "shard", 0, {"shard": 0} | dict(message.body))
        return dict(message.body)

    def difference(self, first, other) -> str | None:
        return None if first == other else "a sum"

    def decide(self, losses, prepared) -> dict:
        if self.forbidden is not None:
            raise self.forbidden
        return {"scale": sum(losses)}


class Play:
    """A coordinator, and the nodes that it speaks to."""

    def __init__(
        self,
        engines=ENGINES,
        wanted: int | None = None,
        agreed: bool = True,
        shards=((1,), (2,)),
        relays=(),
    ) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.happened: list[ProtocolEvent] = []
        self.ended: list[StepResult] = []
        timeouts = Timeouts(silence=1.0, stall=2.0, job=10.0)
        self.coordinator = Coordinator(
            self,
            shards,
            wanted or len(engines) or 1,
            timeouts,
            self.happened.append,
            relays=len(relays),
        )
        self.now = 100.0
        self.coordinator.tick(self.now)
        for engine in engines:
            self.coordinator.joined(engine)
        for relay in relays:
            self.coordinator.relay_joined(relay)
        if agreed and engines:
            self.start(1)
            self.see()
            self.agree([[0]] * len(self.coordinator.membership.holders.nodes))
            self.finish()
            self.ended.clear()

    def send(self, to: int, message: Message) -> None:
        self.sent.append((to, message))

    def take(self, kind: MessageType) -> list[tuple[int, Message]]:
        """The messages of a kind that were sent since the last look at it."""
        found = [entry for entry in self.sent if entry[1].kind is kind]
        self.sent = [entry for entry in self.sent if entry[1].kind is not kind]
        return found

    def start(self, step: int, **fields) -> Order:
        order = Order(step, **fields)
        self.coordinator.start(order, self.ended.append)
        return order

    def say(self, sender: int, kind: MessageType, **fields) -> None:
        step = fields.pop("step", self.coordinator._step)
        epoch = fields.pop("epoch", self.coordinator.epoch)
        self.coordinator.handle(Message(kind, epoch, sender, step, **fields))

    def see(self) -> list[int]:
        """All that are told of the new epoch have seen it; returns them."""
        told = [to for to, _ in self.take(MessageType.VIEW)]
        for node in told:
            self.say(node, MessageType.VIEW_ACK, step=0)
        return told

    def agree(self, steps=([0], [0])) -> list[int]:
        """The shards say what they hold, and go back; returns to which step."""
        for (shard, _), held in zip(self.take(MessageType.HELD_STEPS), steps, strict=True):
            self.say(shard, MessageType.HELD_STEPS, step=0, body={"steps": held})
        asked = self.take(MessageType.ROLLBACK)
        for shard, message in asked:
            self.say(shard, MessageType.ROLLBACK, step=0, body=dict(message.body))
        return [message.body["to"] for _, message in asked]

    def begun(self) -> list[int]:
        return [to for to, _ in self.take(MessageType.BEGIN)]

    def work(self) -> None:
        """The engines of the view send their losses, the shards have all gradients."""
        for engine in self.coordinator.engines:
            self.lose(engine)
        for shard in self.coordinator.membership.holders.nodes:
            self.say(shard, MessageType.PREPARED)

    def lose(self, engine: int) -> None:
        engines = self.coordinator.engines
        place, total = engines.index(engine), self.coordinator._transaction.request.micro_batches
        count = total * (place + 1) // len(engines) - total * place // len(engines)
        self.say(engine, MessageType.LOSSES, body={"losses": [(1.0).hex()] * count})

    def finish(self) -> None:
        self.begun()
        self.work()
        for shard, _ in self.take(MessageType.COMMIT):
            self.say(shard, MessageType.COMMITTED, body={"shard": shard})

    def pass_time(
        self, seconds: float, busy=(), silent=(), beat: float = 0.2, progress=None, received=None
    ) -> None:
        progress, received = progress or {}, received or {}
        for _ in range(round(seconds / beat)):
            for node in self.coordinator.membership.participants:
                if node not in silent:
                    body = {
                        "progress": progress.get(node, 0),
                        "busy": node in busy,
                        "received": received.get(node, 0),
                    }
                    self.say(node, MessageType.HEARTBEAT, epoch=0, body=body)
            self.now += beat
            self.coordinator.tick(self.now, received.get(0, 0))
